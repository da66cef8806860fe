"""What every backend does with a step's rollouts, whatever its gradients come from.

rollouts ──forward of the reference, where one is needed──► columns ──updates──► for each, most often one:
gradients (sums over tokens) ──► norm ──finite?──► AdamW        metrics ──summed over processes──► means over tokens
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from relax_hpc.algorithms import Algorithm
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Rollouts
from relax_hpc.trainers.optim import learning_rate as rate_of
from relax_hpc.trainers.token_loss import TokenLoss, add, as_rollouts, columns_before, together, updates

T = TypeVar("T")


class Updating(ABC):
    """The part of relax_hpc.trainers.base.Trainer that makes updates; a backend fills in what it computes with."""

    recipe: Recipe
    world: int
    device: torch.device

    def step(
        self, rollouts: Rollouts, algorithm: Algorithm, step: int, progress: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        rate = rate_of(self.recipe.trainer, step, self.recipe.run.steps)
        temperature = self.recipe.rollout.temperature
        names = columns_before(algorithm, self.recipe)
        columns = {name: self._column(name, rollouts, temperature, progress) for name in names}
        parts = updates(dataclasses.replace(rollouts, columns=columns), algorithm, self.recipe, self.device)
        return together([self._optimise(part, loss, temperature, rate, progress) for part, loss in parts])

    def supervised_step(
        self, prompts: list[NDArray[np.int32]], answers: list[NDArray[np.int32]], learning_rate: float
    ) -> float:
        return self._optimise(as_rollouts(prompts, answers), TokenLoss(), 1.0, learning_rate)["loss"]

    @abstractmethod
    def _column(
        self, name: str, rollouts: Rollouts, temperature: float, progress: Callable[[], None]
    ) -> NDArray[np.float32]:
        """[T] logprobs of the tokens in the loss by the reference, or by the policy of now; on every process."""

    @abstractmethod
    def _gradients(
        self, rollouts: Rollouts, token_loss: TokenLoss, temperature: float, tokens: int, progress: Callable[[], None]
    ) -> dict[str, float]:
        """Make the gradients of all processes' losses over `tokens`; sums of the loss and of the metrics that this one adds."""

    @abstractmethod
    def _gradient_norm(self) -> float:
        """Of the whole model, the same on every process."""

    @abstractmethod
    def _update(self, norm: float, rate: float) -> None:
        """Clip gradients of this norm, and one step of AdamW with learning rate `rate`."""

    def _optimise(
        self,
        rollouts: Rollouts,
        token_loss: TokenLoss,
        temperature: float,
        rate: float,
        progress: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Forward, backward, and one step of AdamW with learning rate `rate`, unless something is not finite."""
        tokens = int(rollouts.loss_mask.sum())
        metrics = {"loss": 0.0, "grad_norm": 0.0, "learning_rate": rate, "tokens": float(tokens), "skipped": 0.0}
        if tokens == 0:
            return metrics
        sums = add(self._gather(self._gradients(rollouts, token_loss, temperature, tokens, progress)))
        metrics |= {name: value / tokens for name, value in sums.items()}
        metrics["grad_norm"] = norm = self._gradient_norm()
        if not (math.isfinite(norm) and math.isfinite(metrics["loss"])):
            return metrics | {"skipped": 1.0}
        self._update(norm, rate)
        return metrics

    def _gather(self, value: T) -> list[T]:
        """Every process's value, in the order of ranks (so that sums are the same everywhere)."""
        if self.world == 1:
            return [value]
        values: list[T] = [value] * self.world
        dist.all_gather_object(values, value)
        return values
