"""Rewards -> advantages: how much better a sample, or a token, was than what could be expected."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_hpc.algorithms.common.turns import at_the_end
from relax_hpc.records import Rollouts

STD_EPS = 1e-6
"""Added to a standard deviation; in the reward's unit."""


def group_relative(
    rewards: Tensor, group: Tensor, rollout: Tensor | None = None, *, normalize: str, leave_out: bool = False
) -> Tensor:
    """[N] r - mean of its group, divided as `normalize` says. A group of one gets 0.

    rewards: [N]; group: [N] int64, any numbers; rollout: as for `center_groups`. normalize: "group", the standard
    deviation of the group, GRPO (arXiv 2402.03300, section 4.1.2); "batch", that of all these differences of the step
    (Magistral, arXiv 2506.10910; ScaleRL, arXiv 2510.13786); "none", as in Dr. GRPO (arXiv 2503.20783): the advantage
    keeps the reward's unit. Deviations are the sample's (n - 1). leave_out: less the mean of the others, which is
    n / (n - 1)·(r - mean) (RLOO, arXiv 2402.14740).
    """
    centred, count, member, share = center_groups(rewards, group, rollout)
    found = centred * (count / (count - 1).clamp(min=1))[member] if leave_out else centred
    if normalize == "none":
        return found.to(rewards.dtype)
    if normalize == "batch":
        member, count = torch.zeros_like(member), count.sum()[None]
    squares = torch.zeros_like(count).index_add_(0, member, share * centred.square())
    return (found / ((squares / (count - 1).clamp(min=1)).sqrt() + STD_EPS)[member]).to(rewards.dtype)


def mean_relative(rewards: Tensor, group: Tensor, rollout: Tensor | None = None) -> Tensor:
    """[N] (r - mean of its group) / mean of its group, 0 where that is 0: MaxRL (arXiv 2602.02710). rewards: [N], none
    below 0."""
    centred = center_groups(rewards, group, rollout)[0]
    mean = rewards.double() - centred
    return (centred / mean.where(mean > STD_EPS, torch.inf)).to(rewards.dtype)


def center_groups(
    rewards: Tensor, group: Tensor, rollout: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Subtract group means: ([N] r - mean of its group, [G] rollouts of a group, [N] index of each one's group, [N] share
    of its rollout), float64.

    rollout: [N] which attempt of its group a sample is of; one with several samples counts once. None: each has one.
    """
    groups, member = torch.unique(group, return_inverse=True)
    values, share = rewards.double(), torch.ones(len(rewards), dtype=torch.float64)
    if rollout is not None:
        _, attempt, size = torch.unique(torch.stack([member, rollout]), dim=1, return_inverse=True, return_counts=True)
        share = 1 / size.double()[attempt]
    count = torch.zeros(len(groups), dtype=torch.float64).index_add_(0, member, share)
    mean = torch.zeros_like(count).index_add_(0, member, share * values) / count
    return values - mean[member], count, member, share


def token_rewards(rewards: Tensor, penalties: Tensor, rollouts: Rollouts) -> Tensor:
    """[T] float64 rewards of single tokens: minus the penalty at each token in the loss, plus a turn's reward at its
    last one, and the rest of the sample's at the sample's last one; 0 elsewhere.

    rewards: [N]; penalties: [T] float64, 0 where the loss mask is 0.
    """
    earned = -penalties
    tokens = np.flatnonzero(rollouts.loss_mask)
    of_token = np.repeat(np.arange(len(rollouts)), np.diff(rollouts.offsets))
    samples = of_token[tokens]
    last = np.flatnonzero(np.diff(samples, append=-1))
    earned[torch.from_numpy(tokens[last])] += at_the_end(rewards, rollouts)[torch.from_numpy(samples[last])]
    if rollouts.turn_rewards is not None:
        given = np.flatnonzero(rollouts.turn_rewards)
        before = np.searchsorted(tokens, given, side="right") - 1  # the last token in the loss up to there
        mine = (before >= 0) & (of_token[tokens[before]] == of_token[given])
        amounts = torch.from_numpy(rollouts.turn_rewards[given[mine]]).double()
        earned.index_add_(0, torch.from_numpy(tokens[before[mine]]), amounts)
    return earned


def gae(
    rewards: Tensor, values: Tensor, rollouts: Rollouts, discount: float, smoothing: float | NDArray[np.float64]
) -> Tensor:
    """[T] float64: generalized advantage estimation (arXiv 1506.02438, eq. 16), 0 where the loss mask is 0.

    A_t = δ_t + γλ·A_{t+1} with δ_t = r_t + γ·V_{t+1} - V_t, over a sample's tokens in the loss: those are the actions, and
    what lies between two of them (an observation) belongs to the state of the next. After the last, V and A are 0.
    rewards, values: [T], V_t of what is before token t; discount: γ; smoothing: λ, of all samples or [N] of
    each. λ = 1 gives returns less values.
    """
    tokens = np.flatnonzero(rollouts.loss_mask)
    counted = np.concatenate([[0], np.cumsum(rollouts.loss_mask, dtype=np.int64)])
    first, last = counted[rollouts.offsets[:-1]], counted[rollouts.offsets[1:]]
    earned, valued = (x.double().numpy()[tokens] for x in (rewards, values))
    found, smoothed = np.zeros(len(tokens)), np.broadcast_to(smoothing, len(rollouts))
    value, advantage = np.zeros(len(rollouts)), np.zeros(len(rollouts))  # those of the token after, in each sample
    for back in range(1, int((last - first).max(initial=0)) + 1):
        here = np.flatnonzero(last - back >= first)
        at = last[here] - back
        delta = earned[at] + discount * value[here] - valued[at]
        advantage[here] = found[at] = delta + discount * smoothed[here] * advantage[here]
        value[here] = valued[at]
    whole = np.zeros(len(rollouts.tokens))
    whole[tokens] = found
    return torch.from_numpy(whole)


def whiten(advantages: Tensor, mask: Tensor, eps: float = STD_EPS) -> Tensor:
    """[T] (A - mean) / (std + eps) over all tokens with mask 1, 0 elsewhere: REINFORCE++ (arXiv 2501.03262)."""
    values, chosen = advantages.double(), mask.bool()
    if not chosen.any():
        return torch.zeros_like(advantages)
    centred = (values - values[chosen].mean()).where(chosen, 0.0)
    deviation = (centred.square().sum() / chosen.sum()).sqrt()
    return (centred / (deviation + eps)).to(advantages.dtype)


def adaptive_smoothing(rollouts: Rollouts, alpha: float) -> NDArray[np.float64]:
    """[N] λ = 1 - 1 / (alpha·l), at least 0, of an answer of l tokens: the sum of λ's powers is then in proportion to
    its length (length-adaptive GAE; VAPO, arXiv 2504.05118)."""
    return np.maximum(0.0, 1 - 1 / (alpha * np.maximum(rollouts.generated(), 1)))


def overlong_penalty(rollouts: Rollouts, begin: int, end: int) -> Tensor:
    """[N] 0 up to `begin` tokens, rising to 1 at `end` (DAPO's soft overlong punishment, arXiv 2503.14476, eq. 13).

    Only tokens that the model generated count: it is not answerable for the length of an environment's observations.
    """
    lengths = torch.from_numpy(rollouts.generated()).double()
    return ((lengths - begin) / (end - begin)).clamp(0, 1)


def sample_sums(values: Tensor, rollouts: Rollouts) -> Tensor:
    """[N] float64 sums of [T] values over each sample's tokens."""
    running = np.concatenate([[0.0], np.cumsum(values.double().numpy())])
    return torch.from_numpy(running[rollouts.offsets[1:]] - running[rollouts.offsets[:-1]])


def over_tokens(advantages: Tensor, rollouts: Rollouts) -> Tensor:
    """[T] float32: a sample's advantage on each of its own tokens, 0 where the loss mask is 0. advantages: [N]."""
    lengths = torch.from_numpy(np.diff(rollouts.offsets))
    spread = torch.repeat_interleave(advantages.float(), lengths)
    return spread * torch.from_numpy(rollouts.loss_mask)
