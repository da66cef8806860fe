"""Skipped steps, which changed nothing: counted while they come in a row, with the cause, until a step trains again."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import numpy as np

from relax_hpc.files.errors import RunError
from relax_hpc.records import Rollouts
from relax_hpc.spool.ledger import Entry


class SkippedSteps:
    """Rank 0's memory of the steps skipped in a row."""

    def __init__(self, limit: int, log: logging.Logger) -> None:
        """limit: trainer.max_skipped_steps."""
        self.limit, self.log = limit, log
        self.skipped = self.empty = 0
        self.why = ""

    def note(self, entry: Entry, rollouts: Rollouts, metrics: Mapping[str, float]) -> None:
        """Count a step if it was skipped, or had nothing to train on. The latter is logged each `limit` steps in a row:
        only the prompts can change that."""
        self.skipped = self.skipped + 1 if metrics.get("skipped") else 0
        self.empty = self.empty + 1 if metrics.get("tokens") == 0 else 0
        if self.skipped:
            self.why = f"step {entry.step}: {cause(rollouts, metrics)}"
            self.log.warning("an update was skipped, %d in a row: %s", self.skipped, self.why)
        if self.empty and self.empty % self.limit == 0:
            reason = next(iter(entry.filtered.values()), "no token is in the loss")
            self.log.warning(
                "%d steps in a row had nothing to train on, all groups failed or were filtered; the first of step %d: %s. Where they were "
                "filtered, the policy gives the same answer to every prompt, or the prompts are all too hard or too easy for it",
                self.empty, entry.step, reason,
            )  # fmt: skip

    def check(self) -> None:
        """Raise RunError when too many steps in a row were skipped."""
        if self.skipped >= self.limit:
            raise RunError(
                f"{self.skipped} steps in a row were skipped (trainer.max_skipped_steps = {self.limit}), since loss or gradient were "
                f"not finite; {self.why}; mend the cause (a reward, a lower trainer.learning_rate, an own algorithm) and resume, or "
                "raise the limit with `relax-hpc run RUN_DIR --set trainer.max_skipped_steps=…`"
            )


def cause(rollouts: Rollouts, metrics: Mapping[str, float]) -> str:
    """Name what was not finite: rewards, with their samples, else what was computed from them."""
    bad = np.flatnonzero(~np.isfinite(rollouts.rewards))
    if len(bad):
        return f"the reward of sample {rollouts.ids[bad[0]]} is {rollouts.rewards[bad[0]]} ({len(bad)} of {len(rollouts)} are not finite)"
    found = ", ".join(f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value))
    return found or f"loss or gradient of {metrics['skipped']:.0f} of its updates were not finite, the others were made"
