"""SAPO (arXiv 2511.20347): a soft gate on the importance ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from relax_hpc.algorithms.base import LossAndMetrics, LossInputs
from relax_hpc.algorithms.common.losses import exp_ratio
from relax_hpc.algorithms.grpo import GroupRelative
from relax_hpc.recipe.tables.algorithm import Sapo


class SapoAlgorithm(GroupRelative):
    config: Sapo

    def surrogate(self, inputs: LossInputs, old: Tensor) -> LossAndMetrics:
        return soft_gate(inputs.logprobs - old, inputs.advantages, *self.config.tau)


def soft_gate(log_ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float) -> LossAndMetrics:
    """SAPO's loss -(4 / τ)·σ(τ(ρ - 1))·A (arXiv 2511.20347, eq. 6); the metric is the share of the gradient that the
    gate lets pass."""
    tau = torch.where(advantages > 0, tau_positive, tau_negative).to(log_ratio)
    gate = torch.sigmoid(tau * (exp_ratio(log_ratio) - 1))
    return -4 / tau * gate * advantages, {"gate": (4 * gate * (1 - gate)).detach()}
