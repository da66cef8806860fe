"""Trainer backends make optimizer steps from a step's rollouts, the same ones under any number of processes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from relax_hpc.recipe.schema import Recipe
from relax_hpc.trainers.base import CriticTrainer, Scoring, Trainer

__all__ = ["BACKENDS", "CriticTrainer", "Scoring", "Trainer", "make_critic", "make_scoring", "make_trainer"]

BACKENDS = {"torch": "torch.Torch", "megatron": "megatron.Megatron"}
"""Backend -> its module below this package and the beginning of its classes' names. It is imported only when it is
used, since some need more than is installed. With world > 1 torch.distributed's default process group exists already."""


def make_trainer(recipe: Recipe, model_dir: Path, rank: int, world: int) -> Trainer:
    """Make this process's trainer."""
    made: Trainer = _class(recipe, "Trainer")(recipe, model_dir, rank, world)
    return made


def make_critic(recipe: Recipe, folder: Path, rank: int, world: int) -> CriticTrainer:
    """Make this process's part of a critic in processes of its own. folder: the model that its body starts from."""
    made: CriticTrainer = _class(recipe, "Critic")(recipe, folder, rank, world)
    return made


def make_scoring(recipe: Recipe, model_dir: Path, rank: int, world: int) -> Scoring:
    """Make this process's part of a scorer's models. model_dir: the policy's."""
    made: Scoring = _class(recipe, "Scoring")(recipe, model_dir, rank, world)
    return made


def _class(recipe: Recipe, kind: str) -> Any:
    module, _, name = BACKENDS[recipe.trainer.backend].rpartition(".")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name + kind)
