"""Trainer backends: one optimizer step from a step's rollouts, the same under any number of processes."""

from __future__ import annotations

import importlib
from pathlib import Path

from relax_hpc.recipe.schema import Recipe
from relax_hpc.trainers.base import Trainer

__all__ = ["BACKENDS", "Trainer", "make_trainer"]

BACKENDS = {"torch": "torch.TorchTrainer", "megatron": "megatron.MegatronTrainer"}
"""Where they are below this package: a backend is imported when it is used, for some need more than is installed."""


def make_trainer(recipe: Recipe, model_dir: Path, rank: int, world: int) -> Trainer:
    """This process's trainer. With world > 1 the default process group of torch.distributed is there already."""
    module, _, name = BACKENDS[recipe.trainer.backend].rpartition(".")
    made: Trainer = getattr(importlib.import_module(f"{__name__}.{module}"), name)(recipe, model_dir, rank, world)
    return made
