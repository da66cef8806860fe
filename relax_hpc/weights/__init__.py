"""Weights: versions of the policy on their way from the trainer to the rollout workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.weights import CollectiveWeights, MpiWeights
from relax_hpc.run_dir import RunDir
from relax_hpc.weights.base import DamagedWeights, Export, Publisher, Receiver, Version, WeightsError
from relax_hpc.weights.collective import CollectivePublisher, CollectiveReceiver, Meeting
from relax_hpc.weights.file import FilePublisher, FileReceiver
from relax_hpc.weights.gloo import GlooMeeting
from relax_hpc.weights.mpi import MpiMeeting
from relax_hpc.weights.nccl import NcclMeeting
from relax_hpc.weights.stored import can_be_had
from relax_hpc.weights.versions import named

__all__ = [
    "MEETINGS",
    "CollectivePublisher",
    "CollectiveReceiver",
    "DamagedWeights",
    "Export",
    "FilePublisher",
    "FileReceiver",
    "GlooMeeting",
    "MpiMeeting",
    "NcclMeeting",
    "Publisher",
    "Receiver",
    "Version",
    "WeightsError",
    "can_be_had",
    "make_publisher",
    "make_receiver",
    "named",
]

MEETINGS: dict[str, Callable[..., Meeting]] = {"gloo": GlooMeeting, "mpi": MpiMeeting, "nccl": NcclMeeting}


def make_publisher(recipe: Recipe, run: RunDir, via: Path, incarnation: int) -> Publisher:
    """The recipe's transport, the trainer's side. `via`: the folder that it commits through."""
    w, bucket_bytes = recipe.weights, recipe.weights.bucket_mb << 20
    if isinstance(w, CollectiveWeights | MpiWeights):
        return CollectivePublisher(
            run, via, incarnation, MEETINGS[w.speaks](run, w.timeout_s, via), bucket_bytes=bucket_bytes
        )
    return FilePublisher(run, via, incarnation, bucket_bytes=bucket_bytes, front=w.front, full_every=w.full_every)


def make_receiver(recipe: Recipe, run: RunDir, name: str, copies: bool = True) -> Receiver:
    """The recipe's transport, a worker's side. `name`: of the worker; nobody had it before. copies: files are kept in the node's memory, where
    the recipe says so."""
    w = recipe.weights
    if isinstance(w, CollectiveWeights | MpiWeights):
        return CollectiveReceiver(run, name, MEETINGS[w.speaks](run, w.timeout_s))
    return FileReceiver(run, w.front if copies else None)
