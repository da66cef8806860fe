"""The critic in processes of its own: its body and head split as the recipe's plan splits the policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Progress, Rollouts
from relax_hpc.trainers import fit
from relax_hpc.trainers.megatron.cpu import supported
from relax_hpc.trainers.megatron.head import Critic
from relax_hpc.trainers.megatron.learners import Learners
from relax_hpc.trainers.megatron.learning import Learning
from relax_hpc.trainers.megatron.split import device_of
from relax_hpc.trainers.update import CriticUpdating


class MegatronCritic(Learners, CriticUpdating):
    """See relax_hpc.trainers.base.CriticTrainer."""

    @supported
    def __init__(self, recipe: Recipe, folder: Path, rank: int, world: int) -> None:
        """folder: the model that its body starts from."""
        assert recipe.critic is not None
        fit.check(recipe, folder)
        super().__init__(recipe, rank, world, device_of(recipe.trainer.device, "critic"))
        chunks = self._read(Critic, folder)
        self.learning["critic"] = Learning(chunks, chunks[0].config, recipe)

    values = supported(CriticUpdating.values)
    learn = supported(CriticUpdating.learn)

    def _column(self, name: str, rollouts: Rollouts, temperature: float, progress: Progress) -> NDArray[np.float32]:
        rollouts = replace(rollouts, routed_experts=None)  # its experts are its own
        return self._said(self.learning["critic"].chunks, rollouts, temperature, progress)
