"""Sample reuse: the groups that a step trains on once more, chosen from ledger and shards alone, so that every
incarnation may choose.

    entries s - max_staleness … s - 1 ──within the bound at s, in the loss then, not again since──► the most varied k ──► entry s
"""

from __future__ import annotations

import numpy as np

from relax_hpc.records import Finish
from relax_hpc.roles.common.quarantine import decided
from relax_hpc.spool.ledger import Ledger
from relax_hpc.spool.reading import Shards
from relax_hpc.spool.shard import Shard


class SampleReuse:
    """Chooses groups of earlier steps whose samples' rewards vary most."""

    def __init__(self, ledger: Ledger, shard_reader: Shards, count: int, max_staleness: int) -> None:
        """count: groups a step."""
        self._ledger, self._shard_reader, self._count, self._bound = ledger, shard_reader, count, max_staleness
        self._variances: dict[str, list[float]] = {}
        """Request -> variances of its groups' rewards, for requests that a step took within the bound."""

    def choose(self, step: int) -> dict[str, int]:
        """Return REQUEST/GROUP -> the step that trained on it first, for the groups that `step` takes again."""
        if not self._count:
            return {}
        before = [e for s in range(max(0, step - self._bound), step) if (e := self._ledger.find(s)) is not None]
        used = {name for entry in before for name in entry.reused}
        fresh = [(e, t.request) for e in before for t in e.take if t.first_version >= step - self._bound]
        with decided(step):
            self._variances = {request: self._of(request) for _, request in fresh}
        names = {
            f"{request}/{group}": (variance, entry.step)
            for entry, request in fresh
            for group, variance in enumerate(self._variances[request])
            if variance > 0 and f"{request}/{group}" not in entry.filtered
        }
        best = sorted(names.keys() - used, key=lambda name: (-names[name][0], name))
        return {name: names[name][1] for name in sorted(best[: self._count])}

    def _of(self, request: str) -> list[float]:
        if request not in self._variances:
            self._variances[request] = self._shard_reader.read(request, _variances)
        return self._variances[request]


def _variances(shard: Shard) -> list[float]:
    """Return the variance of the rewards of each group."""
    of, rewards = shard.samples["group"], shard.samples["reward"]
    generated = shard.samples["finish"] != Finish.FAILED
    groups = [rewards[(of == g) & generated] for g in range(len(shard.groups))]
    return [float(np.var(g)) if len(g) else 0.0 for g in groups]
