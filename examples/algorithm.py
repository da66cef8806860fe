"""An algorithm of your own: advantages against the group's best answer, and a policy loss with a KL to the reference. See algorithm.toml."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from relax_hpc.algorithms import LossInputs
from relax_hpc.algorithms.common.sequences import means, spread
from relax_hpc.records import Rollouts


class BestOfGroup:
    """A sample is worth what it has above or below the mean of its group, divided by the distance of the group's best and worst."""

    def __init__(self, *, kl_coef: float = 0.0, truncate: float = 2.0) -> None:
        """The recipe's `algorithm.options`. truncate: bound on the importance ratio, a weight without gradient."""
        self.kl_coef, self.truncate = kl_coef, truncate
        self.needs = frozenset({"reference"} if kl_coef > 0 else ())

    def advantages(self, rollouts: Rollouts) -> Tensor:
        """[T] one number a token, for all samples of the step at once; it is called before the step's micro-batches are made."""
        worth = np.zeros(len(rollouts), np.float32)
        for group in np.unique(rollouts.group):
            mine = rollouts.group == group
            rewards = rollouts.rewards[mine]
            worth[mine] = (rewards - rewards.mean()) / (np.ptp(rewards) + 1e-6)
        tokens = np.repeat(worth, np.diff(rollouts.offsets)) * rollouts.loss_mask
        return torch.from_numpy(tokens.astype(np.float32))

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """([M] the loss of each token, metrics [M]). The trainer divides the sum by the step's token count."""
        ratio = (inputs.logprobs - inputs.old_logprobs).exp().detach()
        loss = -ratio.clamp(max=self.truncate) * inputs.advantages * inputs.logprobs
        metrics = {
            "truncated_ratio": (ratio > self.truncate).float(),
            "sample_ratio_max": spread(means(ratio, inputs.lengths), inputs.lengths),
        }
        if inputs.reference is not None:
            apart = inputs.reference - inputs.logprobs
            kl = apart.exp() - 1 - apart  # k3
            loss, metrics["reference_kl"] = loss + self.kl_coef * kl, kl.detach()
        return loss, metrics
