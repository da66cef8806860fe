"""The lease: who may start trainers. A folder that its holder owns, and that a successor takes over by renaming it.

    LEASE/000002/holder.json          the supervisor that holds the run
    LEASE/000002/i000007/             an incarnation: all that this trainer commits passes through here, by path
    LEASE/000001.5c0ffee5.over/       superseded: whatever still wants to commit through it fails

One rename fences everything a superseded holder has, whenever it wakes up: no clock, no lock, no server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from relax_hpc.launch.slurm.queue_state import ALIVE, job_state, own_job
from relax_hpc.run_dir import RunDir, RunError, read_json, replace, to_json

SILENT_S = 60.0
"""A holder on another host counts as gone when its lease was not renewed for so long."""
RENEW_S = 5.0
BLIND_S = 5.0
"""When two looks are so far apart, what was not seen in between counts for nothing."""
OVER = ".over"


@dataclass(slots=True)
class Lease:
    """A held lease."""

    run: RunDir
    number: int
    folder: Path
    renewed: float = 0.0

    def renew(self) -> bool:
        """Say that the holder lives; False when a successor has taken over. Call it often: it writes every few seconds."""
        if not self.folder.exists():
            return False
        if time.time() - self.renewed > RENEW_S:
            try:
                os.utime(self.folder / "holder.json")
            except FileNotFoundError:
                return False
            self.renewed = time.time()
        return True

    def commit(self, path: Path, data: bytes) -> None:
        """Put a file of the run in place, through the lease's folder. Raises RunError when superseded: nothing changes then."""
        try:
            replace(path, data, via=self.folder)
        except FileNotFoundError as error:
            raise self.superseded() from error

    def superseded(self) -> RunError:
        return RunError(f"another supervisor has taken over '{self.run.root}': this one ends its processes and leaves")

    def new_incarnation(self) -> Path:
        """Fence the incarnation before, and make the folder of the next one. Raises FileNotFoundError when superseded."""
        found = [int(p.name[1:7]) for p in self.run.lease.glob("*/i*")]
        for old in self.folder.glob("i??????"):
            os.rename(old, old.with_name(old.name + OVER))
        folder = self.folder / f"i{max(found, default=0) + 1:06d}"
        folder.mkdir()
        return folder

    def release(self) -> None:
        """Give the lease up; what lies in its folders was committed or is of no use."""
        with contextlib.suppress(FileNotFoundError):
            _empty(_supersede(self.folder))


def acquire(run: RunDir) -> Lease:
    """Take the run's lease. Raises RunError naming the holder when it is held by somebody who lives."""
    # Before looking who holds it: whoever takes it meanwhile makes this very folder, and one of us fails.
    number = max((int(p.name[:6]) for p in run.lease.glob("[0-9]*")), default=0) + 1
    for held in (p for p in run.lease.glob("[0-9]*") if not p.name.endswith(OVER)):
        holder = read_json(held / "holder.json")
        if _lives(held, holder):
            raise _held(run, holder)
        try:
            _supersede(held)
        except FileNotFoundError:
            raise RunError(
                f"'{run.root}' was taken over by another supervisor at this moment: look again in a minute"
            ) from None
    for over in run.lease.glob(f"*{OVER}"):
        _empty(over)
    folder = run.lease / f"{number:06d}"
    process = psutil.Process()
    about = {
        "host": os.uname().nodename, "pid": process.pid, "started": _started(process), "since": time.time(),
        "job": own_job(), "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
    }  # fmt: skip
    try:
        folder.mkdir()
        if any(p != folder and int(p.name[:6]) >= number for p in run.lease.glob("[0-9]*")):
            folder.rmdir()  # somebody held it and gave it up since we looked: numbers are not given twice
            raise FileExistsError(folder)
        replace(folder / "holder.json", to_json(about))
    except (FileExistsError, FileNotFoundError):  # somebody was faster; or we slept, and somebody thought us dead
        raise RunError(f"'{run.root}' was taken by another supervisor at this moment: look again in a minute") from None
    return Lease(run, number, folder, time.time())


class Holder:
    """The lease as others see it: who holds it, and since when it is silent by our own clock (clocks of nodes differ)."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._seen: tuple[str, float] | None = None
        self._changed = self._looked_at = time.monotonic()
        self.job: str | None = None
        """The Slurm job of the holder."""

    def silent_for(self) -> float:
        """Seconds since the lease was last seen to change hands or be renewed, while we looked."""
        now = time.monotonic()
        if now - self._looked_at > BLIND_S:  # we stood still, or the file system did
            self._changed += now - self._looked_at
        self._looked_at = now
        held = next((p for p in self._run.lease.glob("[0-9]*") if not p.name.endswith(OVER)), None)
        with contextlib.suppress(FileNotFoundError):
            seen = (held.name, (held / "holder.json").stat().st_mtime) if held else None
            if seen != self._seen:
                self._seen, self._changed = seen, time.monotonic()
                self.job = (read_json(held / "holder.json") or {}).get("job") if held else None
        return time.monotonic() - self._changed

    def forget(self) -> None:
        """Take the holder for gone."""
        self.job = None


def refuse_if_held(run: RunDir) -> None:
    """Raises RunError naming the holder when somebody holds the run: nothing of it may be changed then."""
    about = holder(run)
    if about is not None:
        raise _held(run, about or None)


def _held(run: RunDir, about: dict[str, Any] | None) -> RunError:
    return RunError(
        f"'{run.root}' is held by {_describe(about)}: a run has one supervisor; watch it with `relax-hpc status {run.root}`, "
        f"end it with `relax-hpc stop {run.root}`"
    )


def holder(run: RunDir) -> dict[str, Any] | None:
    """Who holds the run now, if it lives."""
    for held in (p for p in run.lease.glob("[0-9]*") if not p.name.endswith(OVER)):
        about: dict[str, Any] | None = read_json(held / "holder.json")
        if _lives(held, about):
            return about or {}
    return None


def _lives(folder: Path, about: dict[str, Any] | None) -> bool:
    if about is not None and about["host"] == os.uname().nodename:
        try:
            process = psutil.Process(about["pid"])
            if process.status() == psutil.STATUS_ZOMBIE:  # killed, and its parent has not looked yet
                return False
            return bool(abs(_started(process) - about["started"]) < 1.0)
        except psutil.NoSuchProcess:
            return False
    if about is not None and about.get("job") and _ended(about["job"], about["restart"]):
        return False
    # Without holder.json: made a moment ago, or its maker died between two calls.
    path = folder if about is None else folder / "holder.json"
    try:
        return time.time() - path.stat().st_mtime < SILENT_S
    except FileNotFoundError:  # given up while we looked
        return False


def _ended(job: str, restart: str) -> bool:
    """Whether Slurm says that a job is over, or we are in a later start of it ourselves."""
    if job == own_job():
        return restart != os.environ.get("SLURM_RESTART_COUNT", "0")
    state = job_state([job])[job]
    return state is not None and state not in ALIVE


def _started(process: psutil.Process) -> float:
    """Seconds from the machine's boot to the start of a process: the time of day would change when the clock is set."""
    return float(process.create_time() - psutil.boot_time())


def _supersede(folder: Path) -> Path:
    """Rename a lease's folder, which fences all that commits through it. Raises FileNotFoundError when somebody did."""
    over = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}{OVER}")
    os.rename(folder, over)
    return over


def _describe(about: dict[str, Any] | None) -> str:
    if about is None:
        return "a supervisor that is just starting"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about["since"]))
    return f"pid {about['pid']} on {about['host']} since {since}"


def _empty(over: Path) -> None:
    """Remove what superseded trainers left half done; incarnation numbers stay, so that they are never given twice."""
    for incarnation in over.glob("i*"):
        for path in incarnation.iterdir():
            # Several may clean up at once.
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
