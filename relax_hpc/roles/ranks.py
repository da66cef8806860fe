"""What the ranks of a role's process group agree on."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from relax_hpc.roles.process import is_full


def meet(via: Path, rank: int, world: int, device: str) -> None:
    """Join the group that commits by way of `via`. device: as the recipe says it."""
    if world > 1:
        backend = "nccl" if torch.cuda.is_available() and device != "cpu" else "gloo"
        store = dist.FileStore(str(via / "rendezvous"), world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def everywhere(flag: bool, world: int) -> bool:
    """Whether it is so on every rank."""
    flags = [flag] * world
    if world > 1:
        dist.all_gather_object(flags, flag)
    return all(flags)


@contextlib.contextmanager
def room_for_all(world: int) -> Iterator[None]:
    """A disk that is full for rank 0 is full for every rank, so that all of them try again."""
    full: list[str | None] = [None]
    try:
        yield
    except Exception as error:
        if not is_full(error):
            raise
        full = [str(error)]
    if world > 1:
        dist.broadcast_object_list(full, src=0)
    if full[0] is not None:
        raise OSError(errno.ENOSPC, full[0])
