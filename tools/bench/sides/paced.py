"""A large model's times with a tiny one: GRPO whose steps last as long as one says, and requests with a long tail.

Named in recipes as FILE.py:paced and FILE.py:LongTail.
"""

from __future__ import annotations

import math
import time

import numpy as np
from torch import Tensor

from relax_hpc.algorithms.grpo import GroupRelative
from relax_hpc.environments.single_turn import SingleTurn
from relax_hpc.recipe.tables.algorithm import Grpo
from relax_hpc.records import Prompt, Rollouts


class Paced(GroupRelative):
    """Sleeps where the step begins; a replayed step too."""

    def __init__(self, seconds: float) -> None:
        super().__init__(Grpo())
        self.seconds = seconds

    def advantages(self, rollouts: Rollouts) -> Tensor:
        time.sleep(self.seconds)
        return super().advantages(rollouts)


def paced(seconds: float) -> Paced:
    return Paced(seconds)


class LongTail(SingleTurn):
    """An answer is judged at once, but its prompt takes a lognormal time that depends on the prompt alone."""

    def __init__(self, seconds: float, sigma: float, samples_per_prompt: int) -> None:
        """seconds: the mean; samples_per_prompt: samples that share it."""
        super().__init__()
        self.middle, self.sigma, self.samples_per_prompt = math.log(seconds) - sigma**2 / 2, sigma, samples_per_prompt

    def reset(self, prompt: Prompt) -> None:
        time.sleep(np.random.default_rng(prompt.index).lognormal(self.middle, self.sigma) / self.samples_per_prompt)
        super().reset(prompt)
