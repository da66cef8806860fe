"""Rewards -> advantages: how much better a sample, or a token, was than what could be expected."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from relax_hpc.records import Rollouts

STD_EPS = 1e-6
"""Added to a standard deviation; in the reward's unit."""


def group_relative(rewards: Tensor, group: Tensor, *, normalise_std: bool, eps: float = STD_EPS) -> Tensor:
    """[N] (r - mean of its group) / (std of its group + eps), GRPO (arXiv 2402.03300, section 4.1.2).

    rewards: [N]; group: [N] int64, any numbers. The standard deviation is the sample's (n - 1). Without it, as in
    Dr. GRPO (arXiv 2503.20783), the advantage keeps the reward's unit. A group of one gets 0.
    """
    centred, count, member = _centred(rewards, group)
    if normalise_std:
        variance = torch.zeros_like(count).index_add_(0, member, centred.square()) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)[member]
    return centred.to(rewards.dtype)


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """[N] r - mean of the others of its group = n / (n - 1)·(r - mean of its group), RLOO (arXiv 2402.14740). A group of
    one gets 0."""
    centred, count, member = _centred(rewards, group)
    return (centred * (count / (count - 1).clamp(min=1))[member]).to(rewards.dtype)


def _centred(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """([N] r - mean of its group, [G] sizes of the groups, [N] which of them), float64."""
    _, member = torch.unique(group, return_inverse=True)
    values = rewards.double()
    count = torch.bincount(member).double()
    mean = torch.zeros_like(count).index_add_(0, member, values) / count
    return values - mean[member], count, member


def returns(rewards: Tensor, penalties: Tensor, rollouts: Rollouts) -> Tensor:
    """[T] what is still to come at each token in the loss, undiscounted: the sample's reward less the penalties from there on.

    rewards: [N]; penalties: [T] float64, 0 where the loss mask is 0, as are the returns.
    """
    to_come = np.concatenate([np.cumsum(penalties.numpy()[::-1])[::-1], [0.0]])  # from each token to the end of all
    lengths = np.diff(rollouts.offsets)
    later = np.repeat(to_come[rollouts.offsets[1:]], lengths)
    values = np.repeat(rewards.double().numpy(), lengths) - (to_come[:-1] - later)
    return torch.from_numpy(values * rollouts.loss_mask)


def whiten(advantages: Tensor, mask: Tensor, eps: float = STD_EPS) -> Tensor:
    """[T] (A - mean) / (std + eps) over all tokens with mask 1, 0 elsewhere: REINFORCE++ (arXiv 2501.03262)."""
    values, chosen = advantages.double(), mask.bool()
    if not chosen.any():
        return torch.zeros_like(advantages)
    centred = (values - values[chosen].mean()).where(chosen, 0.0)
    deviation = (centred.square().sum() / chosen.sum()).sqrt()
    return (centred / (deviation + eps)).to(advantages.dtype)


def overlong_penalty(rollouts: Rollouts, begin: int, end: int) -> Tensor:
    """[N] 0 up to `begin` tokens, rising to 1 at `end` (DAPO's soft overlong punishment, arXiv 2503.14476, eq. 13)."""
    lengths = torch.from_numpy(np.diff(rollouts.offsets)).double()
    return ((lengths - begin) / (end - begin)).clamp(0, 1)


def sample_sums(values: Tensor, rollouts: Rollouts) -> Tensor:
    """[N] float64, of [T] values."""
    running = np.concatenate([[0.0], np.cumsum(values.double().numpy())])
    return torch.from_numpy(running[rollouts.offsets[1:]] - running[rollouts.offsets[:-1]])


def over_tokens(advantages: Tensor, rollouts: Rollouts) -> Tensor:
    """[T] float32: a sample's advantage on each of its own tokens, 0 where the loss mask is 0. advantages: [N]."""
    lengths = torch.from_numpy(np.diff(rollouts.offsets))
    spread = torch.repeat_interleave(advantages.float(), lengths)
    return spread * torch.from_numpy(rollouts.loss_mask)
