"""GRPO whose every training step takes a fixed time, as a large model's would: named in recipes as FILE.py:paced."""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from relax_hpc.algorithms.grpo import GrpoAlgorithm
from relax_hpc.records import Rollouts


@dataclass(frozen=True)
class Paced(GrpoAlgorithm):
    """Sleeps where the step begins; a replayed step too."""

    seconds: float = 0.0

    def advantages(self, rollouts: Rollouts) -> Tensor:
        time.sleep(self.seconds)
        return super().advantages(rollouts)


def paced(seconds: float) -> Paced:
    return Paced(seconds=seconds)
