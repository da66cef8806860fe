"""Moves a trainer's state out of its devices' memory and back, so that an engine can use the devices meanwhile.

weights, optimizer state ──copied──► host memory (pinned, kept for the next time)      gradients: dropped, they are zeroed anyway
their storages are resized to nothing, and back: every view of them stays what it is, so no backend needs to know
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module


class HostCopies:
    """Host copies of the tensors that were taken off their devices."""

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._dropped: list[tuple[torch.UntypedStorage, int]] = []
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        """Host memory of earlier copies, by its size: pinning it takes long."""

    def offload(self, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> None:
        """Copy `kept` to the host and free their memory; the content of `dropped` is lost. Tensors may share memory."""
        seen: set[int] = set()
        for storage in _storages(kept, seen):
            size = storage.nbytes()
            pinned = storage.device.type == "cuda"
            host = (
                self._free[size].pop() if self._free[size] else torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            )
            host.copy_(_bytes(storage))
            self._away.append((storage, host))
        self._dropped += [(storage, storage.nbytes()) for storage in _storages(dropped, seen)]
        for storage, _ in (*self._away, *self._dropped):
            storage.resize_(0)
        if any(storage.device.type == "cuda" for storage, _ in self._away):
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Give every tensor its memory and content back; dropped ones are zero."""
        for storage, host in self._away:
            storage.resize_(host.numel())
            _bytes(storage).copy_(host)
            self._free[host.numel()].append(host)
        for storage, size in self._dropped:
            storage.resize_(size)
            _bytes(storage).zero_()
        self._away, self._dropped = [], []


def state_of(modules: Iterable[Module], optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """Weights, buffers and optimizer state, master weights too: everything but gradients."""
    found: list[Tensor] = []
    for module in modules:
        # torch's own: Megatron's wrapper has a list of this name
        found += [*module.parameters(), *Module.buffers(module)]
    for optimizer in optimizers:
        found += [p for group in optimizer.param_groups for p in group["params"]]
        found += [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [tensor.detach() for tensor in found]


def gradients_of(modules: Iterable[Module]) -> list[Tensor]:
    """The tensors that hold the parameters' gradients."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    held: list[Any] = [getattr(p, name, None) for p in parameters for name in ("grad", "main_grad")]  # Megatron's
    return [gradient for gradient in held if gradient is not None]


def _storages(tensors: Iterable[Tensor], seen: set[int]) -> Iterator[torch.UntypedStorage]:
    """The tensors' storages, each once; `seen` holds those that are left out, and is added to."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # memory that is not torch's own cannot be resized: a file that is mapped, an optimizer that was read, both on a CPU
        if storage._cdata not in seen and storage.nbytes() and storage.resizable():
            seen.add(storage._cdata)
            yield storage


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
