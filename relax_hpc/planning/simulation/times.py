"""Durations in a simulation: distributions for requests and steps, constants for all else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class RequestTimes(Protocol):
    """A distribution of the times and tokens of requests."""

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Floats, Floats]:
        """Draw `count` requests: ([count] seconds of generating, [count] tokens generated)."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """Requests of a real run: each draw has the time and tokens of one of them."""

    seconds: Floats  # [N]
    tokens: Floats  # [N]

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Floats, Floats]:
        picked = rng.integers(len(self.seconds), size=count)
        return self.seconds[picked], self.tokens[picked]


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Answers of lognormal length, all of a request generated at once: a request lasts as long as its longest answer."""

    mean: float
    """Mean tokens of an answer, before the longest ones are cut."""
    sigma: float
    longest: int
    samples: int
    """Samples of a request."""
    base_s: float
    token_s: float
    """Seconds from one token of an answer to the next."""

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Floats, Floats]:
        middle = math.log(self.mean) - self.sigma**2 / 2
        lengths = np.clip(rng.lognormal(middle, self.sigma, (count, self.samples)), 1, self.longest)
        return self.base_s + self.token_s * lengths.max(axis=1), lengths.sum(axis=1)


@dataclass(frozen=True, slots=True)
class Times:
    """Durations of one run, in seconds."""

    requests: RequestTimes
    train: Floats  # [M] a training step, with all that the trainer does in it but wait and publish
    publish: Floats  # [M] publishing its version of the weights; drawn together with `train`
    fetch_s: float
    """For a worker to take a version."""
    shard_s: float
    """To publish a request's shard, while the next request is generated."""
    checkpoint_s: float
    """The trainer's pause while a checkpoint is written."""
    restart_s: float
    """From a fault of the trainer until it steps again; repeated steps are not counted."""
    worker_lost_s: float
    """From a fault of a rollout node until others may claim its requests."""
    worker_restart_s: float
    """From then on until the node claims requests again."""

    def steps(self, rng: np.random.Generator, count: int) -> tuple[list[float], list[float]]:
        """Draw `count` steps: (seconds of training, seconds of publishing)."""
        picked = rng.integers(len(self.train), size=count)
        return self.train[picked].tolist(), self.publish[picked].tolist()
