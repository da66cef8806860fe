"""Common part of Megatron-core trainers of the policy and of a critic: gradients, updates, checkpoints.

    rollouts ──split.py: forward, the model's output at its targets, loss, backward──► gradients ──► norm ──finite?──► AdamW

Each loss is divided by one global token count before its backward, and gradients are summed over all processes that
hold other tokens: the sums are the same under every plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import relax_hpc.trainers.megatron.checkpoint.moments as moments
import relax_hpc.trainers.megatron.checkpoint.state as state
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Progress, Rollouts
from relax_hpc.trainers import state_files
from relax_hpc.trainers.megatron.cpu import supported
from relax_hpc.trainers.megatron.learning import Learning
from relax_hpc.trainers.megatron.split import Split
from relax_hpc.trainers.token_loss import Learner, TokenLoss, add
from relax_hpc.trainers.update import Updating

LOADED_BYTES = 2**30
"""Bytes of the optimizer's state that are read at once."""


class Kept(NamedTuple):
    """Names in a checkpoint for the parts of a model that learns."""

    model: str
    optimizer: str
    steps: str


KEPT: dict[Learner, Kept] = {
    "policy": Kept("model", "optimizer", "steps"),
    "critic": Kept("critic", "critic_optimizer", "critic_steps"),
}


class Learners(Split, Updating):
    """One process of models that learn, split by the recipe's plan."""

    def __init__(self, recipe: Recipe, rank: int, world: int, device: torch.device) -> None:
        """The default process group must exist already, and Megatron's support for this machine."""
        super().__init__(recipe, rank, world, device)
        self.learning: dict[Learner, Learning] = {}

    @supported
    def save(self, folder: Path) -> Mapping[str, str]:
        saving = self.begin_save(folder)
        saving.finish()
        return saving.checksums

    @supported
    def begin_save(self, folder: Path) -> state.Saving:
        states = state_files.rng_tensors(self.rank, self.device)
        for other in self._gather(states):
            states |= other
        model = self._sharded()
        everything: dict[str, Any] = dict(model)
        for learner, learning in self.learning.items():
            kept = KEPT[learner]
            everything[kept.optimizer] = moments.gathered(learning.optimizers(), model[kept.model])
            everything[kept.steps] = learning.steps
        saving = state.Saving(folder, everything)
        if self.rank == 0:
            state_files.write(folder, {state_files.RNG: states})
        return saving

    @supported
    def load(self, folder: Path) -> None:
        state.verify(folder)
        places, everything = self._sharded(), self._sharded()
        states = {
            KEPT[learner].optimizer: moments.expected(learning.optimizers(), places[KEPT[learner].model])
            for learner, learning in self.learning.items()
        }
        state.compare(folder, {**everything, **states})
        loaded = state.load(folder, everything)
        for what, chunks in self._changing().items():
            for number, chunk in enumerate(chunks):
                chunk.load_state_dict(loaded[what][f"chunk{number}"], strict=False)  # names were compared before
        for learner, learning in self.learning.items():
            kept, optimizers = KEPT[learner], learning.optimizers()
            learning.begin(loaded[kept.steps])
            for part in moments.to_fill(optimizers, places[kept.model], LOADED_BYTES):
                # no key where nothing was asked for
                read = state.load(folder, {kept.optimizer: part}).get(kept.optimizer, {})
                moments.put(optimizers, places[kept.model], read)
        state_files.fill_rng(self.rank, self.device, state_files.read(folder / state_files.RNG))

    def _changing(self) -> dict[str, list[Any]]:
        """The models whose weights change, by their names in a checkpoint."""
        return {KEPT[learner].model: learning.chunks for learner, learning in self.learning.items()}

    def _sharded(self) -> dict[str, Any]:
        """Sharded tensors of everything that changes, except the optimizers' state."""
        return {
            what: state.sharded(chunks, self.groups, "" if what == "model" else f"{what}.")
            for what, chunks in self._changing().items()
        }

    def _gradients(
        self, rollouts: Rollouts, token_loss: TokenLoss, temperature: float, tokens: int, progress: Progress
    ) -> dict[str, float]:
        learning = self.learning[token_loss.learner]
        learning.zero()
        if token_loss.learner == "critic":
            rollouts = replace(rollouts, routed_experts=None)  # its experts are its own
        batches = self._batches(rollouts, learning.chunks, token_loss.whole_groups)
        sums: dict[str, float] = {}

        def loss_of(number: int, *found: Tensor) -> Tensor:
            nonlocal sums
            progress()
            loss, said = token_loss(batches[number].targets, *found)
            sums = add([sums, said])
            return loss / tokens

        self._run(learning.reduced, rollouts, batches, temperature, loss_of)
        return sums if self._speaks() else {}

    def _gradient_norm(self, learner: Learner) -> float:
        return self.learning[learner].norm()

    def _update(self, learner: Learner, norm: float, rate: float) -> None:
        self.learning[learner].update(norm, rate)
