"""Whose turn it is on a node's devices, where trainer and workers share them (run.placement = "colocate").

    trainer   alone: state on the devices ► step ► publish ► state in host memory ─┐
    workers   together: engines awake ► all open requests generated ► engines at rest ──┘ in turn, by a lock of the node

The kernel holds the lock, and opens it when its holder dies: nobody waits for a process that is not there.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.files.node_disk import lock_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.files.watch import backoff
from relax_hpc.roles.common import gpus

if TYPE_CHECKING:
    from relax_hpc.roles.training.trainer import TrainerRole


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


class TrainersTurns:
    """The trainer's side: its processes, on all nodes, take turns and give them together. Nothing where it has its own devices."""

    def __init__(self, role: TrainerRole) -> None:
        self._role = role
        self._shared = role.recipe.run.placement == "colocate"
        first = gpus.place(role.rank, role.process.arguments.slurm_task) == 0  # on its node, for all that are there
        self._turn = DeviceLock(role.run, alone=True) if self._shared and first else None
        self._resting = False
        self.seconds = 0.0
        """What taking turns took since this was set to 0, generation not counted."""

    def wait(self) -> None:
        """Until the devices are ours. Raises FileNotFoundError where a successor took over."""
        if not self._shared:
            return
        for pause_s in backoff():
            if self._role.everywhere(self._turn is None or self._turn.take()):
                return
            if not self._role.commit_dir.exists():
                raise FileNotFoundError(self._role.commit_dir)
            self._role.heartbeat("waiting for devices")
            time.sleep(pause_s)

    def take(self) -> None:
        """Have the trainer's state on the devices."""
        if self._resting:
            began = time.perf_counter()
            self.wait()
            self._role.trainer.onload()
            self._resting = False
            self.seconds += time.perf_counter() - began

    def give(self) -> None:
        """Leave them to the workers."""
        if self._shared and not self._resting:
            began = time.perf_counter()
            self._role.trainer.offload()
            self._role.everywhere(True)  # the first of a node gives for all of it
            if self._turn is not None:
                self._turn.give()
            self._resting = True
            self.seconds += time.perf_counter() - began


def lock_of(run: RunDir) -> Path:
    """The file that is locked."""
    return lock_file(run, "devices")
