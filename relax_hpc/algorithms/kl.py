"""Estimators of KL(current ‖ other) from the logprobs of tokens; J. Schulman, "Approximating KL Divergence" (2020).

With d = log current - log other and tokens drawn from `current`, k1 and k3 are unbiased, k2 has the lower variance.
"""

from __future__ import annotations

import torch
from torch import Tensor

LIMIT = 20.0
"""In k3, d is held within ± this, where exp is finite."""


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """[M] d: unbiased, of high variance, negative at times."""
    return logprobs - other


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """[M] d² / 2: its gradient is that of the KL, its value is biased."""
    return (logprobs - other).square() / 2


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """[M] exp(-d) - 1 + d: unbiased and never negative; the one of GRPO (arXiv 2402.03300, eq. 4)."""
    difference = (logprobs - other).clamp(-LIMIT, LIMIT)
    return torch.expm1(-difference) + difference


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
