"""Source weights that follow how much of each source is solved: a function of what the ledger says of the steps before.

entry s: how many samples of each source were solved ──► pass rates after s ──► the weights of all prompts asked for
step s + 1 + ahead

Weights go by the step that they are for, not by when a request is released: a release may be held back, and a restart
must draw the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LEAST_FACTOR = 0.1
"""Least factor on a source's weight, so that one that is never or always solved still comes up."""
MEMORY_STEPS = 10.0
"""Steps over which a pass rate is averaged (exponentially); it begins at one half."""


@dataclass(slots=True)
class SourceWeights:
    """The sources' weights after each step, kept as long as a batch may still be drawn with them."""

    own: Sequence[float]
    """The sources' weights in the recipe."""
    rates: list[float] = field(init=False)
    after: dict[int, list[float]] = field(init=False)
    """Step -> the weights once all steps before it were trained."""

    def __post_init__(self) -> None:
        self.rates = [0.5] * len(self.own)
        self.after = {0: self._weights()}

    def at(self, step: int) -> list[float]:
        """The weights once all steps before `step` were trained."""
        return self.after[max(step, 0)]

    def note(self, step: int, solved: Mapping[str, tuple[int, int]], forget_before: int) -> None:
        """Account for `step`, and forget the weights before step `forget_before`. solved: source -> (samples solved,
        samples)."""
        share = 1 - math.exp(-1 / MEMORY_STEPS)
        for source, (right, of) in solved.items():
            self.rates[int(source)] += share * (right / of - self.rates[int(source)])
        self.after[step + 1] = self._weights()
        self.after = {s: w for s, w in self.after.items() if s >= forget_before}

    def _weights(self) -> list[float]:
        factors = [max(4 * p * (1 - p), LEAST_FACTOR) for p in self.rates]
        return [weight * factor for weight, factor in zip(self.own, factors, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates, "after": {str(step): weights for step, weights in self.after.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rates = [*state["rates"]]
        self.after = {int(step): weights for step, weights in state["after"].items()}
