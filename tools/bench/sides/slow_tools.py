"""An environment whose tools take lognormal seconds, and cost no CPU. Named in recipes as FILE.py:SlowTools."""

from __future__ import annotations

import asyncio

import numpy as np

from relax_hpc.environments import Turn
from relax_hpc.records import Prompt


def tools_s(index: int, turns: int, seconds: float, sigma: float) -> list[float]:
    """How long the tool takes in each turn of the episode with this prompt; seconds: the mean of all."""
    drawn = np.random.default_rng(index).lognormal(-(sigma**2) / 2, sigma, turns)
    return [float(seconds * each) for each in drawn]


class SlowTools:
    """Answers after a while, whatever the model says, a number of times."""

    def __init__(self, turns: int, seconds: float, sigma: float) -> None:
        self.turns, self.seconds, self.sigma = turns, seconds, sigma

    def reset(self, prompt: Prompt) -> None:
        self.left_s = tools_s(prompt.index, self.turns, self.seconds, self.sigma)

    async def step(self, answer: str) -> Turn:
        await asyncio.sleep(self.left_s.pop(0))
        return Turn(done=not self.left_s, observation="=", reward=float(len(answer)))

    def close(self) -> None:
        pass
