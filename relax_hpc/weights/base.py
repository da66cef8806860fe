"""Interfaces of a weight transport, which brings new versions of the policy to the rollout workers.

trainer: publish(version, export) ──► transport ──► worker: newest(), fetch(version) ──► engine.load()

A version exists when its manifest does (names, shapes, types and a checksum of every tensor; created exclusively, by
way of the incarnation's folder, whatever the transport). How its bytes travel is the transport's own affair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from relax_hpc.records import Progress


@dataclass(frozen=True, slots=True)
class Version:
    """A version's full name. Two versions with one number but different checksums belong to different lineages."""

    number: int
    lineage: int
    incarnation: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Fetched:
    """A version's tensors, verified whole."""

    tensors: Iterable[tuple[str, Tensor]]
    files: Sequence[Path] = ()
    """Safetensors files that hold exactly these tensors, if there are any."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.tensors)


class WeightsError(Exception):
    """A version is missing, or was retired: the newest one is to be used."""


class DamagedWeights(WeightsError):
    """A version's tensors are not what its manifest says."""


Export = Callable[[], Iterable[tuple[str, Tensor]]]
"""Yields the policy's tensors, one after the other; may be called again, and yields the same bits each time."""


class Publisher(Protocol):
    """The trainer's side of a transport (rank 0)."""

    @property
    def lineage(self) -> int:
        """The lineage of the version published last; until then, the oldest one possible."""
        ...

    def publish(
        self, number: int, export: Export, progress: Progress = lambda: None, pinned: Collection[int] = ()
    ) -> Version:
        """Make version `number` the newest. Publishing the same bits again makes no new version. pinned: numbers of
        versions that stay on disk, maybe this one too, until a publication does not name them."""
        ...

    def wanted(self) -> bool:
        """Return True if a worker needs the newest version on disk: publish it again. Cheap, to be asked often."""
        ...

    def forget(self, oldest_step: int, pinned: Collection[int] = ()) -> None:
        """Forget versions that no replay is compared with any more: before `oldest_step`, and not pinned."""
        ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """A worker's side of a transport."""

    def newest(self) -> Version | None:
        """The newest version published; None before the first. Cheap: one stat."""
        ...

    def fetch(self, version: Version, progress: Progress = lambda: None) -> AbstractContextManager[Fetched]:
        """Fetch the tensors of `version`, verified whole; theirs until the context ends. Raises WeightsError."""
        ...

    def close(self) -> None: ...
