"""The trainer's side of columns: an order counts as complete when all columns of its shard are there, and what is damaged is removed, so that its role makes it again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relax_hpc.algorithms.base import REFERENCE
from relax_hpc.roles.damage import decided
from relax_hpc.run_dir import RunDir
from relax_hpc.spool.column import Column, DamagedColumn, read_column
from relax_hpc.spool.ledger import Entry
from relax_hpc.spool.reading import Shards
from relax_hpc.spool.shard import Shard
from relax_hpc.spool.watch import FolderWatch
from relax_hpc.weights import frozen

PAUSE_S = 0.05
"""Between two looks for columns of a step that was decided on before."""


def read_columns(run: RunDir, shard: Shard, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """[T] each, of the columns of a shard that a step takes. Raises DamagedColumn where one is not as it was when it was counted."""
    found = {name: read_column(run.column(shard.order, name), name) for name in names}
    for name, column in found.items():
        if column is None or not fits(column, shard):
            raise DamagedColumn(f"'{run.column(shard.order, name)}' is gone, or of another shard")
    return {name: column.values for name, column in found.items() if column is not None}


def fits(column: Column, shard: Shard) -> bool:
    """Whether it is a column of this shard."""
    return column.shard == shard.checksum and len(column.values) == int(shard.offsets[-1])


class Columns:
    """What rank 0 knows of the columns that steps need."""

    def __init__(self, run: RunDir, names: Sequence[str], via: Path, say: Callable[..., None]) -> None:
        """names: of the columns; via: the folder of our incarnation; say: writes an event down."""
        self._run, self.names, self._via, self._say = run, names, via, say
        self._watches: dict[Path, FolderWatch] = {}
        self._versions: dict[str, dict[str, str]] = {}
        """Of orders whose columns are all there."""
        self._reference: str | None = None
        self._bytes: dict[str, int] = {}
        """Of these orders' columns."""

    def ready(self, shards: Mapping[str, Shard]) -> list[str]:
        """The orders whose columns are all there. One that is damaged, or of other weights, is removed to be made again.

        shards: by their orders.
        """
        names: dict[Path, frozenset[str]] = {}  # one stat a folder, whatever waits
        return [order for order, shard in shards.items() if not self.names or self._ready(order, shard, names)]

    def _ready(self, order: str, shard: Shard, names: dict[Path, frozenset[str]]) -> bool:
        paths = {name: self._run.column(order, name) for name in self.names}
        for path in paths.values():
            if path.parent not in names:
                names[path.parent] = self._watches.setdefault(path.parent, FolderWatch(path.parent)).names()
            if path.name not in names[path.parent]:
                return False
        found = [column for name, path in paths.items() if (column := self._read(name, path, order, shard)) is not None]
        if len(found) < len(self.names):
            return False
        self._versions[order] = {column.name: column.version for column in found}
        self._bytes[order] = sum(column.bytes for column in found)
        return True

    def versions(self, order: str) -> dict[str, str]:
        """Of the columns of an order that is ready."""
        return self._versions.get(order, {})

    def bytes(self, order: str) -> int:
        """Of the columns of an order that is ready."""
        return self._bytes.get(order, 0)

    def forget(self, order: str) -> None:
        """The order was taken or given up."""
        self._versions.pop(order, None)
        self._bytes.pop(order, None)

    def _read(self, name: str, path: Path, order: str, shard: Shard) -> Column | None:
        """The column; None where it is not there, or any more."""
        try:
            column = read_column(path, name)
        except DamagedColumn as error:
            self._refuse(name, path, order, str(error))
            return None
        if column is None:
            return None
        if not fits(column, shard):
            self._refuse(name, path, order, "it is of another shard")
        elif name == REFERENCE and column.model != self._checksum():
            self._refuse(name, path, order, f"it is of a reference with checksum {column.model}, not the run's")
        else:
            return column
        return None

    def _checksum(self) -> str:
        self._reference = self._reference or frozen.held_checksum(self._run)
        assert self._reference is not None, "a trainer keeps it before anything is asked for"
        return self._reference

    def _refuse(self, name: str, path: Path, order: str, reason: str) -> None:
        """By way of our own folder: a superseded trainer removes nothing."""
        gone = self._via / path.name
        try:
            path.rename(gone)
        except FileNotFoundError:
            if not self._via.exists():
                raise
            return
        gone.unlink()
        self._say("refused_column", order=order, column=name, reason=reason)


def columns_of(entry: Entry, front: Shards, columns: Columns) -> dict[str, dict[str, str]] | None:
    """Order -> versions of its columns, of a step that was decided on before; None, after a pause, while one is missing."""
    found: dict[str, dict[str, str]] = {taken.order: {} for taken in entry.take}
    for taken in entry.take if columns.names else ():
        ready = lambda shard, order=taken.order: columns.ready({order: shard})
        with decided(entry.step):
            complete = front.read(taken.order, ready)
        if not complete:
            time.sleep(PAUSE_S)
            return None
        found[taken.order] = columns.versions(taken.order)
        columns.forget(taken.order)
        if taken.columns and taken.columns != found[taken.order]:
            logging.getLogger("trainer").warning(
                "step %d: columns of %s are %s, the ledger says %s: made again elsewhere, where sums come out otherwise",
                entry.step, taken.order, found[taken.order], taken.columns,
            )  # fmt: skip
    return found
