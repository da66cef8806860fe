"""A lock on a node's devices, where trainer and workers share them (run.placement = "colocate").

    trainer   alone: state on the devices ► step ► publish ► state in host memory ────────────┐
    workers   together: engines onloaded ► all open requests generated ► engines offloaded ──┘ in turn, by the lock of the node

The kernel holds the lock and opens it when its holder dies, so nobody waits for a process that is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
from pathlib import Path

from relax_hpc.files.node_disk import lock_file
from relax_hpc.files.run_dir import RunDir


class DeviceLock:
    """One process's lock on the devices of its node."""

    def __init__(self, run: RunDir, *, alone: bool) -> None:
        """alone: lock exclusively, as the trainer does; else together with the other workers."""
        self._file = lock_of(run).open("a+")
        self._kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        self.held = False

    def acquire(self) -> bool:
        """Try to take the lock; return True if it is ours now, False while the others have it."""
        if not self.held:
            with contextlib.suppress(BlockingIOError):
                # a record lock: children that are forked do not hold it
                fcntl.lockf(self._file, self._kind | fcntl.LOCK_NB)
                self.held = True
        return self.held

    def release(self) -> None:
        """Release the lock, so that the others may have the devices."""
        fcntl.lockf(self._file, fcntl.LOCK_UN)
        self.held = False


def lock_of(run: RunDir) -> Path:
    """Return the path of the file that is locked."""
    return lock_file(run, "devices")
