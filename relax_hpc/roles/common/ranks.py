"""Agreement among the ranks of a role's process group, and how a group beside the trainer begins and is superseded."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from relax_hpc.files.errors import Damaged, RunError
from relax_hpc.roles.common.process import Exit, RoleProcess, is_full

T = TypeVar("T")


def meet(commit_dir: Path, rank: int, world: int, device: str) -> None:
    """Join the process group of the attempt that commits through `commit_dir`. device: as in the recipe."""
    if world > 1:
        backend = "nccl" if torch.cuda.is_available() and device != "cpu" else "gloo"
        store = dist.FileStore(str(commit_dir / "rendezvous"), world)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def attempt_folder(root: Path, attempt: int) -> Path:
    """Return the folder through which an attempt of a group beside the trainer commits; the next attempt removes it.
    root: the role's folder."""
    return root / "attempts" / f"{attempt:06d}"


def begin_attempt(process: RoleProcess, commit_dir: Path, wait: Callable[[], None]) -> None:
    """Remove the folders of earlier attempts, so that they commit nothing more. `wait` is called while another rank
    makes ours."""
    if process.arguments.rank == 0:
        process.when_room(partial(commit_dir.mkdir, parents=True, exist_ok=True), f"'{commit_dir}'")
        for other in sorted(path for path in commit_dir.parent.iterdir() if path.name.isdigit()):
            if other.name > commit_dir.name:  # we were thought dead before we began
                commit_dir.rmdir()
                raise FileNotFoundError(commit_dir)
            if other != commit_dir:
                gone = commit_dir / f"attempt-{other.name}"
                with contextlib.suppress(FileNotFoundError):
                    os.rename(other, gone)
                shutil.rmtree(gone, ignore_errors=True)
    while not commit_dir.exists():
        wait()


def until_fenced(process: RoleProcess, commit_dir: Path, work: Callable[[], Exit]) -> Exit:
    """Return the exit code of `work`. A superseded process cannot commit: its folder was renamed or removed, so its
    paths lead nowhere."""
    try:
        return work()
    except FileNotFoundError as error:
        if commit_dir.exists():
            raise
        process.log.warning("fenced: a successor took over (%s)", error)
        return Exit.FENCED
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def told(command: T | None, world: int) -> T:
    """Broadcast rank 0's command and return it, on every rank."""
    words: list[T | None] = [command]
    if world > 1:
        dist.broadcast_object_list(words, src=0)
    [found] = words
    assert found is not None
    return found


def gathered(value: T, world: int) -> list[T]:
    """Return the values of all ranks, in order, on every rank; collective."""
    values = [value] * world
    if world > 1:
        dist.all_gather_object(values, value)
    return values


def together(work: Callable[[], T], world: int) -> T:
    """Return `work()` of this rank. A RunError on any rank is raised on every rank, so that all end the same way: as
    Damaged, if that is what one of them met.
    """
    found, error, damaged = list[T](), "", False
    try:
        found.append(work())
    except RunError as mine:
        if world == 1:
            raise
        error, damaged = str(mine), isinstance(mine, Damaged)
    said = first_said(error, world)
    if said:
        raise (Damaged if any(gathered(damaged, world)) else RunError)(said)
    return found[0]


def first_said(error: str, world: int) -> str:
    """Return the first rank's error that is not empty, on every rank; empty if no rank has one."""
    errors = enumerate(gathered(error, world))
    return next((f"rank {rank}: {said}" if world > 1 else said for rank, said in errors if said), "")


@contextlib.contextmanager
def room_for_all(world: int) -> Iterator[None]:
    """Make a disk that is full for rank 0 count as full on every rank, so that all of them try again."""
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
