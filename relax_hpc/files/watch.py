"""Learning of new names in folders by one stat a poll, not by listing them.

A folder's modification time changes when a name appears in it; only then is it listed. Two names within one tick of the
clock can leave it unchanged: a folder is listed again until its time has been the same for longer than a tick, which is a second where
times are whole seconds. All of this by our own clock: those of file servers differ. Clients of NFS and its like may show
an old time for a while: every folder is listed once in a while whatever its time says, and once a second where that found something.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

RECENT_S, COARSE_RECENT_S = 0.1, 1.5
"""A folder's time that we have not known for longer may hide a further change; the second one where times are whole seconds."""
COARSE_PAUSE_S = 0.1
"""Between two listings of such a folder while that may be."""
RELIST_S = 2.0
"""Every folder is listed this often even if its time did not change."""
LONGEST_RELIST_S = 30.0
CACHED_RELIST_S = 1.0
"""The same once a folder was seen to have changed without its time: opening it asks the server."""
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
        self._mtime, self._changed_at = -1, float("-inf")
        """The folder's time, and when we saw it first."""
        self._listed_at = float("-inf")

    def names(self) -> frozenset[str]:
        """The names now; a missing folder has none. The same object as long as they are not looked at anew."""
        try:
            mtime = self._time()
        except (FileNotFoundError, NotADirectoryError):
            return frozenset()
        now = time.monotonic()
        if mtime != self._mtime:
            self._mtime, self._changed_at = mtime, now
            self._list(now)
        elif self._may_hide_more(now):
            self._list(now)
        elif now - self._listed_at > self._relist_s:
            before = self._names
            self._list(now)
            if self._names != before and self._time() == mtime:
                self._relist_s = min(self._relist_s, CACHED_RELIST_S)
        return self._names

    def _may_hide_more(self, now: float) -> bool:
        """Whether a name may have come since the last listing without another tick of the clock."""
        coarse = self._mtime % 10**9 == 0
        unsettled = self._listed_at - self._changed_at < (COARSE_RECENT_S if coarse else RECENT_S)
        return unsettled and now - self._listed_at >= (COARSE_PAUSE_S if coarse else 0.0)

    def _list(self, now: float) -> None:
        self._listed_at = now  # when it began: listing may take long
        self._names = frozenset(name for name in os.listdir(self.folder) if not name.startswith("."))

    def _time(self) -> int:
        return os.stat(self.folder).st_mtime_ns


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
