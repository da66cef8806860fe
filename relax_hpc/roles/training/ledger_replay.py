"""Stand-ins for the batch scheduler in runs that request nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.roles.common.columns import Columns, columns_of
from relax_hpc.spool.ledger import Entry, Ledger
from relax_hpc.spool.reading import Shards


class WithoutRequests:
    """Base of stand-ins for the batch scheduler where nothing is requested."""

    depth, unscored, outstanding = 0, 0, 0

    def settle(self, entry: Entry, step: int) -> None: ...

    def release(self, step: int) -> bool:
        return True

    def stale_arrivals(self) -> list[tuple[str, float]]:
        return []


class LedgerReplay(WithoutRequests):
    """Steps of a run that trains on another run's shards: that run's ledger, entry by entry."""

    live = True

    def __init__(self, source: RunDir, ledger: Ledger, shard_reader: Shards, columns: Columns) -> None:
        self._source, self._own, self._shard_reader, self._columns = source, ledger, shard_reader, columns

    def next_entry(self, step: int, version: int, lineage: int) -> Entry | None:
        """Return the other run's entry of `step`; None while columns are missing. Raises RunError at its end."""
        entry = Ledger(self._source).find(step)
        if entry is None:
            raise RunError(f"'{self._source.root}' has {step} steps, this run wants more: --set run.steps={step}")
        found = columns_of(entry, self._shard_reader, self._columns)
        if found is None:
            return None
        return self._own.commit(replace(entry, take=tuple(replace(t, columns=found[t.request]) for t in entry.take)))

    def state_dict(self) -> dict[str, Any]:
        return {}
