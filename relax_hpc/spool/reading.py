"""Read a request's shard, checked to be of this run and whole: from the copy in this node's memory, or else the
published file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import tenacity

from relax_hpc.files.errors import RunError
from relax_hpc.files.node_cache import NodeCache
from relax_hpc.files.run_dir import RunDir
from relax_hpc.spool.media import Remake
from relax_hpc.spool.shard import DamagedShard, Shard

T = TypeVar("T")
TRIES, PAUSE_S = 4, 0.25
"""Readings of a file that the file system fails to give, and seconds before the second one; then it counts as damaged."""


class Shards(NodeCache):
    """The published shards of one run, read through this node's cache. A damaged copy is removed, and the published
    file read instead."""

    def __init__(self, run: RunDir, folder: Path | None, remake: Remake | None = None) -> None:
        """folder: where this node's copies are (spool.node_cache); remake: makes media again from their files."""
        super().__init__(run, folder)
        self._remake = remake
        self._run_id = run.read_id()

    def read(self, request: str, use: Callable[[Shard], T]) -> T:
        """Open a request's shard, return `use(shard)` and close it. Raises DamagedShard; RunError if nothing is
        published."""

        def used(path: Path) -> T:
            with Shard(path, self._remake) as shard:
                shard.check_owner(request, self._run_id)
                return use(shard)

        return self._first_good(request, used)

    def opened(self, request: str) -> Shard:
        """Open a request's shard and compare all of it with its checksums; the caller closes it. Raises like `read`."""

        def opened(path: Path) -> Shard:
            shard = Shard(path)
            try:
                shard.check_owner(request, self._run_id)
                shard.validate()
            except RunError:
                shard.close()
                raise
            return shard

        return self._first_good(request, opened)

    def damage(self, request: str) -> str:
        """Say why a request's shard cannot be read whole here; empty if it can."""
        try:
            self.opened(request).close()
        except RunError as error:
            return str(error)
        return ""

    def _first_good(self, request: str, read: Callable[[Path], T]) -> T:
        copy = self.copy(request)
        if copy is not None:
            try:
                return read(copy)
            except RunError as error:
                logging.getLogger("node_cache").warning("the published file is read instead: %s", error)
                copy.unlink(missing_ok=True)
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_trouble),
            wait=tenacity.wait_exponential(PAUSE_S),
            stop=tenacity.stop_after_attempt(TRIES),
            reraise=True,
        )
        return attempts(read, self.run.shard(request))


def _is_trouble(error: BaseException) -> bool:
    """Return True for damage that is an error of the file system, such as a stale handle: it may pass."""
    cause = error.__cause__
    return isinstance(error, DamagedShard) and isinstance(cause, OSError) and cause.errno is not None
