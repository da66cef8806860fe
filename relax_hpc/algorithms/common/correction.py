"""Off-policy correction: weights on the policy's loss of each token, since another policy than the trainer's own
sampled it.

A token's weight is w = exp(recomputed - behavior): the trainer's logprob before the step's first update against the
engine's, which sampled with other kernels and perhaps older weights. No gradient flows through it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from relax_hpc.algorithms.base import LossInputs
from relax_hpc.algorithms.common.kl import k3
from relax_hpc.algorithms.common.losses import exp_ratio
from relax_hpc.algorithms.common.sequences import highest, means, spread, sums
from relax_hpc.recipe.tables.correction import Correction, Mis, Rejection, Tis

VANISHED = 0.01
"""A token with less weight than this teaches next to nothing, although it is in bounds and in the mean; products over
long answers come to that."""


def importance_weights(config: Correction, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """([M] weights, metrics). The metrics are the weights, the greatest before any bound, the shares below and above
    the bounds with what was done to them, and the share that is used but vanishes.

    tis: w, truncated to the bounds. icepop: w, 0 outside of them. mis: the product, or the geometric mean, of a
    sample's w at all of its tokens, 0 outside.
    """
    assert inputs.recomputed is not None
    log_weights = inputs.recomputed - inputs.old_logprobs
    if isinstance(config, Mis):
        over = sums if config.weight == "product" else means
        log_weights = spread(over(log_weights, inputs.lengths), inputs.lengths)
    raw = exp_ratio(log_weights)
    below, above = raw < config.low, raw > config.high
    out = {"correction_low": below.float(), "correction_high": above.float()}
    if isinstance(config, Tis):
        weights = raw.clamp(config.low, config.high)
    else:
        weights = raw.where(~(below | above), 0)
        out["correction_masked"] = (below | above).float()
    out["correction_vanished"] = ((weights > 0) & (weights < VANISHED)).float()
    return weights, {"correction_weight": weights, "correction_raw_max": raw, **out}


def rejection_mask(config: Rejection, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """([M] 0.0 at all tokens of a sample that one of the bounds rejects, else 1.0; metrics: the share of the tokens that
    each of them rejects, and all together).

    With w the weights of tokens: the geometric mean and the product of a sample's w, Geo-RS and Seq-MIS (Liu, Li et al.,
    "When Speed Kills Stability", 2025); the mean and the greatest of w - 1 - log w, whose expectation is KL(engine ‖
    trainer), Trust Region Masking (arXiv 2512.23075); the least w, a veto.
    """
    assert inputs.recomputed is not None
    log_weights, lengths = inputs.recomputed - inputs.old_logprobs, inputs.lengths
    kl, out = k3(inputs.old_logprobs, inputs.recomputed), {}
    for name, over in (("geometric", means), ("product", sums)):
        if bounds := getattr(config, name):
            weight, (low, high) = over(log_weights, lengths), bounds
            out[name] = (weight < math.log(low)) | (weight > math.log(high))
    for name, over in (("mean_kl", means), ("max_kl", highest)):
        if bound := getattr(config, name):
            out[name] = over(kl, lengths) > bound
    if config.veto:
        out["veto"] = highest(-log_weights, lengths) > -math.log(config.veto)
    rejected = torch.stack([*out.values()]).any(0)
    metrics = {f"rejected_{name}": spread(where.to(kl), lengths) for name, where in out.items()}
    return spread(1 - rejected.to(kl), lengths), {"rejected": spread(rejected.to(kl), lengths), **metrics}


def sequence_mask(threshold: float, inputs: LossInputs) -> Tensor:
    """[M] 0.0 where the advantage is negative and the mean of behavior - current over the sample's tokens is above
    `threshold`, else 1.0 (DeepSeek-V3.2, arXiv 2512.02556, eq. 9)."""
    drift = spread(means(inputs.old_logprobs - inputs.logprobs.detach(), inputs.lengths), inputs.lengths)
    return 1 - ((inputs.advantages < 0) & (drift > threshold)).to(torch.float32)
