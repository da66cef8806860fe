"""Reading the shard of a request: of this run, whole, from the copy in this node's memory or else from where it was published."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from relax_hpc.files.errors import RunError
from relax_hpc.files.node_cache import NodeCache
from relax_hpc.files.run_dir import RunDir
from relax_hpc.spool.shard import Shard

T = TypeVar("T")


class Shards(NodeCache):
    """The published shards of one run, as they are read on this node. A copy that is damaged is removed, and the published file read."""

    def __init__(self, run: RunDir, folder: Path | None) -> None:
        """folder: where the copies are (spool.node_cache)."""
        super().__init__(run, folder)
        self._run_id = run.read_id()

    def read(self, request: str, use: Callable[[Shard], T]) -> T:
        """What `use` makes of a request's shard, which is closed then. Raises DamagedShard; RunError where nothing is published."""

        def used(path: Path) -> T:
            with Shard(path) as shard:
                shard.check_owner(request, self._run_id)
                return use(shard)

        return self._first_good(request, used)

    def opened(self, request: str) -> Shard:
        """A request's shard, compared whole with its checksums; to be closed. Raises like `read`."""

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

    def _first_good(self, request: str, read: Callable[[Path], T]) -> T:
        copy = self.copy(request)
        if copy is not None:
            try:
                return read(copy)
            except RunError as error:
                logging.getLogger("node_cache").warning("the published file is read instead: %s", error)
                copy.unlink(missing_ok=True)
        return read(self.run.shard(request))
