"""What a trainer backend is: it holds the policy and its optimizer, and makes its updates from a step's rollouts; the same of a critic."""

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
    """A checkpoint on its way to the disk."""

    checksums: Mapping[str, str]
    """Once it is finished: of files that this process knows, by name (see relax_hpc.files.folder_checksums)."""

    def done(self) -> bool:
        """Whether this process has written its part."""
        ...

    def finish(self) -> None:
        """Wait for it; collective. Raises OSError, on every process, where one had no room."""
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
    """Fill this to add a backend; the contract suite in tests/contract/test_trainers.py runs over all of them.

    Every process of the trainer holds one and calls the same methods in the same order; all of them are collective.
    """

    seconds: Mapping[str, float]
    """What the parts of the last step took here: columns_s, forward_backward_s (with the gradients' norm), optimize_s."""

    def step(
        self, rollouts: Rollouts, algorithm: Algorithm, step: int, progress: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """One optimizer step on all of `rollouts` (every process is given all of them and works on its share).

        Or trainer.updates_per_step of them, each on its share of the groups. The loss is the sum over tokens divided by
        one global token count: the same under any number of processes and micro-batches. Returns metrics, equal on every
        process: loss, grad_norm, learning_rate, tokens, skipped (updates, for loss or gradient were not finite), kl
        (behavior to current), entropy, and what the algorithm adds; engine_diff where `step` is the version that made every token. While only a critic learns, neither kl nor entropy.
        """
        ...

    def supervised_step(
        self, prompts: list[NDArray[np.int32]], answers: list[NDArray[np.int32]], learning_rate: float
    ) -> float:
        """One warm-up step: cross-entropy of the answers (their end token included); the mean loss over answer tokens."""
        ...

    def begin_training(self) -> None:
        """After the SFT warm start: a fresh optimizer; the weights of now are the reference, and what a critic's body begins as."""
        ...

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights as (Hugging Face name, tensor on the CPU, in the recipe's dtype); tied weights once.

        Rank 0 is given them; the other processes may be given less, or nothing, and must go through to the end too.
        """
        ...

    def save(self, folder: Path) -> Mapping[str, str]:
        """Write weights, optimizer and random state into `folder`, an empty one, and onto the disk; all call.

        Returns checksums of files that rank 0 knows, by name (see relax_hpc.files.folder_checksums). No pickle but what load() refuses when it is more than data. Raises OSError on rank 0 where the disk is full.
        """
        ...

    def begin_save(self, folder: Path) -> Saving:
        """The same, but training may go on before it is finished: what is written is the state of now."""
        ...

    def offload(self) -> None:
        """Give the device's memory back: all state waits in host memory for `wake`, and nothing else is called before it."""
        ...

    def onload(self) -> None:
        """Go on after `rest`, with the same bits."""
        ...

    def load(self, folder: Path) -> None:
        """Take back what `save` wrote, to the bit. Raises RunError for a checkpoint of another model, DamagedCheckpoint where a file is
        not as it was written: on this process, or on all.

        Where the run that wrote it had no reference or critic, and this one has, they may begin as when training begins.
        """
        ...


class CriticTrainer(Protocol):
    """The same for a critic in processes of its own."""

    def values(self, rollouts: Rollouts, progress: Callable[[], None] = lambda: None) -> NDArray[np.float32]:
        """[T] of what is before each token in the loss, 0 elsewhere; on every process."""
        ...

    def learn(
        self, rollouts: Rollouts, algorithm: ActorCritic, step: int, progress: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """The updates of a step, from rollouts whose columns have the values (and the reference's logprobs, where returns need them).

        Returns metrics, equal on every process: value_loss, critic_grad_norm, critic_learning_rate, explained_variance, tokens,
        skipped, and what the algorithm adds.
        """
        ...

    def save(self, folder: Path) -> Mapping[str, str]:
        """As a Trainer's."""
        ...

    def load(self, folder: Path) -> None:
        """As a Trainer's."""
        ...


class Scoring(Protocol):
    """Models that learn nothing here and say logprobs of tokens: a scorer's. Every process of its group calls the same methods."""

    def hold(self, name: str, folder: Path) -> None:
        """Have a model of its own, that in `folder`."""
        ...

    def take(self, name: str, tensors: Mapping[str, Tensor], where: Path) -> None:
        """Have the policy with these weights, which `where` has; again with those of another version."""
        ...

    def logprobs(
        self, name: str, rollouts: Rollouts, progress: Callable[[], None] = lambda: None
    ) -> NDArray[np.float32]:
        """[T] of the tokens in the loss, 0 elsewhere; on every process."""
        ...
