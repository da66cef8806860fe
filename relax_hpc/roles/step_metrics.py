"""What a training step's samples were like (rewards, lengths, ages), and what its parts took."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Finish, Rollouts
from relax_hpc.spool.ledger import Entry


class Clock:
    """Seconds of one part after the other."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._at = time.perf_counter()

    def lap(self, name: str) -> float:
        """The part that ends now is called `name`; its seconds."""
        before, self._at = self._at, time.perf_counter()
        self.laps[name] = self._at - before
        return self.laps[name]


def describe(entry: Entry, rollouts: Rollouts, recipe: Recipe) -> dict[str, Any]:
    """Metrics of the samples that entered the loss of `entry.step`; ages in versions, lengths in tokens."""
    lengths = np.diff(rollouts.offsets)
    ages = entry.step - rollouts.versions[rollouts.loss_mask == 1]
    histogram = np.bincount(ages, minlength=recipe.async_.max_staleness + 1)
    failed = sum(reason.startswith("failed: ") for reason in entry.filtered.values())
    return {
        "samples": len(rollouts),
        "groups": len(np.unique(rollouts.group)),
        "reward": _mean(rollouts.rewards),
        "raw_reward": _mean(rollouts.raw_rewards),
        "length_mean": _mean(lengths),
        "length_max": int(lengths.max(initial=0)),
        "truncated": _mean(rollouts.finish == Finish.LENGTH),
        "age_mean": _mean(ages),
        "age_max": int(ages.max(initial=0)),
        "age_histogram": histogram.tolist(),
        "failed_groups": failed,
        "filtered_groups": len(entry.filtered) - failed,
        "dropped_orders": len(entry.dropped),
    }


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else 0.0
