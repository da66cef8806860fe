"""How long everything takes in a simulation: what requests and steps are drawn from, and what always takes the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class RequestTimes(Protocol):
    """What generating requests takes."""

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Floats, Floats]:
        """Of `count` requests: seconds of generating, tokens generated."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """Requests of a run: each that is drawn takes what one of them took, and has its tokens."""

    seconds: Floats  # [N]
    tokens: Floats  # [N]

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Floats, Floats]:
        picked = rng.integers(len(self.seconds), size=count)
        return self.seconds[picked], self.tokens[picked]


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Answers of lognormal length, all of a request generated at once: it lasts as long as its longest answer."""

    mean: float
    """Tokens of an answer, before the longest ones are cut."""
    sigma: float
    longest: int
    samples: int
    """Of a request."""
    base_s: float
    token_s: float
    """From one token of an answer to the next."""

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Floats, Floats]:
        middle = math.log(self.mean) - self.sigma**2 / 2
        lengths = np.clip(rng.lognormal(middle, self.sigma, (count, self.samples)), 1, self.longest)
        return self.base_s + self.token_s * lengths.max(axis=1), lengths.sum(axis=1)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, of one run."""

    requests: RequestTimes
    train: Floats  # [M] a training step, with all that the trainer does in it but wait and publish
    publish: Floats  # [M] publishing its version of the weights; drawn together with `train`
    fetch_s: float
    """A worker takes a version."""
    shard_s: float
    """Publishing a request's shard, beside the next request."""
    checkpoint_s: float
    """The trainer stands still while one is written."""
    restart_s: float
    """From a fault of the trainer to its first step again, what is repeated not counted."""
    worker_lost_s: float
    """From a fault of a rollout node until others may claim its requests."""
    worker_restart_s: float
    """Until it claims again."""

    def steps(self, rng: np.random.Generator, count: int) -> tuple[list[float], list[float]]:
        """Of `count` steps: seconds of training, of publishing."""
        picked = rng.integers(len(self.train), size=count)
        return self.train[picked].tolist(), self.publish[picked].tolist()
