"""Policy-gradient losses of single tokens, from advantages and log ρ. ρ is the ratio of a token's probability now to
that before."""

from __future__ import annotations

import torch
from torch import Tensor

from relax_hpc.algorithms.sequences import means, spread

LOG_RATIO_LIMIT = 20.0
"""Logs of ratios are held within ± this: beyond it there is nothing to learn, and exp would soon be infinite."""


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """[M] exp(log_ratio), with the log held within ± LOG_RATIO_LIMIT."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate: ([M] loss, metrics: where a clip is active, so that no gradient flows). All inputs are
    [M].

    max(-ρA, -clip(ρ, 1 - low, 1 + high)·A): PPO (arXiv 1707.06347, eq. 7), with separate bounds as in DAPO's
    clip-higher (arXiv 2503.14476, eq. 10). `dual`: and at most -dual·A where A < 0 (arXiv 1912.09729, eq. 5).
    """
    ratio = exp_ratio(log_ratio)
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - low, 1 + high) * advantages
    active = (bounded > free).detach()
    loss = torch.maximum(free, bounded)
    metrics = {"clip_fraction": active, "clip_low": active & (advantages < 0), "clip_high": active & (advantages > 0)}
    if dual is not None:
        most = -dual * advantages
        capped = ((advantages < 0) & (loss > most)).detach()
        loss = torch.where(capped, most, loss)
        metrics["clip_dual"] = capped
        metrics["clip_fraction"] = active | capped
    return loss, {name: where.float() for name, where in metrics.items()}


def sequence_log_ratio(logprobs: Tensor, old: Tensor, lengths: Tensor, level: str) -> Tensor:
    """[M] GSPO's log ratio (arXiv 2507.18071): the mean over each sample's tokens, at all of them (eq. 7).

    Level "token" (eq. 14) has the same value, but the gradient of each token is that of its own logprob.
    """
    if level == "sequence":
        return spread(means(logprobs - old, lengths), lengths)
    fixed = logprobs.detach()
    return spread(means(fixed - old, lengths), lengths) + logprobs - fixed


def soft_gate(
    log_ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """SAPO's loss -(4 / τ)·σ(τ(ρ - 1))·A (arXiv 2511.20347, eq. 6); the metric is the share of the gradient that the
    gate lets pass."""
    tau = torch.where(advantages > 0, tau_positive, tau_negative).to(log_ratio)
    gate = torch.sigmoid(tau * (exp_ratio(log_ratio) - 1))
    return -4 / tau * gate * advantages, {"gate": (4 * gate * (1 - gate)).detach()}


def weighted_logprobs(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO's loss -clip(ρ, 1 - low, 1 + high)·A·log π, the clipped ratio without gradient (arXiv 2506.13585, eq. 4)."""
    ratio = exp_ratio(log_ratio.detach())
    below, above = ratio < 1 - low, ratio > 1 + high
    metrics = {"clip_fraction": below | above, "clip_low": below, "clip_high": above}
    loss = -ratio.clamp(1 - low, 1 + high) * advantages * logprobs
    return loss, {name: where.float() for name, where in metrics.items()}


def policy_gradient(logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE's loss -A·log π."""
    return -advantages * logprobs, {}


def clipped_value(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The critic's clipped loss: ([M] loss, metrics), all inputs [M]: max((V - R)², (clip(V, V_old ± clip) - R)²) / 2.

    The value loss of PPO's own implementation, as in arXiv 2005.12729, section 3; where the clip is active no gradient
    flows.
    """
    free = (values - returns).square()
    bounded = (values.clamp(old - clip, old + clip) - returns).square()
    metrics = {"value_clip_fraction": (bounded > free).float(), "value_mean": values, "return_mean": returns}
    return torch.maximum(free, bounded) / 2, {name: value.detach() for name, value in metrics.items()}
