"""RLOO (arXiv 2402.14740): REINFORCE against the mean reward of the prompt's other samples."""

from __future__ import annotations

from torch import Tensor

from relax_hpc.algorithms.base import LossAndMetrics, LossInputs
from relax_hpc.algorithms.common.advantages import center_groups
from relax_hpc.algorithms.common.policy import PolicyAlgorithm
from relax_hpc.records import Rollouts


class RlooAlgorithm(PolicyAlgorithm):
    def estimate(self, rollouts: Rollouts) -> Tensor:
        return self.per_sample(rollouts, leave_one_out)

    def surrogate(self, inputs: LossInputs, old: Tensor) -> LossAndMetrics:
        return -inputs.advantages * inputs.logprobs, {}


def leave_one_out(rewards: Tensor, group: Tensor, rollout: Tensor | None = None) -> Tensor:
    """[N] r - mean of the other rollouts of its group = n / (n - 1)·(r - mean of its group). A group of
    one gets 0. rollout: as for `center_groups`."""
    centred, count, member, _ = center_groups(rewards, group, rollout)
    return (centred * (count / (count - 1).clamp(min=1))[member]).to(rewards.dtype)
