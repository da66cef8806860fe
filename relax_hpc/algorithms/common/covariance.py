"""Tokens whose advantage and logprob vary together, which are those that lower the entropy (arXiv 2505.22617).

Covariances are those of the policy that sampled, over the tokens of the whole step, so that they are the same however
the step is cut.
"""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from relax_hpc.records import Rollouts


def covariances(advantages: Tensor, rollouts: Rollouts) -> NDArray[np.float64]:
    """[T] (A - mean)·(log π - mean) over the tokens in the loss (eq. 10); -inf elsewhere."""
    chosen = rollouts.loss_mask == 1
    found = np.full(len(chosen), -np.inf)
    parts = (x[chosen].astype(np.float64) for x in (advantages.numpy(), rollouts.logprobs))
    if chosen.any():
        found[chosen] = np.prod([part - part.mean() for part in parts], axis=0)
    return found


def highest(advantages: Tensor, rollouts: Rollouts, share: float) -> NDArray[np.float32]:
    """[T] 1 at the `share` of the tokens in the loss with the highest covariances, at least one (KL-Cov, eq. 12)."""
    marks = np.zeros(len(rollouts.tokens), np.float32)
    first = np.argsort(-covariances(advantages, rollouts), kind="stable")
    marks[first[: _count(rollouts, share)]] = 1
    return marks


def without_some(advantages: Tensor, rollouts: Rollouts, share: float, low: float, high: float) -> Tensor:
    """[T] the advantages, 0 at a `share` of the tokens in the loss, at least one, drawn from those whose covariance is
    within [low, high]: they lose their gradient (Clip-Cov, eq. 11). The draw depends on the samples' names alone."""
    found = covariances(advantages, rollouts)
    among = np.flatnonzero((found >= low) & (found <= high))
    random = np.random.default_rng(xxhash.xxh3_64_intdigest("\n".join(rollouts.ids).encode()))
    drawn = random.permutation(among)[: _count(rollouts, share)]
    return advantages.index_fill(0, torch.from_numpy(drawn), 0.0)


def _count(rollouts: Rollouts, share: float) -> int:
    tokens = int(rollouts.loss_mask.sum())
    return min(tokens, max(1, int(share * tokens)))
