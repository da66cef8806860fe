"""Files in which a role reports on itself: a heartbeat (it lives, and how far it is), metrics, and a log for a person.

One writer a file, so that nothing needs a lock: heartbeats/ROLE.json is replaced, metrics/ROLE.jsonl is appended to.
Heartbeats are written by the role's own main thread at points of progress: a role that hangs falls silent.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from relax_hpc.files.publish import read_json, replace, to_json
from relax_hpc.files.run_dir import RunDir

HEARTBEAT_EVERY_S = 0.5
"""Shortest time between two heartbeats of a role: each is a file operation on a shared file system."""


class Orphaned(SystemExit):
    """The supervisor that started this process is gone; whichever supervisor takes over starts its own roles."""


class Telemetry:
    """Heartbeat, metrics and log of one role. `role` is a unique name such as 'trainer-0' or 'rollout-3'."""

    def __init__(
        self,
        run: RunDir,
        role: str,
        attempt: int,
        supervisor_pid: int | None = None,
        quiet_s: float = HEARTBEAT_EVERY_S,
    ) -> None:
        """quiet_s: longest time between two heartbeats while nothing in them changes."""
        self.role, self.attempt = role, attempt
        self.log = logging.getLogger(role)
        self._heartbeat_path = run.heartbeats / f"{role}.json"
        self._metrics_path = run.metrics / f"{role}.jsonl"
        self._trained_path = run.metrics / f"{role}.trained.jsonl"
        self._supervisor, self._quiet_s = supervisor_pid, max(quiet_s, HEARTBEAT_EVERY_S)
        self._looked_at = self._last_heartbeat = float("-inf")
        self._said: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._checked: set[Path] = set()

    def heartbeat(self, state: str | None = None, *, at_once: bool = False, **progress: Any) -> None:
        """Say that the role lives, and how far it is; cheap enough for any loop. A new state is written at once."""
        changed = at_once or (state is not None and state != self._last.get("state"))
        self._last |= {k: v for k, v in {"state": state, **progress}.items() if v is not None}
        now = time.monotonic()
        if not changed and now - self._looked_at < HEARTBEAT_EVERY_S:
            return
        self._looked_at = now
        if self._supervisor is not None and os.getppid() != self._supervisor:
            raise Orphaned(f"{self.role}: supervisor {self._supervisor} is gone")
        if not changed and self._last == self._said and now - self._last_heartbeat < self._quiet_s:
            return
        self._last_heartbeat, self._said = now, dict(self._last)
        who = {"role": self.role, "attempt": self.attempt, "pid": os.getpid(), "host": os.uname().nodename}
        try:
            replace(self._heartbeat_path, to_json({**who, "time": time.time(), **self._last}), durable=False)
        except OSError as error:  # a full disk must not take a healthy role down; the supervisor sees the silence
            self.log.warning("heartbeat not written: %s", error)

    @property
    def state(self) -> str | None:
        """The state in the role's last heartbeat; None before the first."""
        return self._last.get("state")

    def metrics(self, kind: str, **values: Any) -> None:
        """Append a line of metrics, or an event. Numbers that are not finite become null, and `non_finite` names them."""
        record = {"time": round(time.time(), 3), "attempt": self.attempt, "kind": kind, **values}
        self._append(self._metrics_path, record)

    def trained(self, step: int, incarnation: int, ids: Iterable[str]) -> None:
        """Record which samples entered the loss of a step, once the step is made; an audit counts these records."""
        samples: dict[str, list[int]] = {}
        for name in ids:
            request, _, index = name.partition("/")
            samples.setdefault(request, []).append(int(index))
        self._append(self._trained_path, {"step": step, "incarnation": incarnation, "samples": samples})

    def _append(self, path: Path, record: dict[str, Any]) -> None:
        # One write of a whole line: a kill can cut a line short, and a leading newline keeps it from spoiling the next.
        line = _json(record) + "\n"
        try:
            with path.open("a+b") as file:
                if file.tell() and path not in self._checked:
                    file.seek(-1, os.SEEK_END)
                    line = line if file.read(1) == b"\n" else "\n" + line
                self._checked.add(path)
                file.write(line.encode())
        except OSError as error:
            self._checked.discard(path)  # part of the line may have been written
            self.log.warning("metrics not written: %s", error)


def _json(record: dict[str, Any]) -> str:
    """Format `record` as one line of JSON, which has no NaN and no infinities: see Telemetry.metrics."""
    try:
        return json.dumps(record, allow_nan=False)
    except ValueError:
        parts = {name: json.dumps(value) for name, value in record.items()}
        # constants that json writes and JSON lacks: NaN, Infinity, -Infinity
        whole = {name: json.loads(text, parse_constant=lambda _: None) for name, text in parts.items()}
        return json.dumps({**whole, "non_finite": [n for n, text in parts.items() if json.dumps(whole[n]) != text]})


def read_heartbeat(run: RunDir, role: str) -> dict[str, Any] | None:
    """Read a role's last heartbeat. None before the first, where a loss of power left half of it, and for anything else."""
    try:
        heartbeat = read_json(run.heartbeats / f"{role}.json")
    except (ValueError, IsADirectoryError):
        return None
    return heartbeat if isinstance(heartbeat, dict) else None


def read_metrics(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Read the whole lines of a metrics file from byte `offset` on; returns them and the offset to continue from."""
    found = list(iter_metrics(path, offset))
    return [record for record, _ in found], found[-1][1] if found else offset


def iter_metrics(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Iterate over the whole lines of a metrics file from byte `offset` on, each with the offset behind it."""
    try:
        file = path.open("rb")
    except (FileNotFoundError, IsADirectoryError):
        return
    with file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            with contextlib.suppress(ValueError):  # a line cut by a kill, then continued by the next attempt
                yield json.loads(line), offset


def set_up_logging(role: str) -> None:
    """Send a role's log to stderr, which its launcher points at logs/ROLE.ATTEMPT.log."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s {role} %(levelname)s %(message)s", force=True
    )
