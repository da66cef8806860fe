"""Weights: versions of the policy on their way from the trainer to the rollout workers."""

from __future__ import annotations

from pathlib import Path

from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.weights import FileWeights
from relax_hpc.run_dir import RunDir
from relax_hpc.weights.base import DamagedWeights, Export, Publisher, Receiver, Version, WeightsError
from relax_hpc.weights.file import FilePublisher, FileReceiver

__all__ = [
    "DamagedWeights",
    "Export",
    "FilePublisher",
    "FileReceiver",
    "Publisher",
    "Receiver",
    "Version",
    "WeightsError",
    "make_publisher",
    "make_receiver",
]


def make_publisher(recipe: Recipe, run: RunDir, via: Path, incarnation: int) -> Publisher:
    """The recipe's transport, the trainer's side. `via`: the folder that it commits through."""
    w = recipe.weights
    assert isinstance(w, FileWeights)
    return FilePublisher(run, via, incarnation, bucket_bytes=w.bucket_mb << 20, front=w.front, full_every=w.full_every)


def make_receiver(recipe: Recipe, run: RunDir, name: str) -> Receiver:
    """The recipe's transport, a worker's side. `name`: of the worker; nobody had it before."""
    w = recipe.weights
    assert isinstance(w, FileWeights)
    return FileReceiver(run, w.front)
