"""[weights]: how new versions reach the rollout workers, with the keys of each transport."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Union

from pydantic import PositiveFloat, PositiveInt, Tag, model_validator

from relax_hpc.recipe.tables.table import Key, Table, conflict, named


class FileWeights(Table):
    """Safetensors files in the run directory, checksummed, published like a shard. Any worker can read them at any
    time."""

    transport: Literal["file"] = Key("file", "Files in the run directory.")
    node_cache: Path | None = Key(
        None,
        "A directory in memory (such as /dev/shm): the first worker of a node copies a version there, the others map it.",
        resume=True,
    )
    full_every: PositiveInt = Key(
        1, "One of this many versions is written whole, the others as their changes (lossless); above 1 needs `node_cache`.", resume=True
    )  # fmt: skip

    @model_validator(mode="after")
    def _has_a_base(self) -> FileWeights:
        if self.full_every > 1 and self.node_cache is None:
            raise conflict(
                f"weights.full_every = {self.full_every} writes changes, and what they are against is kept in memory: "
                'set weights.node_cache (such as "/dev/shm"), or weights.full_every = 1'
            )
        return self


class CollectiveWeights(Table):
    """Broadcast in a group of the trainer and the workers; a worker that misses it reads files."""

    transport: Literal["collective"] = Key("collective", "A group of torch.distributed.")
    backend: Literal["gloo", "nccl"] = Key(
        "gloo",
        "`gloo`: from host memory to host memory. `nccl`: from GPU to GPU, trainer and workers on GPUs of their own; the first "
        "one of each then has a further process, of some hundred MB.",
        resume=True,
    )
    timeout_s: PositiveFloat = Key(
        30.0, "A worker that does not take part for so long is left out, and the group formed again.", resume=True
    )

    @property
    def speaks(self) -> str:
        """The library by which the group's members communicate."""
        return self.backend


class MpiWeights(Table):
    """Messages by MPI (mpi4py and an MPI of the MPICH family) from the trainer to each worker; a worker that misses
    them reads files."""

    transport: Literal["mpi"] = Key(
        "mpi", "MPI, in which every process is a job of its own: one that dies ends no other."
    )
    timeout_s: PositiveFloat = Key(
        30.0, "A worker that does not take part for so long is left out, and the group formed again.", resume=True
    )

    @property
    def speaks(self) -> str:
        """The library by which the group's members communicate."""
        return "mpi"


AnyWeights = Annotated[
    Union[
        Annotated[FileWeights, Tag("file")],
        Annotated[CollectiveWeights, Tag("collective")],
        Annotated[MpiWeights, Tag("mpi")],
    ],
    named("transport", default=lambda v: "file"),
]
