"""Memory that a process and its child have both mapped: bytes go from it to a group and back without a copy."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_hpc.weights.groups.protocol import BufferPool

ARENA_BYTES = 1 << 30
"""Bytes of the first arena; each further one is as large as all before it. Pages never written to take no memory."""
ALIGNMENT = 64


class Arena:
    """A file that exists in memory alone."""

    def __init__(self, nbytes: int) -> None:
        self.descriptor = os.memfd_create("relax_hpc-weights")
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, nbytes)
        self.memory = torch.frombuffer(mmap.mmap(self.descriptor, nbytes), dtype=torch.uint8)


class SharedBufferPool(BufferPool):
    """Buffers for groups whose child is dead when they break: memory is used again then too."""

    def __init__(self) -> None:
        super().__init__()
        self.arenas: list[Arena] = []
        self._free_from, self._lock = 0, threading.Lock()

    def find(self, data: NDArray[np.uint8]) -> tuple[Arena, int] | None:
        """Find the arena in which these bytes lie, and their place in it; None where they lie in none."""
        address = data.__array_interface__["data"][0]
        for arena in self.arenas:
            if 0 <= (begin := address - arena.memory.data_ptr()) < len(arena.memory):
                return arena, begin
        return None

    def abandon(self, segments: Sequence[Tensor]) -> None:
        self.give_back(segments)

    def _new(self, nbytes: int) -> Tensor:
        with self._lock:
            begin = self._free_from
            if not self.arenas or begin + nbytes > len(self.arenas[-1].memory):
                self.arenas.append(Arena(max(ARENA_BYTES, nbytes, sum(len(arena.memory) for arena in self.arenas))))
                begin = 0
            self._free_from = -(-(begin + nbytes) // ALIGNMENT) * ALIGNMENT
            return self.arenas[-1].memory[begin : begin + nbytes]
