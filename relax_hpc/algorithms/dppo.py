"""DPPO (arXiv 2602.04879): a token is masked where the policy has moved too far, by an estimate of the divergence in place
of the ratio.

Of two distributions over all tokens only the sampled one's probabilities p (before) and q (now) are known: the binary
divergence is that of the distributions over "this token" and "another".
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax_hpc.algorithms.base import LossAndMetrics, LossInputs
from relax_hpc.algorithms.cispo import weighted_logprobs
from relax_hpc.algorithms.grpo import GroupRelative
from relax_hpc.recipe.tables.algorithm import Dppo

ROUNDING = 1e-8
"""Added to the probabilities of another token, which may be 0 in float32."""


class DppoAlgorithm(GroupRelative):
    config: Dppo

    def surrogate(self, inputs: LossInputs, old: Tensor) -> LossAndMetrics:
        """-ρ·A·log π, the truncated ratio without gradient, and 0 where the divergence is above its bound on the side to
        which the advantage pushes."""
        now, advantages, (low, high) = inputs.logprobs.detach(), inputs.advantages, self.config.clip
        apart = DIVERGENCES[self.config.divergence](old, now)
        below, above = (apart > low) & (now < old) & (advantages <= 0), (apart > high) & (now > old) & (advantages > 0)
        loss, _ = weighted_logprobs(inputs.logprobs, now - old, advantages, 1.0, self.config.truncate - 1)
        metrics = {"clip_fraction": below | above, "clip_low": below, "clip_high": above}
        return loss.masked_fill(below | above, 0.0), {
            "divergence": apart, **{name: where.float() for name, where in metrics.items()}
        }  # fmt: skip


def binary_tv(old: Tensor, now: Tensor) -> Tensor:
    """[M] |p - q|: the total variation. old, now: logprobs."""
    return (now.exp() - old.exp()).abs()


def binary_kl(old: Tensor, now: Tensor) -> Tensor:
    """[M] p·log(p / q) + (1 - p)·log((1 - p) / (1 - q)). old, now: logprobs."""
    p, others, others_now = old.exp(), -torch.expm1(old) + ROUNDING, -torch.expm1(now) + ROUNDING
    return p * (old - now) + (1 - p) * (others / others_now).log()


DIVERGENCES = {"tv": binary_tv, "kl": binary_kl}
