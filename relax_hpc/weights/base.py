"""How a new version of the policy reaches the rollout workers.

trainer: publish(version, tensors) ──► transport ──► worker: newest(), fetch(version) ──► engine.load()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Version:
    """A version's full name. Two versions with one number but another checksum belong to different lineages."""

    number: int
    lineage: int
    incarnation: int
    checksum: str


class WeightsError(Exception):
    """A version that is missing, or was retired: take the newest one."""


class DamagedWeights(WeightsError):
    """A version that is not what its manifest says."""


class Publisher(Protocol):
    """The trainer's side (rank 0)."""

    def publish(self, number: int, tensors: Iterable[tuple[str, Tensor]]) -> Version:
        """Make version `number` the newest. Publishing the same bits again is no new version."""
        ...


class Receiver(Protocol):
    """A worker's side."""

    def newest(self) -> Version | None:
        """The newest version there is; None before the first. Cheap: one small read."""
        ...

    def fetch(self, version: Version) -> AbstractContextManager[Iterator[tuple[str, Tensor]]]:
        """The tensors of `version`, verified whole before the first one is given. Raises WeightsError."""
        ...
