"""GRPO whose every training step takes a fixed time, as a large model's would: named in recipes as FILE.py:paced."""

from __future__ import annotations

import time

from torch import Tensor

from relax_hpc.algorithms.policy import PolicyAlgorithm
from relax_hpc.recipe.algorithm import Grpo
from relax_hpc.records import Rollouts


class Paced(PolicyAlgorithm):
    """Sleeps where the step begins; a replayed step too."""

    def __init__(self, seconds: float) -> None:
        super().__init__(Grpo())
        self.seconds = seconds

    def advantages(self, rollouts: Rollouts) -> Tensor:
        time.sleep(self.seconds)
        return super().advantages(rollouts)


def paced(seconds: float) -> Paced:
    return Paced(seconds)
