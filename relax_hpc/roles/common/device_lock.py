"""Whose turn it is on a node's devices, where trainer and workers share them (run.placement = "colocate").

    trainer   alone: state on the devices ► step ► publish ► state in host memory ─┐
    workers   together: engines awake ► all open requests generated ► engines at rest ──┘ in turn, by a lock of the node

The kernel holds the lock, and opens it when its holder dies: nobody waits for a process that is not there.
"""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path

from relax_hpc.files.node_disk import lock_file
from relax_hpc.files.run_dir import RunDir


class DeviceLock:
    """One process's hold on the devices of its node."""

    def __init__(self, run: RunDir, *, alone: bool) -> None:
        """alone: as the trainer has them; else as workers do, who share their turn."""
        self._file = lock_of(run).open("a+")
        self._kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        self.held = False

    def take(self) -> bool:
        """Whether they are ours now; the others may have them still."""
        if not self.held:
            with contextlib.suppress(BlockingIOError):
                # a record lock: children that are forked do not hold it
                fcntl.lockf(self._file, self._kind | fcntl.LOCK_NB)
                self.held = True
        return self.held

    def give(self) -> None:
        """The others may have them."""
        fcntl.lockf(self._file, fcntl.LOCK_UN)
        self.held = False


def lock_of(run: RunDir) -> Path:
    """The file that is locked."""
    return lock_file(run, "devices")
