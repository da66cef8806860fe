"""GDPO (arXiv 2601.05242): each part of the reward is compared within the group on its own.

parts of rewards ──(r - mean) / std of the group, each──► sum with weights ──(A - mean) / std of the step──► advantages
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from relax_hpc.algorithms.common.advantages import group_relative, over_tokens
from relax_hpc.algorithms.common.policy import PolicyAlgorithm
from relax_hpc.algorithms.common.turns import attempts
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.tables.algorithm import Gdpo
from relax_hpc.records import Rollouts


class GdpoAlgorithm(PolicyAlgorithm):
    config: Gdpo

    def estimate(self, rollouts: Rollouts) -> Tensor:
        total = torch.zeros(len(rollouts), dtype=torch.float64)
        for part, weight in self.config.parts.items():
            total += weight * self._compared(part, rollouts)
        attempt = torch.from_numpy(attempts(rollouts))
        whole = group_relative(total, torch.zeros_like(attempt), attempt, normalize="group")  # the step as one group
        return over_tokens(whole, rollouts)

    def _compared(self, part: str, rollouts: Rollouts) -> Tensor:
        """[N] float64 a part's advantages; 0 for samples without it."""
        numbers = rollouts.extra.get(part, np.full(len(rollouts), np.nan, np.float32))
        known = np.flatnonzero(~np.isnan(numbers))
        if len(rollouts) and not len(known):
            raise RunError(
                f"algorithm.parts has '{part}', which no sample of the step has; they have {sorted(rollouts.extra)}: name those, "
                "in a new run or with `relax-hpc run RUN_DIR --fork NAME --set algorithm.parts=…`"
            )
        rollout = None if rollouts.rollout is None else torch.from_numpy(rollouts.rollout[known])
        mine = torch.from_numpy(numbers[known]).double()
        found = torch.zeros(len(rollouts), dtype=torch.float64)
        found[known] = group_relative(mine, torch.from_numpy(rollouts.group[known]), rollout, normalize="group")
        return found
