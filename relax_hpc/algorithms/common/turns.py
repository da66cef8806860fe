"""Rewards of turns: which turns samples have, and what is earned from each of them on.

    [T] turn_rewards, [N] rewards ──► each turn's reward; the rest is earned at an attempt's end ──discount──► returns of turns

A turn is an unbroken run of tokens that the model said. Samples of one attempt follow each other: their turns are counted on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_hpc.records import Rollouts


@dataclass(frozen=True, slots=True)
class Turns:
    """The M turns of some rollouts, in the order of their tokens."""

    of_token: NDArray[np.int64]  # [T] the turn that a token is of; -1 where the model did not say it
    sample: NDArray[np.int64]  # [M]
    attempt: NDArray[np.int64]  # [M] of the attempt at a prompt, from 0
    number: NDArray[np.int64]  # [M] place within the attempt, from 0

    @classmethod
    def of(cls, rollouts: Rollouts) -> Turns:
        """Find the turns; tokens that are too old for the loss are of one too."""
        own = (rollouts.loss_mask if rollouts.too_old is None else rollouts.loss_mask | rollouts.too_old) == 1
        of_sample = np.repeat(np.arange(len(rollouts)), np.diff(rollouts.offsets))
        begins = own.copy()
        begins[1:] &= ~own[:-1] | (of_sample[1:] != of_sample[:-1])
        sample = of_sample[begins]
        attempt = attempts(rollouts)[sample]
        by_attempt = np.argsort(attempt, kind="stable")
        _, first, count = np.unique(attempt[by_attempt], return_index=True, return_counts=True)
        number = np.empty(len(sample), np.int64)
        number[by_attempt] = np.arange(len(sample)) - np.repeat(first, count)
        return cls(np.where(own, np.cumsum(begins) - 1, -1), sample, attempt, number)

    def sums(self, values: Tensor) -> Tensor:
        """[M] float64 sums of [T] values over each turn's tokens."""
        own = torch.from_numpy(self.of_token >= 0)
        which = torch.from_numpy(self.of_token)[own]
        return torch.zeros(len(self.sample), dtype=torch.float64).index_add_(0, which, values.double()[own])

    def spread(self, values: Tensor, rollouts: Rollouts) -> Tensor:
        """[T] float32: each turn's value at its tokens in the loss, 0 elsewhere. values: [M]."""
        mask, of_token = torch.from_numpy(rollouts.loss_mask).bool(), torch.from_numpy(self.of_token)
        return torch.zeros(len(mask)).masked_scatter(mask, values.float()[of_token[mask]])

    def whole(self, returns: Tensor, rewards: Tensor, rollouts: Rollouts) -> Tensor:
        """[N] the return of each sample's attempt from its first turn on; where it has no turn, the sample's reward."""
        first = np.full(len(rollouts), -1)
        first[self.attempt[self.number == 0]] = np.flatnonzero(self.number == 0)
        mine = torch.from_numpy(first[attempts(rollouts)])
        return rewards.double() if not len(returns) else torch.where(mine >= 0, returns[mine], rewards.double())


def attempts(rollouts: Rollouts) -> NDArray[np.int64]:
    """[N] which attempt at a prompt a sample is of, numbered over all groups."""
    if rollouts.rollout is None:
        return np.arange(len(rollouts))
    pairs = np.stack([rollouts.group, rollouts.rollout])
    found: NDArray[np.int64] = np.unique(pairs, axis=1, return_inverse=True)[1].reshape(-1)
    return found


def at_the_end(rewards: Tensor, rollouts: Rollouts) -> Tensor:
    """[N] float64: the part of rewards that a sample earns at its end: all that its attempt was not given by then."""
    if rollouts.turn_rewards is None:
        return rewards.double()
    running = np.concatenate([[0.0], np.cumsum(rollouts.turn_rewards, dtype=np.float64)])
    given = running[rollouts.offsets[1:]] - running[rollouts.offsets[:-1]]
    attempt = attempts(rollouts)
    for one in np.flatnonzero(np.bincount(attempt) > 1):
        mine = np.flatnonzero(attempt == one)
        given[mine] = np.cumsum(given[mine])
    return rewards.double() - torch.from_numpy(given)


def turn_returns(rewards: Tensor, penalties: Tensor, rollouts: Rollouts, turns: Turns, discount: float) -> Tensor:
    """[M] float64: what an attempt earns from each of its turns on, each later turn weighed by `discount` once more.

    rewards: [N]; penalties: [T], which are taken from the turn that has them.
    """
    given = (
        torch.zeros(len(rollouts.tokens)) if rollouts.turn_rewards is None else torch.from_numpy(rollouts.turn_rewards)
    )
    earned = turns.sums(given.double() - penalties).numpy()
    last = np.full(int(turns.attempt.max(initial=-1)) + 1, -1)
    last[turns.attempt] = np.arange(len(turns.sample))  # the later one stays
    last = last[last >= 0]
    earned[last] += at_the_end(rewards, rollouts).numpy()[turns.sample[last]]
    after = np.zeros(int(turns.attempt.max(initial=-1)) + 1)
    for turn in reversed(range(len(earned))):
        earned[turn] += discount * after[turns.attempt[turn]]
        after[turns.attempt[turn]] = earned[turn]
    return torch.from_numpy(earned)
