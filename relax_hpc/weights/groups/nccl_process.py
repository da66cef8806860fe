"""The process that speaks NCCL for a trainer or a worker: `python nccl_process.py SOCKET MEMORY PARENT BACKEND`.

    slot ──copy──► GPU ──broadcast──► GPU ──copy──► slot          each slot has a stream of its own, so that they overlap

A broadcast whose sender or receiver is gone would occupy its GPU until its process ends: so it has a process of its
own, which is killed. BACKEND is nccl; with gloo the bytes go without a GPU, from slot to slot.
"""

from __future__ import annotations

import datetime
import functools
import mmap
import os
import socket
import sys
from typing import Any

import torch
import torch.distributed

from relax_hpc.weights.groups.mpi_process import SLOT_BYTES, SLOTS, Backend, run

cuda: Any = torch.cuda
dist: Any = torch.distributed
"""torch.cuda and torch.distributed without types: much of both has none."""


class NcclBackend(Backend):
    """One group over NCCL, of which rank 0 sends."""

    failures = Exception

    def __init__(self, channel: socket.socket, memory: mmap.mmap, backend: str) -> None:
        """Raises RuntimeError when there is no GPU, or no NCCL."""
        super().__init__(channel)
        self._backend, on_gpu = backend, backend == "nccl"
        if on_gpu and not (cuda.is_available() and dist.is_nccl_available()):
            raise RuntimeError(
                f'weights.backend = "nccl" needs a GPU that the trainer and every worker see, and torch {torch.__version__} finds '
                f'{cuda.device_count()} here: use weights.backend = "gloo", or transport = "mpi" or "file"'
            )
        whole: Any = torch.frombuffer(memory, dtype=torch.uint8)
        self._slots = whole.split(SLOT_BYTES)
        if on_gpu:
            cuda.check_error(int(cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)))
            self._staged = torch.empty_like(whole, device="cuda").split(SLOT_BYTES)
            self._streams = [cuda.Stream() for _ in range(SLOTS)]

    def join(self, store: str, rank: int, world: int, timeout_s: float, local: bool) -> None:
        """Find the others through a file, and connect. local: all are on this host."""
        if local:
            os.environ.setdefault(f"{self._backend.upper()}_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            self._backend,
            store=dist.PrefixStore("data", dist.FileStore(store)),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        # NCCL connects in the first broadcast, which shall not be a version's
        dist.broadcast(self._slots[0][:1] if self._backend != "nccl" else self._staged[0][:1], 0)
        if self._backend == "nccl":
            cuda.synchronize()

    def move(self, begin: int, size: int, sends: bool) -> None:
        """Begin to send a slot's bytes to all others, or to receive them from rank 0."""
        slot = begin // SLOT_BYTES
        host = self._slots[slot][:size]
        if self._backend != "nccl":
            self.moves.append((dist.broadcast(host, 0, async_op=True), None))
            return
        staged = self._staged[slot][:size]
        with cuda.stream(self._streams[slot]):
            if sends:
                staged.copy_(host, non_blocking=True)
            work = dist.broadcast(staged, 0, async_op=True)
            work.wait()  # returns at once: it is the stream that waits
            if not sends:
                host.copy_(staged, non_blocking=True)
            (copied := cuda.Event()).record()
        self.moves.append((work, copied))

    def done(self, move: tuple[Any, Any]) -> bool:
        work, copied = move
        if not work.is_completed():
            return False
        work.wait()
        return copied is None or copied.query()


if __name__ == "__main__":
    run(functools.partial(NcclBackend, backend=sys.argv[4]))
