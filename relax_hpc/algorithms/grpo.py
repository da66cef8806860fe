"""Group-relative policy optimisation (arXiv 2402.03300) with clip-higher and the token-level loss of DAPO (2503.14476)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from relax_hpc.algorithms.advantages import group_relative, over_tokens
from relax_hpc.algorithms.base import LossInputs
from relax_hpc.algorithms.kl import k3
from relax_hpc.algorithms.losses import clipped_surrogate
from relax_hpc.records import Rollouts


@dataclass(frozen=True)
class GrpoAlgorithm:
    """advantage = reward against the group's mean; loss = clipped surrogate + kl_coef · k3 to the reference."""

    clip: tuple[float, float] = (0.2, 0.28)
    normalise_std: bool = True
    kl_coef: float = 0.0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"reference"}) if self.kl_coef > 0 else frozenset()

    def advantages(self, rollouts: Rollouts) -> Tensor:
        relative = group_relative(
            torch.from_numpy(rollouts.rewards), torch.from_numpy(rollouts.group), normalise_std=self.normalise_std
        )
        return over_tokens(relative, rollouts)

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        low, high = self.clip
        loss, clipped = clipped_surrogate(inputs.logprobs, inputs.behaviour, inputs.advantages, low, high)
        metrics = {"clip_fraction": clipped.float()}
        if self.kl_coef > 0:
            if inputs.reference is None:
                raise ValueError(f"grpo with kl_coef = {self.kl_coef} needs the reference's logprobs and got none")
            reference_kl = k3(inputs.logprobs, inputs.reference)
            loss = loss + self.kl_coef * reference_kl
            metrics["reference_kl"] = reference_kl.detach()
        return loss, metrics
