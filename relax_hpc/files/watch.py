"""Watch folders for new names by one stat a poll, not by listing them.

A folder's modification time changes when a name appears in it; only then is it listed. Two names within one tick of the
file system's clock can leave that time unchanged. So a folder is listed again until its time has been the same for
longer than a tick (a second where times are whole seconds), on our own clock: those of file servers differ. Clients of
NFS may show an old time for a while: every folder is listed once in a while, and once a second where that found more.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

RECENT_S, COARSE_RECENT_S = 0.1, 1.5
"""A folder's time may hide a further change until we have known it for this long; the second: times in whole seconds."""
COARSE_PAUSE_S = 0.1
"""Pause between two listings of a folder with times in whole seconds, while its time may hide a change."""
RELIST_S = 2.0
"""A single watcher lists every folder this often even if its time did not change."""
LONGEST_RELIST_S = 30.0
CACHED_RELIST_S = 1.0
"""How often a folder is listed once its time was seen to miss a change; opening a folder asks the server."""
LOOKS = 12
"""Polls during a wait that takes as long as the one before."""
SHARED_PAUSE_S = 0.05
"""Longest pause between two polls, taken over all processes that wait for the same thing."""
LONGEST_PAUSE_S = 1.0


class FolderWatch:
    """The published names (those without a leading dot) in a folder."""

    def __init__(self, folder: Path, watchers: int = 1) -> None:
        """watchers: how many processes watch the folder: together they list it as often as one would."""
        self.folder = folder
        self._relist_s = min(RELIST_S * watchers, LONGEST_RELIST_S)
        self._names: frozenset[str] = frozenset()
        self._mtime, self._changed_at = -1, float("-inf")
        """`_mtime`: the folder's time; `_changed_at`: when we first saw it."""
        self._listed_at = float("-inf")

    def names(self) -> frozenset[str]:
        """The names now; empty for a missing folder. Returns the identical object until the folder is listed again."""
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
        """Return True if a name may have appeared since the last listing without another tick of the clock."""
        coarse = self._mtime % 10**9 == 0
        unsettled = self._listed_at - self._changed_at < (COARSE_RECENT_S if coarse else RECENT_S)
        return unsettled and now - self._listed_at >= (COARSE_PAUSE_S if coarse else 0.0)

    def _list(self, now: float) -> None:
        self._listed_at = now  # when it began: listing may take long
        self._names = frozenset(name for name in os.listdir(self.folder) if not name.startswith("."))

    def _time(self) -> int:
        return os.stat(self.folder).st_mtime_ns


class FolderWatches:
    """Watches of the folders over which many files are spread."""

    def __init__(self) -> None:
        self._watches: dict[Path, FolderWatch] = {}

    def names(self, folder: Path) -> frozenset[str]:
        """The names in a folder now, as FolderWatch has them."""
        return self._watches.setdefault(folder, FolderWatch(folder)).names()

    def look(self) -> Callable[[Path], bool]:
        """Return a function that tells whether a path is there: one stat a folder, however many paths are asked for."""
        names = functools.cache(self.names)
        return lambda path: path.name in names(path.parent)


def backoff(first_s: float = 0.002, last_s: float = 0.02, watchers: int = 1, usual_s: float = 0.0) -> Iterator[float]:
    """Yield the waits between polls: milliseconds at first, never much more than a tenth of the time waited so far.

    watchers: how many processes wait for the same thing; in the end they poll as often as a few, and one sees it as
    soon. usual_s: how long the wait took last time; until then there are `LOOKS` polls, however long that is.
    """
    longest_s = last_s if watchers == 1 else max(last_s, min(SHARED_PAUSE_S * watchers, LONGEST_PAUSE_S))
    wait_s, waited_s = min(max(first_s, usual_s / LOOKS), longest_s), 0.0
    while True:
        yield wait_s
        waited_s += wait_s
        if waited_s >= usual_s:
            wait_s = min(wait_s * 1.5, last_s) if wait_s < last_s else min(wait_s * 1.1, longest_s)
