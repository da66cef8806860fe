"""A scorer's models, split over its processes by the recipe's plan; recorded experts are replayed as in training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig

import relax_hpc.trainers.megatron.export.weights as weights
from relax_hpc.algorithms.base import TEACHER
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Progress, Rollouts
from relax_hpc.trainers.megatron.cpu import supported
from relax_hpc.trainers.megatron.head import Policy
from relax_hpc.trainers.megatron.model import build, transformer_config
from relax_hpc.trainers.megatron.split import Split, device_of


class MegatronScoring(Split):
    """See relax_hpc.trainers.base.Scoring."""

    @supported
    def __init__(self, recipe: Recipe, model_dir: Path, rank: int, world: int) -> None:
        assert recipe.scorer is not None
        super().__init__(recipe, rank, world, device_of(recipe.trainer.device, "scorer"))
        self.hf: Any = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        self.models: dict[str, list[Policy]] = {}

    @supported
    def hold(self, name: str, folder: Path) -> None:
        self._keep(name, self._read(Policy, folder))

    @supported
    def load(self, name: str, tensors: Mapping[str, Tensor], where: Path) -> None:
        if name not in self.models:
            self._keep(name, build(self.hf, transformer_config(self.hf, self.recipe.trainer), self.groups))
        weights.load_tensors(self.models[name], tensors, where, self.groups)

    @supported
    def logprobs(self, name: str, rollouts: Rollouts, progress: Progress = lambda: None) -> NDArray[np.float32]:
        if name == TEACHER:  # its experts are its own
            rollouts = replace(rollouts, routed_experts=None)
        return self._said(self.models[name], rollouts, self.recipe.rollout.temperature, progress)

    def _keep(self, name: str, chunks: list[Policy]) -> None:
        for chunk in chunks:
            chunk.requires_grad_(False)
        self.models[name] = chunks
