"""Weights on their way from the trainer to the rollout workers, as versions of the policy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.weights import CollectiveWeights, MpiWeights
from relax_hpc.weights.base import DamagedWeights, Export, Publisher, Receiver, Version, WeightsError
from relax_hpc.weights.collective import CollectivePublisher, CollectiveReceiver
from relax_hpc.weights.file import FilePublisher, FileReceiver
from relax_hpc.weights.groups.gloo import GlooRendezvous
from relax_hpc.weights.groups.mpi import MpiRendezvous
from relax_hpc.weights.groups.nccl import NcclRendezvous
from relax_hpc.weights.groups.rendezvous import Rendezvous
from relax_hpc.weights.stored import can_be_had
from relax_hpc.weights.versions import named

__all__ = [
    "RENDEZVOUS", "CollectivePublisher", "CollectiveReceiver", "DamagedWeights", "Export", "FilePublisher",
    "FileReceiver", "GlooRendezvous", "MpiRendezvous", "NcclRendezvous", "Publisher", "Receiver", "Version",
    "WeightsError", "can_be_had", "make_publisher", "make_receiver", "named",
]  # fmt: skip

RENDEZVOUS: dict[str, Callable[..., Rendezvous]] = {
    "gloo": GlooRendezvous,
    "mpi": MpiRendezvous,
    "nccl": NcclRendezvous,
}


def make_publisher(recipe: Recipe, run: RunDir, commit_dir: Path, incarnation: int) -> Publisher:
    """Make the trainer's side of the recipe's transport. `commit_dir`: the incarnation's folder."""
    w = recipe.weights
    if isinstance(w, CollectiveWeights | MpiWeights):
        return CollectivePublisher(run, commit_dir, incarnation, RENDEZVOUS[w.speaks](run, w.timeout_s, commit_dir))
    return FilePublisher(run, commit_dir, incarnation, node_cache=w.node_cache, full_every=w.full_every)


def make_receiver(recipe: Recipe, run: RunDir, name: str, copies: bool = True) -> Receiver:
    """Make the side of worker `name`, which no other has had. copies: keep files in memory where the recipe says so."""
    w = recipe.weights
    if isinstance(w, CollectiveWeights | MpiWeights):
        return CollectiveReceiver(run, name, RENDEZVOUS[w.speaks](run, w.timeout_s))
    return FileReceiver(run, w.node_cache if copies else None)
