"""Lines of metrics ► alerts for a person: outcomes, restarts, steps that do not come, rewards that collapse.

Each alert has a key that stays the same whenever its line is read again, so that nobody is told twice.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from relax_hpc.recipe.tables.tracking import Notify

WINDOW = 20
"""Steps over which means are taken."""
LEAST_ENTROPY = 0.01
"""Nats a token below which the policy's entropy has collapsed."""
LEAST_SHARE = 0.5
"""Share of its best below which the mean reward of all generated samples has collapsed."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One thing to tell."""

    key: str
    time: float
    text: str


class Alerts:
    """Finds the alerts that [notify] asks for, in the lines of all roles in order of time."""

    def __init__(self, config: Notify, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: our own, in seconds; the lines have the time of day of the machine that wrote them."""
        self._config, self._clock = config, clock
        self._collapse = Collapse()
        self._step, self._said_at, self._heard_at, self._on = -1, 0.0, 0.0, False

    def of(self, role: str, line: Mapping[str, Any]) -> Iterator[Alert]:
        """Yield the alerts that this line gives."""
        kind, at = line.get("kind"), float(line["time"])
        if kind in ("start", "outcome") or role == "trainer-0":
            self._said_at, self._heard_at, self._on = at, self._clock(), kind != "outcome"
        if kind == "outcome" and "outcome" in self._config.events:
            reason = f": {line['reason']}" if line.get("reason") else ""
            yield Alert(f"outcome {at}", at, f"{line['outcome']} at step {line.get('step', 0)}{reason}")
        elif kind == "lost" and "restart" in self._config.events:
            yield Alert(f"lost {line.get('role')} {at}", at, f"{line.get('role')} was lost: {line.get('reason', '')}")
        elif kind == "step" and line["step"] > self._step:
            self._step = line["step"]
            if "collapse" in self._config.events:
                for what, text in self._collapse.of(line):
                    yield Alert(f"collapse {what} {self._step}", at, f"step {self._step}: {text}")

    def stalled(self) -> Iterator[Alert]:
        """Yield an alert when the trainer has not written a line for too long; its key is unchanged until it does."""
        silent_s = self._clock() - self._heard_at
        if "stall" in self._config.events and self._on and silent_s > self._config.stall_s:
            last = f"step {self._step} was the last" if self._step >= 0 else "there was none yet"
            yield Alert(
                f"stall {self._said_at}", self._said_at + silent_s, f"no step for {silent_s / 60:.0f} minutes; {last}"
            )


class Collapse:
    """Signs over the last WINDOW steps that nothing is learned any more; each is reported when it begins."""

    def __init__(self) -> None:
        self._entropy, self._reward, self._empty = (deque[float](maxlen=WINDOW) for _ in range(3))
        self._best = float("-inf")
        self._begun: set[str] = set()

    def of(self, line: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield (sign, description) for each sign that begins with this step."""
        steps = f"over the last {WINDOW} steps"
        entropy, reward = (
            self._mean(self._entropy, line.get("entropy")),
            self._mean(self._reward, line.get("generated_reward")),
        )
        empty = self._mean(self._empty, float(line.get("groups") == 0 and line["filtered_groups"] > 0))
        if self._begins("entropy", entropy is not None and entropy < LEAST_ENTROPY):
            yield (
                "entropy",
                f"the policy's entropy is {entropy:.4f} nats {steps}; below {LEAST_ENTROPY} nothing new is tried",
            )
        if self._begins("filtered", empty == 1.0):
            yield "filtered", f"all groups were filtered {steps}: nothing is trained"
        if reward is None:
            return
        least = LEAST_SHARE * self._best
        if self._begins("reward", self._best > 0 and reward < least):
            yield (
                "reward",
                f"the mean reward is {reward:.4f} {steps}, the best was {self._best:.4f}",
            )
        self._best = max(self._best, reward)

    def _mean(self, values: deque[float], value: float | None) -> float | None:
        """The mean with one more value; None while there are too few."""
        if value is not None:
            values.append(value)
        return sum(values) / len(values) if len(values) == values.maxlen else None

    def _begins(self, what: str, there: bool) -> bool:
        begins = there and what not in self._begun
        (self._begun.add if there else self._begun.discard)(what)
        return begins
