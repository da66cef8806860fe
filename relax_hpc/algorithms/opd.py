"""On-policy distillation: the reverse KL to the teacher, which every algorithm with a teacher has, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from relax_hpc.algorithms.common.policy import PolicyAlgorithm
from relax_hpc.records import Rollouts


class OpdAlgorithm(PolicyAlgorithm):
    def estimate(self, rollouts: Rollouts) -> Tensor:
        return torch.zeros(len(rollouts.tokens))
