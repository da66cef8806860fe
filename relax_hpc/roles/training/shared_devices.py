"""The trainer's side of devices that it shares with the workers (run.placement = "colocate"): all ranks take and leave them together."""

from __future__ import annotations

import time

from relax_hpc.files.watch import backoff
from relax_hpc.roles.common import gpus
from relax_hpc.roles.common.device_lock import DeviceLock
from relax_hpc.roles.training.state import TrainerState


class SharedDevices:
    """One rank's part in sharing devices. Does nothing if the trainer has devices of its own."""

    def __init__(self, role: TrainerState) -> None:
        self._role = role
        self._shared = role.recipe.run.placement == "colocate"
        first = gpus.place(role.rank, role.process.arguments.slurm_task) == 0  # on its node, for all that are there
        self._lock = DeviceLock(role.run, alone=True) if self._shared and first else None
        self._offloaded = False

    def wait(self) -> None:
        """Wait until the devices are ours. Raises FileNotFoundError where a successor took over."""
        if not self._shared:
            return
        for pause_s in backoff():
            if self._role.everywhere(self._lock is None or self._lock.acquire()):
                return
            if not self._role.commit_dir.exists():
                raise FileNotFoundError(self._role.commit_dir)
            self._role.heartbeat("waiting for devices")
            time.sleep(pause_s)

    def acquire(self) -> None:
        """Bring the trainer's state onto the devices."""
        if self._offloaded:
            began = time.perf_counter()
            self.wait()
            self._role.trainer.onload()
            self._offloaded = False
            self._role.switch_s += time.perf_counter() - began

    def release(self) -> None:
        """Leave the devices to the workers."""
        if self._shared and not self._offloaded:
            began = time.perf_counter()
            self._role.trainer.offload()
            self._role.everywhere(True)  # the first of a node gives for all of it
            if self._lock is not None:
                self._lock.release()
            self._offloaded = True
            self._role.switch_s += time.perf_counter() - began
