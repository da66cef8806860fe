"""Counts all that was generated, by status; only the shards' small columns are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relax_hpc.files.errors import RunError
from relax_hpc.monitor.analysis.statuses import STATUSES, GroupStatus, RequestStatus
from relax_hpc.monitor.analysis.tables import sample_columns, verdicts
from relax_hpc.records import Finish

if TYPE_CHECKING:
    from relax_hpc.monitor.analysis import RunView
    from relax_hpc.spool.shard import Shard

FIELDS = ("reward", "raw_reward", "length", "prompt_length", "age", "finish")


@dataclass(slots=True)
class Tally:
    """The groups and samples of one status."""

    groups: int = 0
    samples: int = 0
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    """[samples] each of FIELDS; `age` is shorter, without samples that have none."""

    @property
    def tokens(self) -> int:
        return int(self.columns["length"].sum())

    @property
    def truncated(self) -> float:
        """Share of samples that were cut at the length limit."""
        return float(np.mean(self.columns["finish"] == Finish.LENGTH.name.lower())) if self.samples else 0.0


@dataclass(slots=True)
class Counts:
    """A run, counted."""

    statuses: dict[GroupStatus, Tally]
    reasons: Counter[tuple[GroupStatus, str]]
    """Groups by status and reason."""
    shards: Counter[str]
    """Shards by the folder they lie in: shards, evals, quarantine."""
    bytes: Counter[str]
    broken: list[RunError]

    def all(self, column: str) -> NDArray[Any]:
        return np.concatenate([t.columns[column] for t in self.statuses.values()] or [np.empty(0)])


def count(view: RunView, paths: Sequence[Path] | None = None) -> Counts:
    """Count all shards, or those at `paths`. Damaged ones are collected, not raised, and so are entries of the ledger."""
    counts = Counts({}, Counter(), Counter(), Counter(), [])
    parts: dict[tuple[GroupStatus, str], list[NDArray[Any]]] = {}
    statuses = view.statuses(counts.broken)
    for shard in view.iter_shards(paths, counts.broken):
        folder = shard.path.relative_to(view.run.root).parts[0]
        counts.shards[folder] += 1
        counts.bytes[folder] += shard.bytes
        _add(shard, statuses.of(shard.path), counts, parts)
    counts.statuses = {f: counts.statuses[f] for f in STATUSES if f in counts.statuses}
    for status, tally in counts.statuses.items():
        tally.columns = {c: np.concatenate(parts[status, c]) for c in FIELDS}
    return counts


def _add(
    shard: Shard, status: RequestStatus, counts: Counts, parts: dict[tuple[GroupStatus, str], list[NDArray[Any]]]
) -> None:
    of_group, values = verdicts(shard, status), sample_columns(shard, status, FIELDS)
    of_sample = np.array([v.status for v in of_group], "U16")[shard.samples["group"]]
    for verdict in of_group:
        counts.statuses.setdefault(verdict.status, Tally()).groups += 1
        if verdict.reason:
            counts.reasons[verdict.status, verdict.reason] += 1
    for name in {v.status for v in of_group}:
        mine = of_sample == name
        counts.statuses[name].samples += int(mine.sum())
        for column in FIELDS:
            picked = values[column][mine]
            parts.setdefault((name, column), []).append(np.ma.compressed(picked) if column == "age" else picked)
