"""Supervised fine-tuning as an algorithm: every token of the sources' own answers has advantage 1."""

from __future__ import annotations

import torch
from torch import Tensor

from relax_hpc.algorithms.base import LossInputs
from relax_hpc.algorithms.common.sequences import weights
from relax_hpc.recipe.tables.algorithm import Sft
from relax_hpc.records import Rollouts


class Supervised:
    """Cross-entropy; see relax_hpc.algorithms.base.Algorithm. The tokens were not sampled, so there is no behavior
    policy."""

    needs: frozenset[str] = frozenset()

    def __init__(self, config: Sft) -> None:
        self.config = config

    def advantages(self, rollouts: Rollouts) -> Tensor:
        return torch.from_numpy(rollouts.loss_mask).float()

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -inputs.logprobs
        scale = weights(self.config.aggregate, inputs)
        return loss if scale is None else loss * scale, {}
