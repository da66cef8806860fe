"""Trainer backends: one optimizer step from a step's rollouts, the same under any number of processes."""

from __future__ import annotations

from pathlib import Path

from relax_hpc.recipe.schema import Recipe
from relax_hpc.trainers.base import Trainer
from relax_hpc.trainers.torch import TorchTrainer

__all__ = ["BACKENDS", "Trainer", "make_trainer"]

BACKENDS = {"torch": TorchTrainer}


def make_trainer(recipe: Recipe, model_dir: Path, rank: int, world: int) -> Trainer:
    """This process's trainer. With world > 1 the default process group of torch.distributed is there already."""
    return BACKENDS[recipe.trainer.backend](recipe, model_dir, rank, world)
