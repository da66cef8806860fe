"""What an algorithm is: two pure functions of tensors, and the columns they need.

rewards, groups ──advantages()──► one number a token
logprobs now, logprobs then, advantages ──loss()──► one number a token, summed and divided by ONE global token count
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from relax_hpc.records import Rollouts


@dataclass(frozen=True, slots=True)
class LossInputs:
    """A micro-batch's tokens that enter the loss, flat: M tokens, all with loss mask 1."""

    logprobs: Tensor  # [M] of the policy being trained, with gradient
    behaviour: Tensor  # [M] of the policy that sampled, from the shard
    advantages: Tensor  # [M]
    reference: Tensor | None  # [M] of the reference policy; there when the algorithm's needs say "reference"


class Algorithm(Protocol):
    """Fill this to add an algorithm."""

    @property
    def needs(self) -> frozenset[str]:
        """Columns beyond the shard's own: "reference" for the reference policy's logprobs. A plain attribute will do."""
        ...

    def advantages(self, rollouts: Rollouts) -> Tensor:
        """[T] one advantage a token, in the order of `rollouts.tokens`; float32, 0 where the loss mask is 0."""
        ...

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """([M] loss of each token, metrics as [M] tensors without gradient, averaged over tokens by the trainer)."""
        ...
