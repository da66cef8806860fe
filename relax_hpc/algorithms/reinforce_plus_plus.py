"""REINFORCE++ (arXiv 2501.03262): advantages whitened over all tokens of the step."""

from __future__ import annotations

import torch
from torch import Tensor

from relax_hpc.algorithms.common.advantages import gae, group_relative, whiten
from relax_hpc.algorithms.common.policy import PolicyAlgorithm
from relax_hpc.recipe.tables.algorithm import ReinforcePlusPlus
from relax_hpc.records import Rollouts


class ReinforcePlusPlusAlgorithm(PolicyAlgorithm):
    """Returns of single tokens: advantages over values of 0."""

    config: ReinforcePlusPlus

    def estimate(self, rollouts: Rollouts) -> Tensor:
        earned = self.token_rewards(rollouts)
        returns = gae(earned, torch.zeros_like(earned), rollouts, self.config.discount, 1.0)
        return whiten(returns, torch.from_numpy(rollouts.loss_mask)).float()


class BaselineAlgorithm(PolicyAlgorithm):
    """Rewards less the group's mean."""

    def estimate(self, rollouts: Rollouts) -> Tensor:
        centred = self.per_sample(rollouts, group_relative, normalize="none")
        return whiten(centred, torch.from_numpy(rollouts.loss_mask))
