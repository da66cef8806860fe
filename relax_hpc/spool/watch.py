"""Learning of new names in folders by one stat a poll, not by listing them.

A folder's modification time changes when a name appears in it; only then is it listed. Two names within one tick of the
clock can leave it unchanged, and clocks of file servers differ from ours: a folder whose last change is recent is listed
again, and every folder is listed once in a while whatever its time says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

RECENT_NS = 100_000_000
"""A folder listed within this time of its last change is listed again at the next poll."""
RELIST_S = 2.0
"""Every folder is listed this often even if its time did not change (attribute caches of NFS)."""
LONGEST_RELIST_S = 30.0
LOOKS = 12
"""Polls in a wait that takes as long as the one before."""
SHARED_PAUSE_S = 0.05
"""Longest pause between two polls of all who wait for the same."""
LONGEST_PAUSE_S = 1.0


class FolderWatch:
    """The published names (those without a leading dot) in a folder."""

    def __init__(self, folder: Path, watchers: int = 1) -> None:
        """watchers: how many look at it; each lists it again the more rarely, so that all together do it as often as one."""
        self.folder = folder
        self._relist_s = min(RELIST_S * watchers, LONGEST_RELIST_S)
        self._names: frozenset[str] = frozenset()
        self._listed_mtime = -1
        self._listed_at = float("-inf")

    def names(self) -> frozenset[str]:
        """The names now; a missing folder has none."""
        try:
            mtime = os.stat(self.folder).st_mtime_ns
        except FileNotFoundError:
            return frozenset()
        now = time.monotonic()
        if mtime != self._listed_mtime or now - self._listed_at > self._relist_s:
            settled = time.time_ns() - mtime > RECENT_NS  # before listing, which may take long
            self._names = frozenset(n for n in os.listdir(self.folder) if not n.startswith("."))
            self._listed_mtime, self._listed_at = (mtime if settled else -1), now
        return self._names


def backoff(first_s: float = 0.002, last_s: float = 0.02, watchers: int = 1, usual_s: float = 0.0) -> Iterator[float]:
    """Waits between polls: short at first, so that publish to read takes milliseconds; longer when nothing comes.

    watchers: how many wait for the same; each polls the more rarely in the end, so that all together do it as often as few,
    and one of them sees what comes as soon. usual_s: how long it took the last time; until then it is looked for `LOOKS`
    times, however long that is. Nobody sleeps for much more than a tenth of the time that it waits.
    """
    longest_s = last_s if watchers == 1 else max(last_s, min(SHARED_PAUSE_S * watchers, LONGEST_PAUSE_S))
    wait_s, waited_s = min(max(first_s, usual_s / LOOKS), longest_s), 0.0
    while True:
        yield wait_s
        waited_s += wait_s
        if waited_s >= usual_s:
            wait_s = min(wait_s * 1.5, last_s) if wait_s < last_s else min(wait_s * 1.1, longest_s)
