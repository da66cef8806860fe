"""The lease: who may start trainers. A folder that its holder owns, and that a successor takes over by renaming it.

    LEASE/000002/holder.json          the supervisor that holds the run
    LEASE/000002/i000007/             an incarnation: all that this trainer commits passes through here, by path
    LEASE/000001.over/                superseded: whatever still wants to commit through it fails

One rename fences everything a superseded holder has, whenever it wakes up: no clock, no lock, no server.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from relax_hpc.run_dir import RunDir, RunError, read_json, replace, to_json

SILENT_S = 60.0
"""A holder on another host counts as gone when its lease was not renewed for so long."""
RENEW_S = 5.0
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
        over = self.folder.with_name(self.folder.name + OVER)
        try:
            os.rename(self.folder, over)
        except FileNotFoundError:
            return
        _empty(over)


def acquire(run: RunDir) -> Lease:
    """Take the run's lease. Raises RunError naming the holder when it is held by somebody who lives."""
    numbers = sorted(int(p.name[:6]) for p in run.lease.glob("[0-9]*"))
    for held in (p for p in run.lease.glob("[0-9]*") if not p.name.endswith(OVER)):
        holder = read_json(held / "holder.json")
        if _lives(held, holder):
            raise RunError(
                f"'{run.root}' is held by {_describe(holder)}: a run has one supervisor; watch it with `relax-hpc status {run.root}`, "
                f"end it with `relax-hpc stop {run.root}`"
            )
        try:
            os.rename(held, held.with_name(held.name + OVER))
        except FileNotFoundError:
            raise RunError(
                f"'{run.root}' was taken over by another supervisor at this moment: look again in a minute"
            ) from None
    for over in run.lease.glob(f"*{OVER}"):
        _empty(over)
    number = (numbers[-1] if numbers else 0) + 1
    folder = run.lease / f"{number:06d}"
    try:
        folder.mkdir()
    except FileExistsError:
        raise RunError(f"'{run.root}' was taken by another supervisor at this moment: look again in a minute") from None
    process = psutil.Process()
    about = {
        "host": os.uname().nodename,
        "boot": psutil.boot_time(),
        "pid": process.pid,
        "started": process.create_time(),
        "since": time.time(),
    }
    replace(folder / "holder.json", to_json(about))
    return Lease(run, number, folder, time.time())


def holder(run: RunDir) -> dict[str, Any] | None:
    """Who holds the run now, if it lives."""
    for held in (p for p in run.lease.glob("[0-9]*") if not p.name.endswith(OVER)):
        about: dict[str, Any] | None = read_json(held / "holder.json")
        if _lives(held, about):
            return about or {}
    return None


def _lives(folder: Path, about: dict[str, Any] | None) -> bool:
    if about is None:  # made a moment ago, or its maker died between two calls
        return time.time() - folder.stat().st_mtime < SILENT_S
    if about["host"] == os.uname().nodename:
        try:
            return abs(psutil.Process(about["pid"]).create_time() - about["started"]) < 1.0
        except psutil.NoSuchProcess:
            return False
    return time.time() - (folder / "holder.json").stat().st_mtime < SILENT_S


def _describe(about: dict[str, Any] | None) -> str:
    if about is None:
        return "a supervisor that is just starting"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about["since"]))
    return f"pid {about['pid']} on {about['host']} since {since}"


def _empty(over: Path) -> None:
    """Remove what superseded trainers left half done; incarnation numbers stay, so that they are never given twice."""
    for incarnation in over.glob("i*"):
        for path in incarnation.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
