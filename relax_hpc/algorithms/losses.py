"""Policy-gradient losses of single tokens; the trainer sums them and divides by one global token count."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """([M] loss, [M] bool: the clip is active, no gradient flows), all inputs [M].

    max(-ρA, -clip(ρ, 1 - low, 1 + high)·A) with ρ = exp(logprobs - behaviour): PPO (arXiv 1707.06347, eq. 7), with
    bounds of their own as in DAPO's clip-higher (arXiv 2503.14476, eq. 10).
    """
    ratio = torch.exp(logprobs - behaviour)
    free = -ratio * advantages
    bounded = -ratio.clamp(1 - low, 1 + high) * advantages
    return torch.maximum(free, bounded), (bounded > free).detach()
