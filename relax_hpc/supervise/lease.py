"""The lease: who may start trainers. A folder that its holder owns, and that a successor takes over by renaming it.

    LEASE/000002/holder.json          the supervisor that holds the run; the folder appears with it, by one rename
    LEASE/000002/i000007/             an incarnation: all that this trainer commits passes through here, by path
    LEASE/000001.5c0ffee5.over/       superseded: whatever still wants to commit through it fails; removed soon
    LEASE/000001.gone, i000006.gone   numbers of what was removed: none is given twice

One rename fences everything a superseded holder has, whenever it wakes up: no clock, no lock, no server.
Other names in LEASE are nobody's: they are left alone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import is_there, names, read_json, rename_once, replace, sync_folder, to_json, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.slurm.client import ALIVE, job_state, own_job
from relax_hpc.supervise.heartbeat_monitor import HeartbeatMonitor

SILENT_S = 60.0
"""A holder on another host counts as gone when its lease was not seen to be renewed for this long."""
RENEW_S = 5.0
OLD_S = 3 * RENEW_S
"""Used in place of SILENT_S where the lease's time is old by our clock too: only a clock wrong by minutes could still
speak for the holder.
"""
GLANCE_S = RENEW_S + 1
"""Used in place of SILENT_S where the holder is only to be shown to a person."""
LOOK_S = 0.5
OVER = ".over"
GONE = ".gone"
"""Suffix of the file that keeps the number of a lease or an incarnation whose folder was removed."""
_HELD = re.compile(r"\d{6}")
_LEASE = re.compile(rf"\d{{6}}(\.\w+\{OVER}|\{GONE})?")
_INCARNATION = re.compile(r"i\d{6}(\.\w+)?")
_DRAFT = re.compile(r"\.\w{32}")
_renewals: dict[Path, HeartbeatMonitor] = {}
"""Leases of other hosts that this process has looked at, each with the monitor of its time."""
_given_up = set[str]()
"""Leases that this process began to take when the file system failed; a further attempt takes them over."""


@dataclass(slots=True)
class Lease:
    """A held lease."""

    run: RunDir
    number: int
    folder: Path
    renewed: float = float("-inf")
    """When it was last renewed, by time.monotonic()."""

    def renew(self) -> bool:
        """Renew the lease; return False when a successor has taken over. Call it often: it writes only every few seconds.

        Raises OSError when the file system cannot say.
        """
        if time.monotonic() - self.renewed > RENEW_S:
            try:
                os.utime(self.folder / "holder.json")
            except FileNotFoundError:
                return False
            self.renewed = time.monotonic()
            return True
        return is_there(self.folder)

    def commit(self, path: Path, data: bytes) -> None:
        """Put a file of the run in place, through the lease's folder.

        Raises RunError, and changes nothing, when superseded.
        """
        try:
            replace(path, data, commit_dir=self.folder)
        except FileNotFoundError as error:
            raise self.superseded() from error

    def superseded(self) -> RunError:
        return RunError(f"another supervisor has taken over '{self.run.root}': this one ends its processes and leaves")

    def new_incarnation(self) -> Path:
        """Fence the previous incarnation and make the folder of the next one.

        Raises FileNotFoundError when superseded.
        """
        folders = (self.run.lease, *(lease for lease in _leases(self.run) if not lease.name.endswith(GONE)))
        number = max((_number(name) for folder in folders for name in _incarnations(folder)), default=0) + 1
        for name in _incarnations(self.folder):
            if "." not in name:
                old = self.folder / name
                over = old.with_name(name + OVER)
                rename_once(old, over, partial(is_there, over))
        folder = self.folder / f"i{number:06d}"
        folder.mkdir(exist_ok=True)  # only we make folders here: if it exists it is ours, and the reply was lost
        return folder

    def release(self) -> None:
        """Give the lease up. What lies in its folders was committed already, or is of no use."""
        with contextlib.suppress(FileNotFoundError):
            _supersede(self.folder)
        _clear_away(self.run)


def acquire(run: RunDir, asked: Callable[[], bool] = lambda: False) -> Lease:
    """Take the run's lease. Raises RunError naming the holder when a living supervisor holds it.

    May wait up to a minute to see whether a holder on another host still renews it; once `asked` says that this process
    is to end, it waits no longer, and the holder counts as alive.
    """
    # Before looking who holds it: whoever takes it meanwhile makes this very folder, and one of us fails.
    number = max((int(lease.name[:6]) for lease in _leases(run)), default=0) + 1
    for held in _held(run):
        holder = _read(held)
        if _lives(held, holder, asked=asked):
            raise _refusal(run, holder)
        with contextlib.suppress(FileNotFoundError):  # somebody else has: the number decides between us
            _supersede(held)
    _clear_away(run)
    folder, token = run.lease / f"{number:06d}", uuid.uuid4().hex
    process = psutil.Process()
    about = {
        "host": os.uname().nodename, "pid": process.pid, "started": _started(process), "since": time.time(),
        "job": own_job(), "restart": os.environ.get("SLURM_RESTART_COUNT", "0"), "token": token,
    }  # fmt: skip
    _given_up.add(token)  # removed once all went well
    if not _appears(run.lease / f".{token}", folder, about):
        raise _overtaken(run)
    if any(lease != folder and int(lease.name[:6]) >= number for lease in _leases(run)):
        with contextlib.suppress(FileNotFoundError):
            _supersede(folder)  # somebody held it and gave it up since we looked: numbers are not given twice
        raise _overtaken(run)
    for name in os.listdir(run.lease):
        if _DRAFT.fullmatch(name):  # left by a process that was killed, or that comes too late now
            shutil.rmtree(run.lease / name, ignore_errors=True)
    _given_up.remove(token)
    return Lease(run, number, folder, time.monotonic())


def _appears(draft: Path, folder: Path, about: dict[str, Any]) -> bool:
    """Make a lease's folder with its holder in it, in one step; return False when another process was faster."""
    try:
        draft.mkdir(exist_ok=True)  # its name is ours alone: if it exists, the reply was lost
        write_file(draft / "holder.json", to_json(about))
        sync_folder(draft)
        rename_once(draft, folder, lambda: (_read(folder) or {}).get("token") == about["token"])
        sync_folder(folder.parent)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT):
            return False
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return True


class Holder:
    """The lease as others see it: its holder, and how long it has been silent by our own clock."""

    def __init__(self, run: RunDir) -> None:
        self._run, self._heartbeat_monitor = run, HeartbeatMonitor()
        self._seen: tuple[str, int] | None = None
        self.job: str | None = None
        """The Slurm job of the holder."""

    def silent_for(self) -> float:
        """Seconds since the lease was last seen to change hands or be renewed, while we looked."""
        held = next(iter(_held(self._run)), None)
        with contextlib.suppress(FileNotFoundError):
            seen = (held.name, _renewed_at(held / "holder.json")) if held else None
            if seen != self._seen:
                self._seen, self.job = seen, (_read(held) or {}).get("job") if held else None
        return self._heartbeat_monitor.look({"lease": self._seen})["lease"]


def refuse_if_held(run: RunDir) -> None:
    """Raise RunError naming the holder when somebody holds the run: nothing of it may be changed then."""
    about = holder(run)
    if about is not None:
        raise _refusal(run, about)


def holder(run: RunDir, *, glance: bool = False) -> dict[str, Any] | None:
    """Return the run's holder if it is alive, else None.

    Whether a holder on another host lives can only be seen by waiting; `glance` limits the wait to a few seconds.
    """
    for held in _held(run):
        about = _read(held)
        if _lives(held, about, glance):
            return about
    return None


def _refusal(run: RunDir, about: dict[str, Any] | None) -> RunError:
    return RunError(
        f"'{run.root}' is held by {_describe(about)}: a run has one supervisor; watch it with `relax-hpc status {run.root}`, "
        f"end it with `relax-hpc stop {run.root}`"
    )


def _overtaken(run: RunDir) -> RunError:
    about = next((about for held in _held(run) if (about := _read(held))), None)
    if about is not None:
        return _refusal(run, about)
    return RunError(f"'{run.root}' was taken and given up by another supervisor at this moment: try again")


def _leases(run: RunDir) -> list[Path]:
    """All leases there have been: their folders, and the files that keep the numbers of those that were removed."""
    return [run.lease / name for name in names(run.lease) if _LEASE.fullmatch(name)]


def _held(run: RunDir) -> list[Path]:
    """The folders of the leases that nobody has taken over."""
    return [lease for lease in _leases(run) if _HELD.fullmatch(lease.name)]


def _incarnations(lease: Path) -> list[str]:
    return [name for name in names(lease) if _INCARNATION.fullmatch(name)]


def _number(incarnation: str) -> int:
    return int(incarnation[1:7])


def _read(lease: Path) -> dict[str, Any] | None:
    """Read a lease's record of its holder: empty where it is damaged, None where there is no such file."""
    try:
        about = read_json(lease / "holder.json")
    except (ValueError, NotADirectoryError):
        return {}
    return about if about is None or isinstance(about, dict) else {}


def _lives(
    lease: Path, about: dict[str, Any] | None, glance: bool = False, asked: Callable[[], bool] = lambda: False
) -> bool:
    """Return True if the holder is still at work, or if we were asked to end before that could be seen.

    A lease appears together with its holder's name: without one, it has none.
    """
    if about is None or about.get("token") in _given_up:
        return False
    if about.get("host") == os.uname().nodename:
        return _is_process(about["pid"], about["started"])
    if about.get("job") and _ended(about["job"], about["restart"]):
        return False
    try:
        young = abs(time.time() - _renewed_at(lease / "holder.json") / 1e9) < SILENT_S
        if glance:
            return young or _is_renewed(lease / "holder.json", GLANCE_S)
        limit_s = SILENT_S if young else OLD_S
        logging.getLogger("lease").warning(
            "'%s' was held by %s: looking for up to %.0f s whether it still is", lease, _describe(about), limit_s
        )
        return _is_renewed(lease / "holder.json", limit_s, asked)
    except FileNotFoundError:  # the lease was given up while we looked
        return False


def _is_process(pid: int, started: float) -> bool:
    """Return True if this process of this machine lives. started: seconds from boot to its start."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:  # killed, and its parent has not looked yet
            return False
        return bool(abs(_started(process) - started) < 1.0)
    except psutil.NoSuchProcess:
        return False


def _is_renewed(path: Path, limit_s: float, asked: Callable[[], bool] = lambda: False) -> bool:
    """Return True if the lease is renewed, or `asked` says to look no longer, before it has stayed the same for `limit_s`
    seconds of our own clock, earlier looks included.
    """
    monitor = _renewals.setdefault(path, HeartbeatMonitor())
    while True:
        before, renewed = monitor.last(path), _renewed_at(path)
        silent_s = monitor.look({path: renewed})[path]
        if before not in (None, renewed) or asked():
            return True
        if silent_s >= limit_s:
            return False
        time.sleep(LOOK_S)


def _renewed_at(path: Path) -> int:
    """When a lease was renewed, in ns of the file server's clock. Opening the file has NFS ask the server, not a cache."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.fstat(handle).st_mtime_ns
    finally:
        os.close(handle)


def _ended(job: str, restart: str) -> bool:
    """Return True if Slurm says that the job is over, or if we are ourselves a later start of it."""
    if job == own_job():
        return restart != os.environ.get("SLURM_RESTART_COUNT", "0")
    state = job_state([job])[job]
    return state is not None and state not in ALIVE


def _started(process: psutil.Process) -> float:
    """Seconds from the machine's boot to the start of a process. A time of day would change when the clock is set."""
    return float(process.create_time() - psutil.boot_time())


def _supersede(folder: Path) -> Path:
    """Rename a lease's folder, which fences all commits through it. Raises FileNotFoundError when it was renamed already."""
    over = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}{OVER}")
    rename_once(folder, over, lambda: is_there(over))
    return over


def _describe(about: dict[str, Any] | None) -> str:
    if not about:
        return "a supervisor that cannot be named (its holder.json is damaged)"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about["since"]))
    return f"pid {about['pid']} on {about['host']} since {since}"


def _clear_away(run: RunDir) -> None:
    """Remove the folders of superseded leases, with what their trainers left half done.

    Who has one, or a folder in it, still in a cache, as NFS clients do, could go on to commit through it, or to start a
    trainer that does. Files keep the numbers, so that none is given twice.
    """
    for over in (lease for lease in _leases(run) if lease.name.endswith(OVER)):
        for number in (over.name[:6], *(name[:7] for name in _incarnations(over))):
            (run.lease / f"{number}{GONE}").touch()
        sync_folder(run.lease)
        _remove(over)


def _remove(folder: Path) -> None:
    """Remove a superseded folder. Raises OSError where the file system fails: what stays there may be committed through."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        # Another process removes it too; a file that is open on this machine stays on NFS.
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EBUSY):
            raise
        shutil.rmtree(folder, ignore_errors=True)
