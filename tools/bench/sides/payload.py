"""What both sides of the spool benchmark carry: samples of lognormal length, the same from the same seed everywhere."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MEAN_TOKENS, SIGMA, SHORTEST, LONGEST = 2048, 0.6, 64, 8192
VOCABULARY = 151_936
MARKER_BEGIN, MARKER_END = "/marker-of-the-benchmark-begin", "/marker-of-the-benchmark-end"
"""Paths that are looked for, in vain, so that a trace of system calls shows where the measured stretch begins and ends."""


@dataclass(frozen=True)
class Payload:
    """N samples, T tokens in all; `offsets` says where each sample's tokens begin."""

    tokens: NDArray[np.int32]  # [T]
    logprobs: NDArray[np.float32]  # [T]
    loss_mask: NDArray[np.uint8]  # [T]
    rewards: NDArray[np.float32]  # [N]
    offsets: NDArray[np.int64]  # [N + 1]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.tokens, self.logprobs, self.loss_mask, self.rewards))

    def sums(self) -> list[float]:
        """What a consumer must arrive at that really read tokens, loss mask, logprobs and rewards."""
        return [int(self.tokens.sum(dtype=np.int64)), int(self.loss_mask.sum(dtype=np.int64)),
                float(self.logprobs.sum(dtype=np.float64)), float(self.rewards.sum(dtype=np.float64))]  # fmt: skip


def make(samples: int, seed: int = 0) -> Payload:
    """`samples` samples of about 2 k tokens each."""
    random = np.random.default_rng([seed, samples])
    lengths = (
        random.lognormal(np.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA, samples).clip(SHORTEST, LONGEST).astype(np.int64)
    )
    total = int(lengths.sum())
    return Payload(
        tokens=random.integers(0, VOCABULARY, total, dtype=np.int32),
        logprobs=-random.exponential(size=total).astype(np.float32),
        loss_mask=(random.random(total) < 0.95).astype(np.uint8),
        rewards=random.standard_normal(samples, dtype=np.float32),
        offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
    )


def agree(found: list[float], expected: list[float]) -> bool:
    """Whether two `sums` are of the same values (float sums differ by their order of addition)."""
    return bool(np.allclose(found, expected, rtol=1e-4))
