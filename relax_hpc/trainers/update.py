"""Updates from a step's rollouts, as every backend makes them, whatever computes its gradients.

rollouts ──forward of reference, teacher, critic, where needed──► columns ──updates──► for each, most often one:
gradients (sums over tokens) ──► norm ──finite?──► AdamW        metrics ──summed over processes──► means over tokens

Columns that other roles made come with the rollouts. A critic that the trainer holds learns from these columns before
the policy does, so that neither sees the other's changes in the step; a critic in processes of its own
(`CriticUpdating`) makes its values, and learns, there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn import Module
from torch.optim import Optimizer

from relax_hpc.algorithms import ActorCritic, Algorithm, PolicyAlgorithm, Supervised
from relax_hpc.algorithms.base import RECOMPUTED, VALUES
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Media, Rollouts
from relax_hpc.trainers.host_copies import HostCopies, gradients_of, state_of
from relax_hpc.trainers.optim import learning_rate as rate_of
from relax_hpc.trainers.token_loss import (
    PEAK,
    Learner,
    TokenLoss,
    add,
    as_rollouts,
    columns_before,
    critic_updates,
    shares,
    together,
    updates,
)

T = TypeVar("T")


class Updating(ABC):
    """Makes updates of models; a backend fills in the abstract methods."""

    recipe: Recipe
    world: int
    device: torch.device
    seconds: Mapping[str, float] = MappingProxyType({})

    def _teach_critic(
        self, rollouts: Rollouts, algorithm: ActorCritic, step: int, progress: Callable[[], None]
    ) -> dict[str, float]:
        """Make the critic's updates; returns their metrics under names of their own, except tokens and skipped."""
        config = self.recipe.trainer
        schedule = rate_of(config, step, self.recipe.run.steps) / config.learning_rate
        rate = algorithm.config.critic.learning_rate * schedule
        parts, explained = critic_updates(rollouts, algorithm, self.recipe, self.device)
        said = together([self._optimize(part, loss, 1.0, rate, progress) for part, loss in parts])
        own = {"loss": "value_loss", "grad_norm": "critic_grad_norm", "learning_rate": "critic_learning_rate"}
        return {own.get(name, name): value for name, value in said.items()} | {"explained_variance": explained}

    @abstractmethod
    def _column(
        self, name: str, rollouts: Rollouts, temperature: float, progress: Callable[[], None]
    ) -> NDArray[np.float32]:
        """[T] the output of the model of this name (recomputed: the current policy) at the tokens in the loss; on every
        process."""

    @abstractmethod
    def _gradients(
        self, rollouts: Rollouts, token_loss: TokenLoss, temperature: float, tokens: int, progress: Callable[[], None]
    ) -> dict[str, float]:
        """Make the gradients of all processes' losses over `tokens`; returns the sums of the loss and of the metrics
        that this process adds."""

    @abstractmethod
    def _gradient_norm(self, learner: Learner) -> float:
        """The gradients' norm over the whole model, the same on every process."""

    @abstractmethod
    def _update(self, learner: Learner, norm: float, rate: float) -> None:
        """Clip gradients of this norm, and make one step of AdamW with learning rate `rate`."""

    def _optimize(
        self,
        rollouts: Rollouts,
        token_loss: TokenLoss,
        temperature: float,
        rate: float,
        progress: Callable[[], None] = lambda: None,
    ) -> dict[str, float]:
        """Make forward, backward, and one step of AdamW with learning rate `rate`, unless something is not finite."""
        tokens = int(rollouts.loss_mask.sum())
        metrics = _nothing(float(tokens), rate)
        if tokens == 0:
            return metrics
        with self._timed("forward_backward_s"):
            sums = add(self._gather(self._gradients(rollouts, token_loss, temperature, tokens, progress)))
            metrics |= {name: value if name.endswith(PEAK) else value / tokens for name, value in sums.items()}
            metrics["grad_norm"] = norm = self._gradient_norm(token_loss.learner)
        if not (math.isfinite(norm) and math.isfinite(metrics["loss"])):
            return metrics | {"skipped": 1.0}
        with self._timed("optimize_s"):
            self._update(token_loss.learner, norm, rate)
        return metrics

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        took = time.perf_counter() - began
        self.seconds = {**self.seconds, part: self.seconds.get(part, 0.0) + took}

    def _gather(self, value: T) -> list[T]:
        """Gather every process's value, in the order of ranks (so that sums are the same everywhere)."""
        if self.world == 1:
            return [value]
        values: list[T] = [value] * self.world
        dist.all_gather_object(values, value)
        return values


class PolicyUpdating(Updating):
    """The part of relax_hpc.trainers.base.Trainer that makes updates."""

    host: HostCopies

    def step(
        self, rollouts: Rollouts, algorithm: Algorithm, step: int, progress: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        rate = rate_of(self.recipe.trainer, step, self.recipe.run.steps)
        temperature = 1.0 if isinstance(algorithm, Supervised) else self.recipe.rollout.temperature
        self.seconds = {}
        columns = dict(rollouts.columns)
        for name in columns_before(algorithm, self.recipe):
            if name in columns:  # another role's
                continue
            # Sums come out otherwise in other rows (in bfloat16 by 1e-2), and a ratio shows it: what it is taken against is
            # computed in the rows of its own update. The reference has no such twin, and whole steps pack better.
            parts = shares(rollouts, self.recipe.trainer.updates_per_step) if name == RECOMPUTED else [rollouts]
            with self._timed("columns_s"):
                found = [self._column(name, part, temperature, progress) for part in parts]
            columns[name] = np.sum(found, axis=0, dtype=np.float32)  # each token's is in one of them, zeros elsewhere
        rollouts = dataclasses.replace(rollouts, columns=columns)
        of_critic: dict[str, float] = {}
        if isinstance(algorithm, ActorCritic):
            if self.recipe.trains_critic:
                of_critic = self._teach_critic(rollouts, algorithm, step, progress)
            if step < algorithm.config.critic.warmup_steps:
                return _nothing(float(rollouts.loss_mask.sum()), 0.0) | of_critic
        made = updates(rollouts, algorithm, self.recipe, self.device)
        said = [self._optimize(part, loss, temperature, rate, progress) for part, loss in made]
        metrics = together(said)
        if "logprob_diff" in said[0] and (rollouts.versions[rollouts.loss_mask == 1] == step).all():
            metrics["engine_diff"] = said[0]["logprob_diff"]  # nothing was learned between sampling and this update
        if isinstance(algorithm, PolicyAlgorithm):
            metrics |= algorithm.reward_parts(rollouts)
        every = getattr(self.recipe.algorithm, "reference_refresh_steps", None)
        if every and (step + 1) % every == 0:
            self._refer()
        return of_critic | metrics | {"skipped": metrics["skipped"] + of_critic.get("skipped", 0.0)}

    def supervised_step(
        self,
        prompts: list[NDArray[np.int32]],
        answers: list[NDArray[np.int32]],
        learning_rate: float,
        media: Sequence[Media | None] = (),
    ) -> float:
        self.seconds = {}
        return self._optimize(as_rollouts(prompts, answers, media), TokenLoss(), 1.0, learning_rate)["loss"]

    def offload(self) -> None:
        modules, optimizers = self._held()
        self.host.offload(state_of(modules, optimizers), gradients_of(modules))

    def onload(self) -> None:
        self.host.onload()

    @abstractmethod
    def _held(self) -> tuple[Sequence[Module], Sequence[Optimizer]]:
        """All models that are held, and the optimizers of those that learn."""

    @abstractmethod
    def _refer(self) -> None:
        """Make the current weights the reference, where one is held."""


class CriticUpdating(Updating):
    """The part of relax_hpc.trainers.base.CriticTrainer that makes updates."""

    def values(self, rollouts: Rollouts, progress: Callable[[], None] = lambda: None) -> NDArray[np.float32]:
        self.seconds = {}
        with self._timed("columns_s"):
            return self._column(VALUES, rollouts, 1.0, progress)

    def learn(
        self, rollouts: Rollouts, algorithm: ActorCritic, step: int, progress: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        self.seconds = {}
        return self._teach_critic(rollouts, algorithm, step, progress)


def _nothing(tokens: float, rate: float) -> dict[str, float]:
    """Metrics of an update that is not made."""
    return {"loss": 0.0, "grad_norm": 0.0, "learning_rate": rate, "tokens": tokens, "skipped": 0.0}
