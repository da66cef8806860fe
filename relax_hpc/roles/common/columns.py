"""The trainer's side of columns: a request counts as complete when its shard has all columns. Damaged columns are
removed, so that their roles make them again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relax_hpc.algorithms.base import REFERENCE
from relax_hpc.files.run_dir import RunDir
from relax_hpc.files.watch import FolderWatches
from relax_hpc.roles.common.quarantine import decided
from relax_hpc.spool.column import Column, DamagedColumn, read_column
from relax_hpc.spool.ledger import Entry
from relax_hpc.spool.reading import Shards
from relax_hpc.spool.shard import Shard
from relax_hpc.weights import reference

PAUSE_S = 0.05
"""Seconds between two looks for columns of a step that was decided on before."""


def read_columns(run: RunDir, shard: Shard, names: Sequence[str]) -> dict[str, NDArray[np.float32]]:
    """Read the columns of a shard that a step takes, [T] each. Raises DamagedColumn if one is not as it was when it was
    counted."""
    found = {name: read_column(run.column(shard.request, name), name) for name in names}
    for name, column in found.items():
        if column is None or not fits(column, shard):
            raise DamagedColumn(f"'{run.column(shard.request, name)}' is gone, or of another shard")
    return {name: column.values for name, column in found.items() if column is not None}


def fits(column: Column, shard: Shard) -> bool:
    """Return True if a column was made for this shard."""
    return column.shard == shard.checksum and len(column.values) == int(shard.offsets[-1])


class Columns:
    """Rank 0's account of the columns that steps need."""

    def __init__(self, run: RunDir, names: Sequence[str], commit_dir: Path, say: Callable[..., None]) -> None:
        """names: names of the columns; commit_dir: the folder of our incarnation; say: writes an event down."""
        self._run, self.names, self._commit_dir, self._say = run, names, commit_dir, say
        self._watches = FolderWatches()
        self._versions: dict[str, dict[str, str]] = {}
        """Request -> versions of its columns, for requests that have all of them."""
        self._reference: str | None = None
        self._bytes: dict[str, int] = {}
        """Request -> size of its columns, for the same requests."""

    def ready(self, shards: Mapping[str, Shard]) -> list[str]:
        """Return the requests that have all their columns. A column that is damaged, or of other weights, is removed to
        be made again.

        shards: request -> its shard.
        """
        is_there = self._watches.look()
        return [request for request, shard in shards.items() if not self.names or self._ready(request, shard, is_there)]

    def _ready(self, request: str, shard: Shard, is_there: Callable[[Path], bool]) -> bool:
        paths = {name: self._run.column(request, name) for name in self.names}
        if not all(map(is_there, paths.values())):
            return False
        found = [
            column for name, path in paths.items() if (column := self._read(name, path, request, shard)) is not None
        ]
        if len(found) < len(self.names):
            return False
        self._versions[request] = {column.name: column.version for column in found}
        self._bytes[request] = sum(column.bytes for column in found)
        return True

    def versions(self, request: str) -> dict[str, str]:
        """Return column -> version, for a request that is ready."""
        return self._versions.get(request, {})

    def bytes(self, request: str) -> int:
        """Return the size of the columns of a request that is ready."""
        return self._bytes.get(request, 0)

    def forget(self, request: str) -> None:
        """Forget a request that was taken or given up."""
        self._versions.pop(request, None)
        self._bytes.pop(request, None)

    def _read(self, name: str, path: Path, request: str, shard: Shard) -> Column | None:
        """Read a column; None if it is not there, or not any more."""
        try:
            column = read_column(path, name)
        except DamagedColumn as error:
            self._refuse(name, path, request, str(error))
            return None
        if column is None:
            return None
        if not fits(column, shard):
            self._refuse(name, path, request, "it is of another shard")
        elif name == REFERENCE and column.model != self._checksum():
            self._refuse(name, path, request, f"it is of a reference with checksum {column.model}, not the run's")
        else:
            return column
        return None

    def _checksum(self) -> str:
        self._reference = self._reference or reference.held_checksum(self._run)
        assert self._reference is not None, "a trainer keeps it before anything is asked for"
        return self._reference

    def _refuse(self, name: str, path: Path, request: str, reason: str) -> None:
        """Remove a column, by way of our own folder: a superseded trainer removes nothing."""
        gone = self._commit_dir / path.name
        try:
            path.rename(gone)
        except FileNotFoundError:
            if not self._commit_dir.exists():
                raise
            return
        gone.unlink()
        self._say("refused_column", request=request, column=name, reason=reason)


def columns_of(entry: Entry, shard_reader: Shards, columns: Columns) -> dict[str, dict[str, str]] | None:
    """Return request -> versions of its columns, for a step that was decided on before; None, after a pause, while one
    is missing."""
    found: dict[str, dict[str, str]] = {taken.request: {} for taken in entry.take}
    for taken in entry.take if columns.names else ():
        ready = lambda shard, request=taken.request: columns.ready({request: shard})
        with decided(entry.step):
            complete = shard_reader.read(taken.request, ready)
        if not complete:
            time.sleep(PAUSE_S)
            return None
        found[taken.request] = columns.versions(taken.request)
        columns.forget(taken.request)
        if taken.columns and taken.columns != found[taken.request]:
            logging.getLogger("trainer").warning(
                "step %d: columns of %s are %s, the ledger says %s: made again elsewhere, where sums come out otherwise",
                entry.step, taken.request, found[taken.request], taken.columns,
            )  # fmt: skip
    return found
