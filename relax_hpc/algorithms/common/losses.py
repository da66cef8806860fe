"""Policy-gradient losses of single tokens, from advantages and log ρ. ρ is the ratio of a token's probability now to
that before."""

from __future__ import annotations

import torch
from torch import Tensor

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
        loss, metrics["clip_dual"] = capped(loss, advantages, dual)
        metrics["clip_fraction"] = active | metrics["clip_dual"]
    return loss, {name: where.float() for name, where in metrics.items()}


def capped(loss: Tensor, advantages: Tensor, dual: float | None) -> tuple[Tensor, Tensor]:
    """The loss held to at most -dual·A where A < 0, without a gradient there: ([M] loss, [M] where that is). None: no
    bound."""
    most = -(torch.inf if dual is None else dual) * advantages
    over = ((advantages < 0) & (loss > most)).detach()
    return torch.where(over, most, loss), over
