"""How long somebody has been silent, by our own clock alone: clocks of hosts differ, and are set while we look."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

BLIND_S = 5.0
"""When two looks are so far apart, what was not seen in between counts for nothing."""


class HeartbeatMonitor:
    """Since when what others write (heartbeats, a lease's time) has not been seen to change."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[Hashable, float]] = {}
        self._looked_at = time.monotonic()

    def look(self, said: Mapping[K, Hashable], every_s: float = 0.0) -> dict[K, float]:
        """Seconds since each was seen to change, or first looked at.

        said: what they say now, None before the first; every_s: how often it is looked.
        """
        now = time.monotonic()
        passed_s = now - self._looked_at
        stood_still_s = passed_s if passed_s > max(BLIND_S, 3 * every_s) else 0.0  # we, or the file system
        self._looked_at = now
        silent = {}
        for key, word in said.items():
            before, since = self._seen.get(key, (None, now))
            since = now if word != before or key not in self._seen else since + stood_still_s
            self._seen[key] = (word, since)
            silent[key] = now - since
        return silent
