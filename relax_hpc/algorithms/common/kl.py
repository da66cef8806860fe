"""Estimators of KL(current ‖ other) from the logprobs of tokens; J. Schulman, "Approximating KL Divergence" (2020).

With d = log current - log other and tokens drawn from `current`, k1 and k3 are unbiased, k2 has the lower variance.
Their gradients, as losses and as rewards, are another question (arXiv 2510.01555): docs/algorithms.md answers it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax_hpc.algorithms.common.losses import exp_ratio

LIMIT = 20.0
"""In k3, d is held within ± this, where exp is finite."""


def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """[M] d: unbiased, of high variance, negative at times."""
    return logprobs - other


def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """[M] d² / 2: its gradient d·∇ log current is that of the KL, its value is biased."""
    return (logprobs - other).square() / 2


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """[M] exp(-d) - 1 + d: unbiased and never negative; GRPO's estimator (arXiv 2402.03300, eq. 4)."""
    difference = (logprobs - other).clamp(-LIMIT, LIMIT)
    return torch.expm1(-difference) + difference


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def importance_weighted(estimator: str, logprobs: Tensor, other: Tensor, old_logprobs: Tensor) -> Tensor:
    """[M] ρ·k, whose expected gradient over tokens drawn from the behavior policy is that of KL(current ‖ other) (arXiv
    2512.02556, eq. 7).

    ρ = current / behavior. For k1 and k3 the gradient flows through ρ too: E[ρ·k] is the KL itself. k2 has the KL's
    gradient but not its value, so there ρ is only a weight.
    """
    ratio = exp_ratio(logprobs - old_logprobs)
    return (ratio.detach() if estimator == "k2" else ratio) * ESTIMATORS[estimator](logprobs, other)
