"""The interfaces of a trainer backend: of the policy's trainer, of a critic, and of a scorer's models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from relax_hpc.algorithms import ActorCritic, Algorithm
from relax_hpc.records import Media, Progress, Rollouts


class Saving(Protocol):
    """A checkpoint that is being written to the disk."""

    checksums: Mapping[str, str]
    """Checksums of files that this process knows, by name, once it is finished."""

    def done(self) -> bool:
        """Return True if this process has written its part."""
        ...

    def finish(self) -> None:
        """Wait until all is written; collective. Raises OSError, on every process, where one had no room."""
        ...


class Saved:
    """A checkpoint that is written already."""

    def __init__(self, checksums: Mapping[str, str]) -> None:
        self.checksums = checksums

    def done(self) -> bool:
        return True

    def finish(self) -> None:
        pass


class Trainer(Protocol):
    """The interface to fill to add a backend; the suite tests/contract/test_trainers.py runs over all of them.

    Every process of the trainer holds one and calls the same methods in the same order; all of them are collective.
    """

    seconds: Mapping[str, float]
    """Seconds of the last step's parts in this process: columns_s, forward_backward_s (with the norm), optimize_s."""

    def step(
        self, rollouts: Rollouts, algorithm: Algorithm, step: int, progress: Progress = lambda: None
    ) -> dict[str, float]:
        """Make one optimizer step on `rollouts` (every process is given all of them and works on its share), or
        trainer.updates_per_step of them, each on its share of the groups.

        The loss is the sum over tokens divided by one global token count: the same under any number of processes and
        micro-batches. Returns metrics, equal on every process: loss, grad_norm, learning_rate, tokens, skipped (updates
        whose loss or gradient was not finite), kl (behavior to current), entropy, and those that the algorithm adds;
        engine_diff where `step` is the version that made every token. While only a critic learns, kl and entropy lack.
        """
        ...

    def supervised_step(
        self,
        prompts: list[NDArray[np.int32]],
        answers: list[NDArray[np.int32]],
        learning_rate: float,
        media: Sequence[Media | None] = (),
    ) -> float:
        """Make one step of the SFT warm start; returns the mean cross-entropy over the answers' tokens. media: what each
        prompt shows beside its text."""
        ...

    def begin_training(self) -> None:
        """Begin training after the SFT warm start: with a fresh optimizer; reference and critic's body become copies."""
        ...

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights as (Hugging Face name, tensor on the CPU, in the recipe's dtype); tied weights once.

        Rank 0 is given them; the other processes may be given less, or nothing, and must go through to the end too.
        """
        ...

    def export_base(self) -> Iterator[tuple[str, Tensor]]:
        """The frozen base of an adapter ([trainer.lora]), as `export` gives the policy. Without the table it is never
        asked for."""
        ...

    def load_base(self, tensors: Mapping[str, Tensor], where: Path) -> None:
        """Load what `export_base` gave, before `load`: checkpoints hold the adapter alone. where: its place, for
        errors."""
        ...

    def save(self, folder: Path) -> Mapping[str, str]:
        """Write weights, optimizer and random state into `folder`, an empty one, and onto the disk.

        Returns checksums of files that rank 0 knows, by name (see relax_hpc.files.folder_checksums). A pickle is
        written only where load() refuses one that is more than data. Raises OSError on rank 0 where the disk is full.
        """
        ...

    def begin_save(self, folder: Path) -> Saving:
        """Begin to write a checkpoint of the current state as `save` does; training may continue meanwhile."""
        ...

    def offload(self) -> None:
        """Give the device's memory back: all state waits in host memory for `onload`, which is called next."""
        ...

    def onload(self) -> None:
        """Take the device's memory again after `offload`, with the same bits."""
        ...

    def load(self, folder: Path) -> None:
        """Load what `save` wrote, to the bit; a reference or critic that it lacks may begin as when training begins.
        Raises RunError for another model's checkpoint, DamagedCheckpoint for a damaged file: on this process, or on all.
        """
        ...


class CriticTrainer(Protocol):
    """The interface of a critic in processes of its own. All processes call the same methods in the same order."""

    def values(self, rollouts: Rollouts, progress: Progress = lambda: None) -> NDArray[np.float32]:
        """[T] the value of the state before each token in the loss, 0 elsewhere; on every process."""
        ...

    def learn(
        self, rollouts: Rollouts, algorithm: ActorCritic, step: int, progress: Progress = lambda: None
    ) -> dict[str, float]:
        """Make a step's updates from rollouts with the columns that returns need. Returns metrics, equal on every
        process: value_loss, critic_grad_norm, critic_learning_rate, explained_variance, tokens, skipped, and those that
        the algorithm adds."""
        ...

    def save(self, folder: Path) -> Mapping[str, str]:
        """Write a checkpoint, as Trainer.save does."""
        ...

    def load(self, folder: Path) -> None:
        """Load a checkpoint, as Trainer.load does."""
        ...


class Scoring(Protocol):
    """A scorer's models, which compute logprobs and learn nothing. All processes of a group call the same methods."""

    def hold(self, name: str, folder: Path) -> None:
        """Load a model of its own under `name`, from `folder`."""
        ...

    def load(self, name: str, tensors: Mapping[str, Tensor], where: Path) -> None:
        """Load the policy with these weights under `name`, in place of earlier ones. where: their place, for errors."""
        ...

    def logprobs(self, name: str, rollouts: Rollouts, progress: Progress = lambda: None) -> NDArray[np.float32]:
        """[T] logprobs of the tokens in the loss by the model `name`, 0 elsewhere; on every process."""
        ...
