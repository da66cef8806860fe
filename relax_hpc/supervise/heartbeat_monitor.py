"""Measures silence by our own clock alone: the clocks of hosts differ, and may be set while we look."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

BLIND_S = 5.0
"""When two looks are further apart than this, we stood still: the gap counts as nobody's silence."""


class HeartbeatMonitor:
    """Remembers when each watched value (a heartbeat, a lease's time) was last seen to change.

    A key that is left out of a look is forgotten.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[Hashable, float]] = {}
        self._looked_at = time.monotonic()

    def look(self, said: Mapping[K, Hashable], every_s: float = 0.0) -> dict[K, float]:
        """Return for each key the seconds since its value was seen to change, or since it was first looked at.

        said: the current values, None before the first; every_s: the caller's interval between looks.
        """
        now = time.monotonic()
        passed_s = now - self._looked_at
        stood_still_s = (
            passed_s if passed_s > max(BLIND_S, 3 * every_s) else 0.0
        )  # the pause is ours, or the file system's
        self._looked_at = now
        seen = dict[Hashable, tuple[Hashable, float]]()
        for key, word in said.items():
            before, since = self._seen.get(key, (word, now - stood_still_s))
            seen[key] = (word, since + stood_still_s if word == before else now)
        self._seen = seen
        return {key: now - seen[key][1] for key in said}

    def last(self, key: Hashable) -> Hashable:
        """The value at the last look; None before the first."""
        return self._seen.get(key, (None,))[0]
