"""GRPO, Dr. GRPO, DAPO and MaxRL: rewards relative to their group, and the clipped surrogate."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from relax_hpc.algorithms.common.advantages import group_relative, mean_relative
from relax_hpc.algorithms.common.policy import PolicyAlgorithm
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.tables.algorithm_keys import Normalized
from relax_hpc.records import Rollouts


class GroupRelative(PolicyAlgorithm):
    """GRPO, and every algorithm with another surrogate for these advantages."""

    config: Normalized

    def estimate(self, rollouts: Rollouts) -> Tensor:
        return self.per_sample(rollouts, group_relative, normalize=self.config.normalize)


class MaxRlAlgorithm(PolicyAlgorithm):
    """Rewards over the group's mean (arXiv 2602.02710), so that the gradient nears that of the log-likelihood of a right
    answer."""

    def estimate(self, rollouts: Rollouts) -> Tensor:
        if (rollouts.rewards < 0).any():
            worst = int(np.argmin(rollouts.rewards))
            raise RunError(
                f"algorithm 'maxrl': sample {rollouts.ids[worst]} has the reward {rollouts.rewards[worst]}, expected none below 0, since it is "
                "divided by the group's mean: give right answers 1 and wrong ones 0, or use another algorithm, such as 'grpo'"
            )
        return self.per_sample(rollouts, mean_relative)
