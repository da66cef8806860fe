"""What every backend's loss has in common: the algorithm asked for one number a token, and its answer checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_hpc.algorithms import Algorithm, LossInputs, Totals
from relax_hpc.algorithms.kl import k3
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Rollouts
from relax_hpc.run_dir import RunError


class TokenLoss:
    """The cross-entropy of a warm-up; `PolicyLoss` is an algorithm's."""

    entropy_gradient = False

    def tokens(
        self, targets: NDArray[np.int64], logprobs: Tensor, entropies: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """([M] losses, metrics as [M] tensors) of the tokens `targets`, by their index in rollouts.tokens."""
        return -logprobs, {}

    def __call__(
        self, targets: NDArray[np.int64], logprobs: Tensor, entropies: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """(sum of the losses, sums of the losses and of the metrics). Raises RunError for a loss of the wrong shape."""
        loss, metrics = self.tokens(targets, logprobs, entropies)
        values = {"loss": loss, "entropy": entropies, **metrics}
        wrong = [n for n, v in values.items() if v.shape != targets.shape]
        if wrong:
            raise RunError(
                f"the algorithm's {wrong} have other shapes than [{targets.size}]: one number a token is expected"
            )
        sums = torch.stack([v.detach().to(loss) for v in values.values()]).double().sum(1)
        return loss.sum(), dict(zip(values, sums.tolist(), strict=True))


class PolicyLoss(TokenLoss):
    """An algorithm's loss on what one update trains on."""

    def __init__(
        self, rollouts: Rollouts, algorithm: Algorithm, advantages: Tensor, budget: int, device: torch.device
    ) -> None:
        """advantages: [T]; budget: tokens that the model may generate for a sample at most."""
        self.algorithm, self.device, self.advantages = algorithm, device, advantages
        self.behaviour = torch.from_numpy(rollouts.logprobs)
        self.columns = {name: torch.from_numpy(values) for name, values in rollouts.columns.items()}
        self.sample_of = np.repeat(np.arange(len(rollouts)), np.diff(rollouts.offsets))
        chosen = self.sample_of[rollouts.loss_mask == 1]
        self.totals = Totals(tokens=len(chosen), samples=len(np.unique(chosen)), budget=budget)
        self.entropy_gradient = "entropy" in algorithm.needs

    def tokens(
        self, targets: NDArray[np.int64], logprobs: Tensor, entropies: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        here: Callable[[Tensor], Tensor] = lambda values: values[torch.from_numpy(targets)].to(self.device)
        columns = {name: here(values) for name, values in self.columns.items()}
        samples = self.sample_of[targets]  # each one's tokens lie together
        begins = np.flatnonzero(np.diff(samples, prepend=-1))
        inputs = LossInputs(
            logprobs=logprobs,
            entropies=entropies,
            behaviour=here(self.behaviour),
            advantages=here(self.advantages),
            reference=columns.get("reference"),
            # where no column was made, this is the step's first update: they are those of now
            recomputed=columns.get("recomputed", logprobs.detach()),
            lengths=torch.from_numpy(np.diff(begins, append=len(samples))).to(self.device),
            totals=self.totals,
        )
        loss, metrics = self.algorithm.loss(inputs)
        # of behaviour to current: the tokens are the behaviour's
        return loss, {"kl": k3(inputs.behaviour, logprobs.detach()), **metrics}


def columns_before(algorithm: Algorithm, recipe: Recipe) -> list[str]:
    """The policies whose logprobs of a step's tokens are computed before its first update."""
    several = recipe.trainer.updates_per_step > 1  # with one update, the policy of before it is that of its forward
    return [
        name for name in ("reference", "recomputed") if name in algorithm.needs and (several or name == "reference")
    ]


def updates(
    rollouts: Rollouts, algorithm: Algorithm, recipe: Recipe, device: torch.device
) -> list[tuple[Rollouts, PolicyLoss]]:
    """What each update of a step trains on, with its loss: whole groups, in turn; the tokens of others have loss mask 0.

    Raises RunError for advantages of the wrong shape.
    """
    advantages = algorithm.advantages(rollouts)
    if advantages.shape != rollouts.tokens.shape:
        raise RunError(
            f"{type(algorithm).__name__}.advantages returned shape {list(advantages.shape)} for {rollouts.tokens.size} tokens: "
            "one number a token is expected"
        )
    count, budget = recipe.trainer.updates_per_step, recipe.rollout.max_new_tokens * recipe.rollout.max_turns
    turn = np.unique(rollouts.group, return_inverse=True)[1] % count
    turn_of = np.repeat(turn, np.diff(rollouts.offsets))
    parts = [replace(rollouts, loss_mask=rollouts.loss_mask * (turn_of == u)) for u in range(count)]
    return [(part, PolicyLoss(part, algorithm, advantages, budget, device)) for part in parts]


def together(said: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of a step from those of its updates: means over tokens; sums of tokens and of skipped updates."""
    if len(said) == 1:
        return said[0]
    tokens = sum(one["tokens"] for one in said)
    found = {
        name: sum(one[name] * one["tokens"] for one in said if one["tokens"]) / max(tokens, 1)
        for name in dict.fromkeys(name for one in said for name in one)
    }
    return found | {
        "tokens": tokens,
        "learning_rate": said[0]["learning_rate"],
        "skipped": sum(one["skipped"] for one in said),
    }


def add(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sums by name."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def as_rollouts(prompts: list[NDArray[np.int32]], answers: list[NDArray[np.int32]]) -> Rollouts:
    """Prompts and answers as samples whose every token is in the loss."""
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
    )
