"""CISPO (arXiv 2506.13585): the clipped importance ratio is a weight without gradient."""

from __future__ import annotations

from torch import Tensor

from relax_hpc.algorithms.base import LossAndMetrics, LossInputs
from relax_hpc.algorithms.common.losses import exp_ratio
from relax_hpc.algorithms.grpo import GroupRelative
from relax_hpc.recipe.tables.algorithm import Cispo


class CispoAlgorithm(GroupRelative):
    config: Cispo

    def surrogate(self, inputs: LossInputs, old: Tensor) -> LossAndMetrics:
        return weighted_logprobs(inputs.logprobs, inputs.logprobs - old, inputs.advantages, *self.config.clip)


def weighted_logprobs(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, low: float, high: float
) -> LossAndMetrics:
    """The loss -clip(ρ, 1 - low, 1 + high)·A·log π, the clipped ratio without gradient (eq. 4)."""
    ratio = exp_ratio(log_ratio.detach())
    below, above = ratio < 1 - low, ratio > 1 + high
    metrics = {"clip_fraction": below | above, "clip_low": below, "clip_high": above}
    loss = -ratio.clamp(1 - low, 1 + high) * advantages * logprobs
    return loss, {name: where.float() for name, where in metrics.items()}
