"""Rewards -> advantages: how much better a sample was than what could be expected."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from relax_hpc.records import Rollouts

STD_EPS = 1e-6
"""Added to a group's standard deviation; in the reward's unit."""


def group_relative(rewards: Tensor, group: Tensor, *, normalise_std: bool, eps: float = STD_EPS) -> Tensor:
    """[N] (r - mean of its group) / (std of its group + eps), GRPO (arXiv 2402.03300, section 4.1.2).

    rewards: [N]; group: [N] int64, any numbers. The standard deviation is the sample's (n - 1). Without it, as in
    Dr. GRPO (arXiv 2503.20783), the advantage keeps the reward's unit. A group of one gets 0.
    """
    _, member = torch.unique(group, return_inverse=True)
    values = rewards.double()
    count = torch.bincount(member).double()
    mean = torch.zeros_like(count).index_add_(0, member, values) / count
    centred = values - mean[member]
    if normalise_std:
        variance = torch.zeros_like(count).index_add_(0, member, centred.square()) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)[member]
    return centred.to(rewards.dtype)


def over_tokens(advantages: Tensor, rollouts: Rollouts) -> Tensor:
    """[T] float32: a sample's advantage on each of its own tokens, 0 where the loss mask is 0. advantages: [N]."""
    lengths = torch.from_numpy(np.diff(rollouts.offsets))
    spread = torch.repeat_interleave(advantages.float(), lengths)
    return spread * torch.from_numpy(rollouts.loss_mask)
