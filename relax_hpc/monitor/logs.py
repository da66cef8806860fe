"""The logs of a run: the newest of every role, merged by time stamp, and followed while they grow.

RUN/logs/ROLE.ATTEMPT.log, RUN/logs/slurm/NAME-JOB.out ──► Log(role, path) ──► (role, line), … in order of time
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.supervise.lease import holder
from relax_hpc.supervise.supervisor import ENDED, outcome_of

TAIL_BYTES = 256 << 10
"""Bytes read from the end of each log; enough for the last lines that a person asks for."""
FOLLOW_EVERY_S = 0.5
LOOK_FOR_NEW_S = 2.0
"""How often the folder is listed for the logs of further attempts."""
_NAME = re.compile(r"(?P<role>.+?)\.(?P<attempt>\d+)\.log|(?P<slurm>.+)-(?P<job>[\d_]+)\.out|(?P<other>.+)\.log")
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]?\d*")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


class Line(NamedTuple):
    """A line of a log."""

    role: str
    text: str


@dataclass(slots=True)
class Log:
    """The newest log of a role."""

    role: str
    path: Path
    offset: int = 0


def newest(run: RunDir) -> dict[str, Log]:
    """Role -> its newest log; those of Slurm's jobs are called slurm/NAME."""
    found: dict[str, tuple[float, Path]] = {}
    for path in [*run.logs.glob("*.log"), *(run.logs / "slurm").glob("*.out")]:
        name = _NAME.fullmatch(path.name)
        if name is None:
            continue
        role = f"slurm/{name['slurm']}" if name["slurm"] else name["role"] or name["other"]
        changed = path.stat().st_mtime
        if role not in found or changed >= found[role][0]:
            found[role] = (changed, path)
    return {role: Log(role, found[role][1]) for role in sorted(found)}


def choose(run: RunDir, role: str | None) -> dict[str, Log]:
    """The logs of a role, or of all whose names begin with `role`. Raises RunError listing the roles there are."""
    there = newest(run)
    if role is None:
        return there
    if role in there:
        return {role: there[role]}
    found = {name: log for name, log in there.items() if name.startswith((f"{role}-", f"{role}/"))}
    if not found:
        listed = ", ".join(there) or f"none yet in '{run.logs}'"
        raise RunError(f"'{run.root}' has no log of '{role}'; there are: {listed}")
    return found


def last_lines(logs: dict[str, Log], count: int) -> list[Line]:
    """The last lines of all logs together, by time stamp; each log is left at its end, to be followed from there."""
    stamped: list[tuple[str, Line]] = []
    for log in logs.values():
        stamp = ""
        for text in _tail(log):
            match = _STAMP.match(text)
            stamp = match[0].replace(".", ",") if match else stamp
            stamped.append((stamp or _changed(log), Line(log.role, text)))
    stamped.sort(key=lambda pair: pair[0])  # stable: lines without a stamp stay behind the one before them
    return [line for _, line in stamped[-count:]] if count else []


def follow(
    run: RunDir, role: str | None, logs: dict[str, Log], sleep: Callable[[float], None] = time.sleep
) -> Iterator[Line]:
    """Yield new lines as they come, those of further attempts too, until the run is over and silent."""
    looked_at = 0.0
    while True:
        new = [Line(log.role, text) for log in logs.values() for text in _new(log)]
        yield from new
        came = bool(new)
        if time.monotonic() - looked_at > LOOK_FOR_NEW_S:
            looked_at = time.monotonic()
            for name, log in choose(run, role).items():
                if name not in logs or logs[name].path != log.path:
                    logs[name], came = log, True
            outcome = outcome_of(run)
            if not came and outcome is not None and outcome["outcome"] in ENDED and holder(run, glance=True) is None:
                return
        sleep(FOLLOW_EVERY_S)


def _tail(log: Log) -> list[str]:
    size = log.path.stat().st_size
    log.offset = max(0, size - TAIL_BYTES)
    return _new(log)[size > TAIL_BYTES :]  # the first line of a part is cut


def _new(log: Log) -> list[str]:
    """Whole lines added since the last look."""
    with log.path.open("rb") as file:
        file.seek(log.offset)
        data = file.read()
    whole = data.rfind(b"\n") + 1
    log.offset += whole
    return [_clean(line) for line in data[:whole].splitlines()]


def _changed(log: Log) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(log.path.stat().st_mtime))


def _clean(line: bytes) -> str:
    """Decode a line, without what would move the cursor of the reader's terminal."""
    return _CONTROL.sub("", line.decode(errors="replace"))
