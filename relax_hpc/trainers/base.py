"""The interfaces of a trainer backend: it holds the policy and its optimizer, and makes updates from a step's rollouts.
A critic and a scorer's models have interfaces of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from relax_hpc.algorithms import ActorCritic, Algorithm
from relax_hpc.records import Rollouts


class Saving(Protocol):
    """A checkpoint that is being written to the disk."""

    checksums: Mapping[str, str]
    """Checksums of files that this process knows, by name, once it is finished (see relax_hpc.files.folder_checksums).
    """

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
    """The interface to fill to add a backend; the contract suite in tests/contract/test_trainers.py runs over all of
    them.

    Every process of the trainer holds one and calls the same methods in the same order; all of them are collective.
    """

    seconds: Mapping[str, float]
    """Seconds that the parts of the last step took in this process: columns_s, forward_backward_s (with the gradients'
    norm), optimize_s."""

    def step(
        self, rollouts: Rollouts, algorithm: Algorithm, step: int, progress: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Make one optimizer step on all of `rollouts` (every process is given all of them and works on its share).

        With trainer.updates_per_step > 1 that many steps are made, each on its share of the groups. The loss is the sum
        over tokens divided by one global token count: the same under any number of processes and micro-batches. Returns
        metrics, equal on every process: loss, grad_norm, learning_rate, tokens, skipped (updates whose loss or gradient
        was not finite), kl (behavior to current), entropy, and those that the algorithm adds; engine_diff where `step`
        is the version that made every token. While only a critic learns, neither kl nor entropy is there.
        """
        ...

    def supervised_step(
        self, prompts: list[NDArray[np.int32]], answers: list[NDArray[np.int32]], learning_rate: float
    ) -> float:
        """Make one step of the SFT warm start: cross-entropy of the answers (their end token included). Returns the
        mean loss over answer tokens."""
        ...

    def begin_training(self) -> None:
        """Begin training after the SFT warm start: with a fresh optimizer; the current weights become the reference,
        and a critic's body starts from them."""
        ...

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights as (Hugging Face name, tensor on the CPU, in the recipe's dtype); tied weights once.

        Rank 0 is given them; the other processes may be given less, or nothing, and must go through to the end too.
        """
        ...

    def save(self, folder: Path) -> Mapping[str, str]:
        """Write weights, optimizer and random state into `folder`, an empty one, and onto the disk; all processes call.

        Returns checksums of files that rank 0 knows, by name (see relax_hpc.files.folder_checksums). A pickle is
        written only where load() refuses one that is more than data. Raises OSError on rank 0 where the disk is full.
        """
        ...

    def begin_save(self, folder: Path) -> Saving:
        """Begin to write a checkpoint as `save` does, of the current state; training may continue before it is
        finished."""
        ...

    def offload(self) -> None:
        """Give the device's memory back: all state waits in host memory for `onload`, and nothing else is called before
        it."""
        ...

    def onload(self) -> None:
        """Take the device's memory again after `offload`, with the same bits."""
        ...

    def load(self, folder: Path) -> None:
        """Load what `save` wrote, to the bit. Raises RunError for a checkpoint of another model, DamagedCheckpoint
        where a file is not as it was written: on this process, or on all.

        Where the run that wrote it had no reference or critic, and this one has, they may begin as when training
        begins.
        """
        ...


class CriticTrainer(Protocol):
    """The interface of a critic in processes of its own. All processes call the same methods in the same order."""

    def values(self, rollouts: Rollouts, progress: Callable[[], None] = lambda: None) -> NDArray[np.float32]:
        """[T] the value of the state before each token in the loss, 0 elsewhere; on every process."""
        ...

    def learn(
        self, rollouts: Rollouts, algorithm: ActorCritic, step: int, progress: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Make the updates of a step, from rollouts whose columns have the values (and the reference's logprobs, where
        returns need them).

        Returns metrics, equal on every process: value_loss, critic_grad_norm, critic_learning_rate, explained_variance,
        tokens, skipped, and those that the algorithm adds.
        """
        ...

    def save(self, folder: Path) -> Mapping[str, str]:
        """Write a checkpoint, as Trainer.save does."""
        ...

    def load(self, folder: Path) -> None:
        """Load a checkpoint, as Trainer.load does."""
        ...


class Scoring(Protocol):
    """A scorer's models, which compute logprobs of tokens and learn nothing. Every process of its group calls the same
    methods."""

    def hold(self, name: str, folder: Path) -> None:
        """Load a model of its own under `name`, from `folder`."""
        ...

    def take(self, name: str, tensors: Mapping[str, Tensor], where: Path) -> None:
        """Load the policy with these weights under `name`; called again for another version. where: the place of the
        weights, for errors."""
        ...

    def logprobs(
        self, name: str, rollouts: Rollouts, progress: Callable[[], None] = lambda: None
    ) -> NDArray[np.float32]:
        """[T] logprobs of the tokens in the loss by the model `name`, 0 elsewhere; on every process."""
        ...
