"""Failed groups, which could not be generated or scored, as rank 0 of the trainer reports them: once in the log,
counted in metrics.

    shards ──reason of a group──► ledger entry ("failed: …") ──► count: metrics of the step, status ──► the log, once a reason
"""

from __future__ import annotations

import logging
import math
from collections import Counter

from relax_hpc.files.errors import RunError
from relax_hpc.spool.ledger import FAILED, Entry
from relax_hpc.spool.reading import Shards


def count_failures(entry: Entry) -> Counter[str]:
    """Count the groups of a step that failed, by reason."""
    return Counter(text.removeprefix(FAILED) for text in entry.filtered.values() if text.startswith(FAILED))


class Failures:
    """The failures seen since this process began."""

    def __init__(self, shards: Shards, log: logging.Logger) -> None:
        self._shards, self._log = shards, log
        self._until_now = Counter[str]()

    def note(self, entry: Entry) -> None:
        """Log an entry's failures, before its step. A reason is logged when it is new, and each time that ten times as
        many groups failed for it."""
        for reason, count in count_failures(entry).items():
            before, now = self._until_now[reason], self._until_now[reason] + count
            self._until_now[reason] = now
            if not before:
                self._log.warning("step %d: %d groups failed: %s", entry.step, count, self._first(entry, reason))
            elif math.floor(math.log10(now)) > math.floor(math.log10(before)):
                self._log.warning("step %d: %d groups failed until now: %s", entry.step, now, reason)

    def _first(self, entry: Entry, reason: str) -> str:
        """Return the reason, with the first group that failed for it."""
        name = next(name for name, text in entry.filtered.items() if text == FAILED + reason)
        request, _, group = name.rpartition("/")
        try:
            _, detail = self._shards.read(request, lambda shard: shard.failure(int(group)))
        except RunError:  # damaged, or gone: its reader in the trainer reports it
            detail = ""
        return f"{reason}; the first is {name}{f' ({detail})' if detail else ''}"
