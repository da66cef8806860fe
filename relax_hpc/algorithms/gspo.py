"""GSPO (arXiv 2507.18071): the clipped surrogate of one importance ratio a sample."""

from __future__ import annotations

from torch import Tensor

from relax_hpc.algorithms.base import LossAndMetrics, LossInputs
from relax_hpc.algorithms.common.losses import clipped_surrogate
from relax_hpc.algorithms.common.sequences import means, spread
from relax_hpc.algorithms.grpo import GroupRelative
from relax_hpc.recipe.tables.algorithm import Gspo


class GspoAlgorithm(GroupRelative):
    config: Gspo

    def surrogate(self, inputs: LossInputs, old: Tensor) -> LossAndMetrics:
        log_ratio = sequence_log_ratio(inputs.logprobs, old, inputs.lengths, self.config.level)
        return clipped_surrogate(log_ratio, inputs.advantages, *self.config.clip, self.config.dual_clip or None)


def sequence_log_ratio(logprobs: Tensor, old: Tensor, lengths: Tensor, level: str) -> Tensor:
    """[M] GSPO's log ratio (arXiv 2507.18071): the mean over each sample's tokens, at all of them (eq. 7).

    Level "token" (eq. 14) has the same value, but the gradient of each token is that of its own logprob.
    """
    if level == "sequence":
        return spread(means(logprobs - old, lengths), lengths)
    fixed = logprobs.detach()
    return spread(means(fixed - old, lengths), lengths) + logprobs - fixed
