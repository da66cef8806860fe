"""GRPO, Dr. GRPO and DAPO: rewards relative to their group, and the clipped surrogate."""

from __future__ import annotations

from torch import Tensor

from relax_hpc.algorithms.common.advantages import group_relative
from relax_hpc.algorithms.common.policy import PolicyAlgorithm
from relax_hpc.recipe.tables.algorithm import Grpo
from relax_hpc.records import Rollouts


class GroupRelative(PolicyAlgorithm):
    """DAPO, and every algorithm with another surrogate for these advantages."""

    normalize_std = True
    """Divide by the group's standard deviation."""

    def estimate(self, rollouts: Rollouts) -> Tensor:
        return self.per_sample(rollouts, group_relative, normalize_std=self.normalize_std)


class DrGrpoAlgorithm(GroupRelative):
    normalize_std = False


class GrpoAlgorithm(GroupRelative):
    def __init__(self, config: Grpo) -> None:
        super().__init__(config)
        self.normalize_std = config.normalize_std
