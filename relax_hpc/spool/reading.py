"""Reading the shard of an order: of this run, whole, from the copy in this node's memory or else from where it was published."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from relax_hpc.run_dir import RunDir, RunError
from relax_hpc.spool.front import Front
from relax_hpc.spool.shard import Shard

T = TypeVar("T")


class Shards(Front):
    """The published shards of one run, as they are read on this node. A copy that is damaged is removed, and the published file read."""

    def __init__(self, run: RunDir, folder: Path | None) -> None:
        """folder: where the copies are (spool.front)."""
        super().__init__(run, folder)
        self._run_id = run.read_id()

    def read(self, order: str, use: Callable[[Shard], T]) -> T:
        """What `use` makes of an order's shard, which is closed then. Raises DamagedShard; RunError where nothing is published."""

        def used(path: Path) -> T:
            with Shard(path) as shard:
                shard.check_owner(order, self._run_id)
                return use(shard)

        return self._first_good(order, used)

    def opened(self, order: str) -> Shard:
        """An order's shard, compared whole with its checksums; to be closed. Raises like `read`."""

        def opened(path: Path) -> Shard:
            shard = Shard(path)
            try:
                shard.check_owner(order, self._run_id)
                shard.validate()
            except RunError:
                shard.close()
                raise
            return shard

        return self._first_good(order, opened)

    def _first_good(self, order: str, read: Callable[[Path], T]) -> T:
        copy = self.copy(order)
        if copy is not None:
            try:
                return read(copy)
            except RunError as error:
                logging.getLogger("front").warning("the published file is read instead: %s", error)
                copy.unlink(missing_ok=True)
        return read(self.run.shard(order))
