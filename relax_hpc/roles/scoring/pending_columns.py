"""Which requests lack columns: for scorers and the critic, which make them."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import STEPS_PER_SHARD_FOLDER, RunDir
from relax_hpc.files.watch import FolderWatch, FolderWatches
from relax_hpc.spool.reading import Shards
from relax_hpc.spool.shard import DamagedShard, Shard

T = TypeVar("T")
LOOK_AGAIN_S = 1.0
"""Seconds between listings of columns; those that we published ourselves are known."""
LOOK_BACK_S = 10.0
"""Seconds between looks into the folders of earlier batches."""
LOOK_AHEAD = 64
"""Most requests that are opened in search of one that may have its columns; each costs a file."""
SEEN_S = 10.0
"""Seconds after which a column that we published is in the folder's listing, whatever a file system caches."""


class PendingColumns:
    """The published requests of this process's share that lack columns.

    Folders of the newest batches are looked into each time. In earlier ones something is missing where a column was
    removed, or a shard came late: their times say so, for two stats a folder now and then.
    """

    def __init__(
        self,
        run: RunDir,
        shards: RunDir,
        names: tuple[str, ...],
        max_staleness: int,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        """names: names of the columns. max_staleness: the run's, within which shards of several batches appear side by
        side."""
        self._run, self._shards, self._names = run, shards, names
        self._rank, self._processes = rank, processes
        self._recent = 2 + max_staleness // STEPS_PER_SHARD_FOLDER
        self._folders = FolderWatch(shards.shards)
        self._watches = FolderWatches()
        self._columns: dict[str, frozenset[str]] = {}
        self._done: dict[str, float] = {}
        self._behind: dict[str, tuple[int, int]] = {}
        """Earlier folders in which something may be missing, with their times when that was noticed."""
        self._settled: dict[str, tuple[int, int]] = {}
        """Earlier folders in which nothing was missing, with their times then."""
        self._first_versions: dict[str, int] = {}
        self._looked_at = self._looked_back_at = float("-inf")

    def requests(self) -> list[str]:
        """Return the requests that lack columns, those of the earliest batches first."""
        folders, now = sorted(self._folders.names()), time.monotonic()
        if now - self._looked_back_at > LOOK_BACK_S:
            self._looked_back_at = now
            times = {f: self._times(f) for f in folders[: -self._recent]}
            self._behind = {f: at for f, at in times.items() if at != self._settled.get(f)}
        active = [*self._behind, *folders[-self._recent :]]
        again = now - self._looked_at > LOOK_AGAIN_S or any(f not in self._columns for f in active)
        if again:
            self._looked_at = now
            self._columns = {f: self._watches.names(self._run.columns / f) for f in active}
            self._done = {request: at for request, at in self._done.items() if now - at < SEEN_S}
        pending = {f: self._of(f) for f in active}
        if again:
            self._settled |= {f: self._behind.pop(f) for f in [*self._behind] if not pending[f]}
        return [request for requests in pending.values() for request in requests]

    def _of(self, folder: str) -> list[str]:
        there = self._columns[folder]
        shards = sorted(name.removesuffix(".h5") for name in self._watches.names(self._shards.shards / folder))
        return [
            request
            for request in shards
            if request not in self._done
            and self._is_mine(request)
            and any(f"{request}.{n}.h5" not in there for n in self._names)
        ]

    def done(self, request: str) -> None:
        """Note that a request has its columns, or needs none any more."""
        self._done[request] = time.monotonic()
        self._first_versions.pop(request, None)

    def first(self, shard_reader: Shards, version: int | None, alive: Callable[[], None]) -> tuple[str | None, int]:
        """Return the first request that may have its columns now (None if there is none), and how many lack some.

        version: that of the model that makes them; a request begun by a later policy may not have them from it. None:
        any may.
        """
        lacking = self.requests()
        if version is None:
            return (lacking[0] if lacking else None), len(lacking)
        # later batches began with later versions: requests that a step waits for are among the first
        for request in lacking[:LOOK_AHEAD]:
            alive()
            if self._may_be_made(request, shard_reader, version):
                return request, len(lacking)
        return None, len(lacking)

    def _may_be_made(self, request: str, shard_reader: Shards, version: int) -> bool:
        """Return True if this version may make the request's columns; False also if retention has removed the shard."""
        if request not in self._first_versions:
            first = opened(self._shards, shard_reader, request, lambda shard: shard.first_version)
            if first is None:
                self.done(request)
                return False
            self._first_versions[request] = first
        return self._first_versions[request] <= version

    def _is_mine(self, request: str) -> bool:
        batch, _, k = request[1:].partition("x")[0].partition("-")
        return (int(batch) + int(k)) % self._processes == self._rank

    def _times(self, folder: str) -> tuple[int, int]:
        """Return when names of shards, and of columns, last came or went."""
        return _changed(self._shards.shards / folder), _changed(self._run.columns / folder)


def opened(shards: RunDir, shard_reader: Shards, request: str, read: Callable[[Shard], T]) -> T | None:
    """Return `read(shard)` for a request's shard; None if retention removed it, or it is damaged, which the trainer
    mends."""
    try:
        return shard_reader.read(request, read)
    except DamagedShard as damage:
        logging.getLogger("columns").warning("no column is made of it: %s", damage)
        return None
    except RunError:
        if shards.shard(request).exists():
            raise
        return None


def _changed(folder: Path) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except FileNotFoundError:
        return 0
