"""Common part of every backend's loss: the algorithm is asked for one number a token, and its answer is checked.

A loss is called with a micro-batch's targets, and with the learning model's output at them: logprobs and entropies of
the policy, values of the critic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_hpc.algorithms import ActorCritic, Algorithm, LossInputs, PolicyAlgorithm, Supervised, Totals, make_algorithm
from relax_hpc.algorithms.base import TEACHER, VALUES
from relax_hpc.algorithms.common.kl import k3
from relax_hpc.algorithms.common.losses import exp_ratio
from relax_hpc.algorithms.common.turns import Turns
from relax_hpc.algorithms.ppo import explained_variance
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Media, Rollouts

Learner = Literal["policy", "critic"]
"""The models that a trainer trains."""
PEAK = "_max"
"""A metric whose name ends so is the maximum over tokens, not their mean; its values are not negative."""


class TokenLoss:
    """The loss of an SFT warm start: cross-entropy. `PolicyLoss` is an algorithm's loss, `ValueLoss` its critic's."""

    learner: Learner = "policy"
    entropy_gradient = False
    whole_groups = False
    """True where a micro-batch must have all samples of a group that are in the loss, or none."""

    def tokens(self, targets: NDArray[np.int64], *said: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """([M] losses, metrics as [M] tensors) of the tokens `targets`, indices into rollouts.tokens. said: the model's
        output at them."""
        logprobs, entropies = said
        return -logprobs, {"entropy": entropies}

    def __call__(self, targets: NDArray[np.int64], *said: Tensor) -> tuple[Tensor, dict[str, float]]:
        """(sum of the losses; sums of the losses and of the metrics, the maximum for PEAK ones). Raises RunError for a
        loss of the wrong shape."""
        loss, metrics = self.tokens(targets, *said)
        values = {"loss": loss, **metrics}
        wrong = [n for n, v in values.items() if v.shape != targets.shape]
        if wrong:
            raise RunError(
                f"the algorithm's {wrong} have other shapes than [{targets.size}]: one number a token is expected"
            )
        table = torch.stack([v.detach().to(loss) for v in values.values()]).double()
        peak = torch.tensor([name.endswith(PEAK) for name in values], device=table.device)
        totals = table.sum(1).where(~peak, table.amax(1) if targets.size else 0.0)
        return loss.sum(), dict(zip(values, totals.tolist(), strict=True))


class PolicyLoss(TokenLoss):
    """An algorithm's loss on the tokens of one update."""

    def __init__(
        self, rollouts: Rollouts, algorithm: Algorithm, advantages: Tensor, budget: int, device: torch.device
    ) -> None:
        """advantages: [T]; budget: the most tokens that the model may generate for a sample."""
        self.algorithm, self.device, self.advantages = algorithm, device, advantages
        self.old_logprobs = torch.from_numpy(rollouts.logprobs)
        self.columns = {name: torch.from_numpy(values) for name, values in rollouts.columns.items()}
        self.sample_of = np.repeat(np.arange(len(rollouts)), np.diff(rollouts.offsets))
        chosen = self.sample_of[rollouts.loss_mask == 1]
        _, group, tokens = np.unique(rollouts.group[chosen], return_inverse=True, return_counts=True)
        self.totals = Totals(len(chosen), samples=len(np.unique(chosen)), groups=len(tokens), budget=budget)
        self.group_tokens = np.zeros(len(rollouts), np.int64)
        self.group_tokens[chosen] = tokens[group]
        self.rollouts = rollouts
        self.entropy_gradient = "entropy" in algorithm.needs
        self.whole_groups = getattr(algorithm, "whole_groups", False)
        turns = Turns.of(rollouts)
        self.turn = torch.from_numpy(np.append(turns.number, 0)[turns.of_token])

    def tokens(self, targets: NDArray[np.int64], *said: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, entropies = said
        here: Callable[[Tensor], Tensor] = lambda values: values[torch.from_numpy(targets)].to(self.device)
        columns = {name: here(values) for name, values in self.columns.items()}
        samples = self.sample_of[targets]  # each one's tokens lie together
        begins = np.flatnonzero(np.diff(samples, prepend=-1))
        first = samples[begins]
        _, one = np.unique(self.rollouts.group[first], return_index=True)
        if self.whole_groups and len(targets) < self.group_tokens[first[one]].sum():
            raise RunError(
                "the algorithm has whole_groups = True, but the trainer's backend split a group over micro-batches"
            )
        each: Callable[[NDArray[Any]], Tensor] = lambda values: torch.from_numpy(values[first]).to(self.device)
        inputs = LossInputs(
            logprobs=logprobs,
            entropies=entropies,
            old_logprobs=here(self.old_logprobs),
            advantages=here(self.advantages),
            reference=columns.get("reference"),
            # where no column was made, this is the step's first update: they are those of now
            recomputed=columns.get("recomputed", logprobs.detach()),
            lengths=torch.from_numpy(np.diff(begins, append=len(samples))).to(self.device),
            group=each(self.rollouts.group),
            group_tokens=each(self.group_tokens),
            turn=here(self.turn),
            rewards=each(self.rollouts.rewards),
            totals=self.totals,
            teacher=columns.get(TEACHER),
            extra={name: each(values) for name, values in self.rollouts.extra.items()},
            columns=columns,
        )
        loss, metrics = self.algorithm.loss(inputs)
        if isinstance(self.algorithm, Supervised):
            return loss, {"entropy": entropies, **metrics}
        now = logprobs.detach()
        apart, ratio = (now - inputs.old_logprobs).abs(), exp_ratio(now - inputs.old_logprobs)
        return loss, {
            "entropy": entropies, "kl": k3(inputs.old_logprobs, now),  # of behavior to current: the tokens are the behavior's
            "logprob_diff": apart, "logprob_diff_max": apart, "importance": ratio, "importance_max": ratio, **metrics,
        }  # fmt: skip


class ValueLoss(TokenLoss):
    """A critic's loss on the tokens of one update."""

    learner: Learner = "critic"

    def __init__(self, rollouts: Rollouts, algorithm: ActorCritic, returns: Tensor, device: torch.device) -> None:
        """returns: [T], which the critic learns."""
        self.algorithm, self.returns, self.device = algorithm, returns, device
        self.old = torch.from_numpy(rollouts.columns[VALUES])

    def tokens(self, targets: NDArray[np.int64], *said: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        [values] = said
        old, returns = (column[torch.from_numpy(targets)].to(self.device) for column in (self.old, self.returns))
        return self.algorithm.value_loss(values, old, returns)


def needs_reference(recipe: Recipe) -> bool:
    """Return True if the trainer holds the reference, as the algorithm says once it is made."""
    return recipe.holds_reference(make_algorithm(recipe.algorithm).needs)


def columns_before(algorithm: Algorithm, recipe: Recipe) -> list[str]:
    """Names of the columns that other models, or the policy before a step's first update, must make for the step's
    tokens."""
    several = recipe.trainer.updates_per_step > 1  # with one update, the policy of before it is that of its forward
    names = [name for name in ("reference", TEACHER, VALUES) if name in algorithm.needs]
    return names + ["recomputed"] * (several and "recomputed" in algorithm.needs)


def updates(
    rollouts: Rollouts, algorithm: Algorithm, recipe: Recipe, device: torch.device
) -> list[tuple[Rollouts, PolicyLoss]]:
    """Split a step into its updates: the rollouts that each trains on, with its loss. Raises RunError for advantages of
    the wrong shape."""
    advantages = algorithm.advantages(rollouts)
    if advantages.shape != rollouts.tokens.shape:
        raise RunError(
            f"{type(algorithm).__name__}.advantages returned shape {list(advantages.shape)} for {rollouts.tokens.size} tokens: "
            "one number a token is expected"
        )
    budget = recipe.rollout.max_new_tokens * recipe.rollout.max_turns
    if isinstance(algorithm, PolicyAlgorithm):
        rollouts, advantages = algorithm.selected(rollouts, advantages)
    return [
        (part, PolicyLoss(part, algorithm, advantages, budget, device))
        for part in shares(rollouts, recipe.trainer.updates_per_step)
    ]


def critic_updates(
    rollouts: Rollouts, algorithm: ActorCritic, recipe: Recipe, device: torch.device
) -> tuple[list[tuple[Rollouts, ValueLoss]], float]:
    """Split a step into the critic's updates, each with its loss; also returns the explained variance of the values
    before the step."""
    returns = algorithm.returns(rollouts)
    values, mask = (torch.from_numpy(column) for column in (rollouts.columns[VALUES], rollouts.loss_mask))
    parts = shares(rollouts, recipe.trainer.updates_per_step)
    losses = [(part, ValueLoss(part, algorithm, returns, device)) for part in parts]
    return losses, explained_variance(values, returns, mask)


def shares(rollouts: Rollouts, count: int) -> list[Rollouts]:
    """Split the groups over `count` updates, in turn; in each one's rollouts, tokens of other groups have loss mask 0."""
    turn = np.unique(rollouts.group, return_inverse=True)[1] % count
    turn_of = np.repeat(turn, np.diff(rollouts.offsets))
    return [replace(rollouts, loss_mask=rollouts.loss_mask * (turn_of == u)) for u in range(count)]


def together(said: Sequence[dict[str, float]]) -> dict[str, float]:
    """Combine the metrics of a step's updates: means over tokens, maxima of PEAK ones, sums of tokens and of skipped
    updates.

    Metrics of a skipped update are left out where another one was made: they are not finite, and no part of what was
    learned.
    """
    if len(said) == 1:
        return said[0]
    made = [one for one in said if one["tokens"] and not one["skipped"]] or said
    tokens = sum(one["tokens"] for one in made)
    found = {
        name: sum(one[name] * one["tokens"] for one in made if one["tokens"]) / max(tokens, 1)
        for name in dict.fromkeys(name for one in made for name in one)
    }
    peaks = {name: float(np.max([one.get(name, 0.0) for one in made])) for name in found if name.endswith(PEAK)}
    return (
        found
        | peaks
        | {
            "tokens": sum(one["tokens"] for one in said),
            "learning_rate": said[0]["learning_rate"],
            "skipped": sum(one["skipped"] for one in said),
        }
    )


def add(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Add metrics by name; of PEAK ones take the maximum."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            before = total.get(name, 0.0)
            # numpy's maximum is NaN where one of both is; Python's is the one that stands first
            total[name] = float(np.maximum(before, value)) if name.endswith(PEAK) else before + value
    return total


def as_rollouts(
    prompts: list[NDArray[np.int32]], answers: list[NDArray[np.int32]], media: Sequence[Media | None] = ()
) -> Rollouts:
    """Turn prompts, with what each shows, and answers into samples whose every token is in the loss."""
    tokens = np.concatenate([np.zeros(0, np.int32), *answers])
    none = np.zeros(len(prompts), np.float32)
    return Rollouts(
        ids=[str(i) for i in range(len(prompts))],
        group=np.arange(len(prompts)),
        rewards=none,
        raw_rewards=none,
        prompt_tokens=np.concatenate([np.zeros(0, np.int32), *prompts]),
        prompt_offsets=np.cumsum([0, *(len(p) for p in prompts)]),
        tokens=tokens,
        offsets=np.cumsum([0, *(len(a) for a in answers)]),
        loss_mask=np.ones(len(tokens), np.uint8),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int32),
        finish=none.astype(np.uint8),
        media=tuple(media) if any(media) else (),
    )
