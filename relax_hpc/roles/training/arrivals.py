"""Shards that arrive: which outstanding requests are published, and which of them have all their columns.

SHARDS/REQUEST.h5 ──look──► unscored ──all columns──► complete ──a step takes or drops it──► settled
                   └─damaged──► quarantine/, to be generated again
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable

from relax_hpc.files.errors import RunError
from relax_hpc.files.watch import FolderWatches
from relax_hpc.roles.common.columns import Columns
from relax_hpc.roles.common.quarantine import Quarantine
from relax_hpc.roles.training.retention import Retention
from relax_hpc.spool.ledger import Dropped, Entry
from relax_hpc.spool.reading import Shards
from relax_hpc.spool.shard import DamagedShard, Shard


class Arrivals:
    """Rank 0's account of the published shards that no step has settled."""

    def __init__(self, shard_reader: Shards, columns: Columns, quarantine: Quarantine, retention: Retention) -> None:
        self.run, self.shard_reader, self.columns = shard_reader.run, shard_reader, columns
        self._quarantine, self._retention = quarantine, retention
        self._watches = FolderWatches()
        self.unscored: dict[str, Shard] = {}
        """Outstanding requests that are published and lack columns."""
        self.complete: dict[str, Shard] = {}
        """Outstanding requests that are published, with all columns; small shards are in memory already."""
        self.dropped: dict[str, Dropped] = {}
        """Requests given up and not seen since: their lengths are reported when they arrive."""

    def look(self, outstanding: Collection[str]) -> list[str]:
        """Open the shards that appeared: one stat a folder, however many requests are outstanding. Return the requests
        whose shards are damaged, and quarantined now."""
        damaged = []
        for request_id in self._published(i for i in outstanding if i not in self.complete and i not in self.unscored):
            try:
                shard = self.unscored[request_id] = self.shard_reader.opened(request_id)
                self._retention.add(shard.bytes)
                self._retention.reserve_media(shard.media_index.bytes)
            except DamagedShard as damage:
                self._quarantine.put(request_id, damage)
                damaged.append(request_id)
            except RunError:
                if self.is_published(request_id):  # else a listing shows it a while longer
                    raise
        for request_id in self.columns.ready(self.unscored):
            self.complete[request_id] = self.unscored.pop(request_id)
            self._retention.add(self.columns.bytes(request_id))
        return damaged

    def is_published(self, request_id: str) -> bool:
        return self.run.shard(request_id).exists()

    def settle(self, entry: Entry) -> None:
        """Close the shards of requests that a step took or gave up."""
        self.dropped |= {d.request: d for d in entry.dropped}
        for request_id in entry.states:
            shard = self.complete.pop(request_id, None) or self.unscored.pop(request_id, None)
            if shard is not None:
                shard.close()
                if request_id in self.dropped:  # it is counted with the stale arrivals
                    self._retention.add(-shard.bytes - self.columns.bytes(request_id))
            self.columns.forget(request_id)

    def stale(self, count_bytes: bool) -> list[tuple[str, float]]:
        """Return the dropped requests that came, with their columns, since the last call, and their mean length in
        tokens."""
        arrived = []
        for request_id in self._published([*self.dropped]):
            with contextlib.suppress(DamagedShard), Shard(self.run.shard(request_id)) as shard:  # it is not trained on
                if not self.columns.ready({request_id: shard}):
                    continue
                if count_bytes:
                    self._retention.add(shard.bytes + self.columns.bytes(request_id))
                arrived.append((request_id, float(shard.offsets[-1]) / max(len(shard.samples), 1)))
            del self.dropped[request_id]
            self.columns.forget(request_id)
            self.shard_reader.remove(request_id)
        return arrived

    def _published(self, request_ids: Iterable[str]) -> list[str]:
        is_there = self._watches.look()
        return [request_id for request_id in request_ids if is_there(self.run.shard(request_id))]
