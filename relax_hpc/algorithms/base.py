"""The interface of an algorithm: two pure functions of tensors, and the names of the further inputs that they need.

rewards, groups ──advantages()──► one number a token
logprobs now, logprobs then, advantages ──loss()──► one number a token, summed and divided by ONE global token count

A mean other than that over tokens is a weight on each of them, so that every split makes the same sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from relax_hpc.records import Rollouts

REFERENCE, RECOMPUTED = "reference", "recomputed"
VALUES, TEACHER = "values", "teacher"
"""A critic's values, each of the state before the token, which `ppo` alone has; a teacher's logprobs."""
NEEDS = frozenset({REFERENCE, RECOMPUTED, "entropy", TEACHER})
"""Inputs that any algorithm may ask for: the reference's logprobs; the trainer's own logprobs before the step's first
update (or a scorer's, of a policy between the one that sampled and this one); entropies with gradient; the logprobs of
algorithm.teacher."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals over everything that one optimizer step trains on; the same in each of its micro-batches."""

    tokens: int
    """Tokens in the loss: the sum of the losses is divided by this."""
    samples: int
    """Samples with a token in the loss."""
    groups: int
    """Groups with a token in the loss."""
    budget: int
    """The most tokens that the model may generate for a sample."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Tokens of a micro-batch that enter the loss, flat: M tokens, all with loss mask 1, of S whole samples, one after
    another."""

    logprobs: Tensor  # [M] of the policy being trained, with gradient
    entropies: Tensor  # [M] of its distributions; with gradient when the algorithm's needs say "entropy"
    old_logprobs: Tensor  # [M] of the policy that sampled, as the engine reported them: from the shard
    advantages: Tensor  # [M]
    reference: Tensor | None  # [M] of the reference policy; there when the needs say "reference"
    recomputed: Tensor | None  # [M] of the policy before the step, or a scorer's; there when the needs say so
    lengths: Tensor  # [S] int64, tokens of each sample, at least 1
    group: Tensor  # [S] int64, which group of the step a sample belongs to
    group_tokens: Tensor  # [S] int64, tokens in the loss of all samples of its group
    turn: Tensor  # [M] int64, which turn of its sample's attempt a token is of, from 0
    rewards: Tensor  # [S] float32, what the algorithm trains on
    totals: Totals
    teacher: Tensor | None = None  # [M] of the teacher; there when the needs say so
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # [S] each: as Rollouts.extra
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # [M] each: all of Rollouts.columns


LossAndMetrics = tuple[Tensor, dict[str, Tensor]]
"""([M] loss of each token, metrics as [M] tensors)."""


class Algorithm(Protocol):
    """The interface to fill to add an algorithm. With an attribute `whole_groups = True` beside it, `loss` is given all
    samples of a group together, so that it may compare them."""

    @property
    def needs(self) -> frozenset[str]:
        """The names among NEEDS that `advantages` and `loss` use. A plain attribute will do."""
        ...

    def advantages(self, rollouts: Rollouts) -> Tensor:
        """[T] one advantage a token, in the order of `rollouts.tokens`; float32, 0 where the loss mask is 0.

        With the need "reference", `rollouts.columns["reference"]` has the reference's logprobs.
        """
        ...

    def loss(self, inputs: LossInputs) -> LossAndMetrics:
        """([M] loss of each token, metrics as [M] tensors without gradient, averaged over tokens by the trainer)."""
        ...
