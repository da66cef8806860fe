"""RLOO (arXiv 2402.14740): REINFORCE against the mean reward of the prompt's other samples."""

from __future__ import annotations

from torch import Tensor

from relax_hpc.algorithms.base import LossAndMetrics, LossInputs
from relax_hpc.algorithms.common.advantages import group_relative
from relax_hpc.algorithms.common.policy import PolicyAlgorithm
from relax_hpc.recipe.tables.algorithm import Rloo
from relax_hpc.records import Rollouts


class RlooAlgorithm(PolicyAlgorithm):
    config: Rloo

    def estimate(self, rollouts: Rollouts) -> Tensor:
        return self.per_sample(rollouts, group_relative, normalize=self.config.normalize, leave_out=True)

    def surrogate(self, inputs: LossInputs, old: Tensor) -> LossAndMetrics:
        return -inputs.advantages * inputs.logprobs, {}
