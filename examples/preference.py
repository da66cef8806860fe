"""A loss over pairs of samples: the best answer to each prompt against the worst (DPO, arXiv 2305.18290). See docs/add-your-own/algorithm.md."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from relax_hpc.algorithms import LossInputs
from relax_hpc.algorithms.common.sequences import sums
from relax_hpc.records import Rollouts


class Preference:
    """-log σ(β·(m of the best - m of the worst)), with m the sum of log π - log π_ref over an answer; groups whose rewards are equal have none."""

    needs = frozenset({"reference"})
    whole_groups = True

    def __init__(self, *, beta: float = 0.1) -> None:
        self.beta = beta

    def advantages(self, rollouts: Rollouts) -> Tensor:
        return torch.zeros(len(rollouts.tokens))  # the loss looks at rewards itself

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        assert inputs.reference is not None
        moved, last = sums(inputs.logprobs - inputs.reference, inputs.lengths), inputs.lengths.cumsum(0) - 1
        loss = 0 * inputs.logprobs
        for group in inputs.group.unique():
            mine = (inputs.group == group).nonzero()[:, 0]
            best, worst = mine[inputs.rewards[mine].argmax()], mine[inputs.rewards[mine].argmin()]
            if inputs.rewards[best] > inputs.rewards[worst]:
                loss[last[best]] -= logsigmoid(self.beta * (moved[best] - moved[worst]))
        weight = inputs.totals.tokens / inputs.totals.groups  # the trainer divides by tokens: a mean over groups
        return loss * weight, {"pair_loss": loss.detach() * weight}
