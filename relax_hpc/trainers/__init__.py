"""Trainer backends: one optimizer step from a step's rollouts, the same under any number of processes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from relax_hpc.recipe.schema import Recipe
from relax_hpc.trainers.base import CriticTrainer, Scoring, Trainer

__all__ = ["BACKENDS", "CriticTrainer", "Scoring", "Trainer", "make_critic", "make_scoring", "make_trainer"]

BACKENDS = {"torch": "torch.Torch", "megatron": "megatron.Megatron"}
"""Where their classes are below this package, less what they end with: a backend is imported when it is used, for some need more than is installed."""


def make_trainer(recipe: Recipe, model_dir: Path, rank: int, world: int) -> Trainer:
    """This process's trainer. With world > 1 the default process group of torch.distributed is there already."""
    made: Trainer = _class(recipe, "Trainer")(recipe, model_dir, rank, world)
    return made


def make_critic(recipe: Recipe, folder: Path, rank: int, world: int) -> CriticTrainer:
    """The same of a critic in processes of its own. folder: of the model that its body begins as."""
    made: CriticTrainer = _class(recipe, "Critic")(recipe, folder, rank, world)
    return made


def make_scoring(recipe: Recipe, model_dir: Path, rank: int, world: int) -> Scoring:
    """The same of a scorer's models. model_dir: the policy's."""
    made: Scoring = _class(recipe, "Scoring")(recipe, model_dir, rank, world)
    return made


def _class(recipe: Recipe, kind: str) -> Any:
    module, _, name = BACKENDS[recipe.trainer.backend].rpartition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name + kind)
