"""Processes by identity: a pid with its start time, so that a pid that was given out again is never killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

Identity = tuple[int, int]
"""pid, start time in clock ticks since boot."""

KILL_DEADLINE_S = 10.0


def identity(pid: int) -> Identity | None:
    """None when there is no such process any more; a zombie is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else (pid, int(fields[19]))


def alive(process: Identity | None) -> bool:
    return process is not None and identity(process[0]) == process


def kill(process: Identity | None) -> None:
    """SIGKILL, and wait until it is gone."""
    if process is None or not alive(process):
        return
    os.kill(process[0], signal.SIGKILL)
    deadline = time.monotonic() + KILL_DEADLINE_S
    while alive(process):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {process[0]} lives on {KILL_DEADLINE_S:g} s after SIGKILL")
        time.sleep(0.01)


def kill_with_environment(wanted: Callable[[dict[str, str]], bool]) -> None:
    """Kill what has such an environment, and all that descends from it; again until nothing is found (forks race)."""
    spared = {os.getpid(), *_ancestors(os.getpid())}
    deadline = time.monotonic() + KILL_DEADLINE_S
    while found := _matching(wanted) - spared:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(found)} come back although they are killed")
        for pid in found:
            if process := identity(pid):
                kill(process)


def _matching(wanted: Callable[[dict[str, str]], bool]) -> set[int]:
    parents = {pid: _parent(pid) for pid in _pids()}
    found = {pid for pid in parents if identity(pid) and wanted(_environment(pid))}
    while more := {pid for pid, parent in parents.items() if parent in found and identity(pid)} - found:
        found |= more
    return found


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _ancestors(pid: int) -> Iterator[int]:
    while pid := _parent(pid):
        yield pid


def _environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    return dict(item.split("=", 1) for item in text.split("\0") if "=" in item)
