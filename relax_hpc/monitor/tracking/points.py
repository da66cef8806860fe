"""Lines of metrics ► points of curves: numbers by name, at a step.

step lines ──► train/NAME at the step         eval lines ──► eval/NAME at the version
request lines ──► rollout/NAME: means over the requests since the step before      events ──► run/lost: how many so far
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

COMMON = ("time", "attempt", "kind")
REQUEST_MEANS = ("reward", "length_max", "truncated", "wait_s", "sync_s", "blocked_s", "generate_s", "score_s", "publish_s",
               "longest_s", "tokens_per_s", "tokens_per_device_s")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """Numbers of a step, or of a version."""

    time: float
    step: int
    values: dict[str, float]


class Points:
    """Turns lines into points, with what a single line does not say. A step repeated after a restart gives no point."""

    def __init__(self) -> None:
        self._step = self._version = -1
        self._requests = 0
        self._sums = dict.fromkeys(REQUEST_MEANS, 0.0)
        self._lost = 0

    def of(self, line: Mapping[str, Any]) -> Iterator[Point]:
        """Yield the points that this line makes."""
        kind, time = line.get("kind"), float(line["time"])
        if kind == "step" and line["step"] > self._step:
            self._step = line["step"]
            yield Point(time, self._step, {**numbers("train", line), **self._since(), "run/lost": self._lost})
        elif kind == "eval" and line["version"] > self._version:
            self._version = line["version"]
            yield Point(time, self._version, numbers("eval", line))
        elif kind == "request" and not line["request"].startswith("e"):
            self._requests += 1
            for name in REQUEST_MEANS:
                self._sums[name] += line.get(name) or 0.0  # null where it was not finite
        elif kind == "lost":
            self._lost += 1

    def _since(self) -> dict[str, float]:
        """Means over the requests since the last call."""
        if not self._requests:
            return {}
        means = {f"rollout/{name}": total / self._requests for name, total in self._sums.items()}
        requests, self._requests, self._sums = self._requests, 0, dict.fromkeys(REQUEST_MEANS, 0.0)
        return {**means, "rollout/requests": requests}


def numbers(group: str, line: Mapping[str, Any]) -> dict[str, float]:
    """The line's numbers by their names in `group`; those that no curve has are left out."""
    return {
        f"{group}/{name}": float(value)
        for name, value in line.items()
        if isinstance(value, (int, float)) and name not in COMMON
    }
