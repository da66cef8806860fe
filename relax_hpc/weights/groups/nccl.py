"""A group over NCCL: weights go from GPU to GPU, by a child on each side (nccl_process.py); gloo says what comes.

    trainer ──gloo──► what comes ──► worker                           nobody's GPU waits between two versions
    trainer ──slots──► child ──NCCL──► child ──slots──► worker        the bytes

A child belongs to one group, and is killed with it: whatever a member that died or hangs leaves on a GPU ends with the
child. NCCL opens ports without authentication, on the interface that NCCL_SOCKET_IFNAME names; the consequences are
those in gloo.py.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.weights.groups.backend_process import BackendProcess
from relax_hpc.weights.groups.gloo import GlooRendezvous
from relax_hpc.weights.groups.protocol import Arrived, Group, GroupError
from relax_hpc.weights.groups.rendezvous import Called

PROGRAM = Path(__file__).with_name("nccl_process.py")
START_S = 300.0
"""Seconds for a child to import torch, from whatever file system, and to reach its GPU."""


class NcclGroup(Group):
    """An NCCL group, of which rank 0 sends."""

    def __init__(self, control: Group, child: BackendProcess, sends: bool, timeout_s: float) -> None:
        self._control, self.child, self._sends, self._timeout_s = control, child, sends, timeout_s

    def broadcast(
        self, tensors: Sequence[Tensor], timeout_s: float | None = None, arrived: Arrived = lambda _: None
    ) -> None:
        self.child.move(tensors, self._sends, timeout_s or self._timeout_s, arrived=arrived)

    def tell(self, message: Tensor, timeout_s: float | None = None) -> None:
        self._control.tell(message, timeout_s)

    def close(self) -> None:
        self._control.close()
        self.child.kill()


class NcclRendezvous(GlooRendezvous):
    """Forms NCCL groups beside gloo ones. backend: the children's backend of torch.distributed."""

    def __init__(self, run: RunDir, timeout_s: float, commit_dir: Path | None = None, backend: str = "nccl") -> None:
        """Raises RunError when there is no GPU here."""
        super().__init__(run, timeout_s, commit_dir)
        self._backend, self._lock = backend, threading.Lock()
        self._spare: BackendProcess | None = self._child()
        """A child started in advance: a missing GPU is found now, and the first group is quick."""

    def _child(self) -> BackendProcess:
        return BackendProcess("NCCL", PROGRAM, self._backend, start_s=START_S)

    def _connected(self, store: Any, rank: int, workers: int, group: Called) -> Group:
        control = super()._connected(store, rank, workers, group)
        with self._lock:
            child, self._spare = self._spare, None
        try:
            if child is None or not child.alive:
                child = self._child()
        except RunError as error:  # there was a GPU when the meeting was made: what is wrong now may pass
            raise GroupError(str(error)) from error
        limit_s = self._timeout_s + START_S
        try:
            path = str(self._run.weights / f"group-{group.id}")
            child.call("join", limit_s, store=path, rank=rank, world=1 + workers, timeout_s=limit_s, local=group.local)
        except GroupError:
            child.kill()
            raise
        return NcclGroup(control, child, rank == 0, self._timeout_s)
