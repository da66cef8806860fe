"""How a new version of the policy reaches the rollout workers.

trainer: publish(version, export) ──► transport ──► worker: newest(), fetch(version) ──► engine.load()

A version exists when its manifest does (names, shapes, types and a checksum of every tensor; created exclusively, by way of
the incarnation's folder, whatever the transport). How its bytes travel is the transport's own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Version:
    """A version's full name. Two versions with one number but another checksum belong to different lineages."""

    number: int
    lineage: int
    incarnation: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """A version's tensors, verified whole."""

    tensors: Iterable[tuple[str, Tensor]]
    files: Sequence[Path] = ()
    """Safetensors files that hold just these tensors, where there are such."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors)


class WeightsError(Exception):
    """A version that is missing, or was retired: take the newest one."""


class DamagedWeights(WeightsError):
    """A version that is not what its manifest says."""


Export = Callable[[], Iterable[tuple[str, Tensor]]]
"""Gives the policy's tensors, one after the other; may be called more than once, and gives the same bits each time."""
Progress = Callable[[], None]
"""Called now and then in everything that lasts: the heartbeat. What it raises ends the work."""


class Publisher(Protocol):
    """The trainer's side (rank 0)."""

    @property
    def lineage(self) -> int:
        """Of the version published last; until then, the oldest there can be."""
        ...

    def publish(
        self, number: int, export: Export, progress: Progress = lambda: None, pinned: Collection[int] = ()
    ) -> Version:
        """Make version `number` the newest. Publishing the same bits again is no new version.

        pinned: versions that stay on disk, this one too if it is among them, until a publication does not name them.
        """
        ...

    def wanted(self) -> bool:
        """Whether somebody needs the newest version once more, on disk: publish it again. Cheap, to be asked often."""
        ...

    def forget(self, oldest_step: int, pinned: Collection[int] = ()) -> None:
        """Versions before the oldest restorable checkpoint are compared with no more, but for the pinned ones."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """A worker's side."""

    def newest(self) -> Version | None:
        """The newest version there is; None before the first. Cheap: one stat."""
        ...

    def fetch(self, version: Version, progress: Progress = lambda: None) -> AbstractContextManager[Fetched]:
        """The tensors of `version`, verified whole before the first one is given. Their memory is used again when the context ends.

        Raises WeightsError.
        """
        ...

    def close(self) -> None: ...
