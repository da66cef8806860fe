"""Metrics of a training step: its samples (rewards, lengths, ages), and the seconds of its parts. docs/metrics.md lists
all names.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Finish, Rollouts
from relax_hpc.rewards.scores import pass_at, powers_of_two
from relax_hpc.roles.common.load_batch import Batch
from relax_hpc.roles.training.failures import count_failures
from relax_hpc.spool.ledger import SURPLUS, Entry

REPEATED = 4
"""Tokens of an n-gram whose repetition is measured."""
_MIX, _HASH_BITS = np.uint64(0x9E3779B97F4A7C15), np.uint64(40)


class Clock:
    """Measures the seconds of one part after the other."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._at = time.perf_counter()

    def lap(self, name: str) -> float:
        """End the current part, record it as `name`, and return its seconds."""
        before, self._at = self._at, time.perf_counter()
        self.laps[name] = self._at - before
        return self.laps[name]


def describe(entry: Entry, batch: Batch, recipe: Recipe) -> dict[str, Any]:
    """Return metrics of the samples in the loss of `entry.step`; ages in versions, lengths in tokens."""
    rollouts = batch.rollouts
    lengths = np.diff(rollouts.offsets)
    if entry.learned:
        return {
            "samples": len(rollouts), "epoch": max(epoch for _, _, epoch in entry.learned),
            "length_mean": _mean(lengths), "length_max": int(lengths.max(initial=0)),
        }  # fmt: skip
    ages = entry.step - rollouts.versions[rollouts.loss_mask == 1]
    histogram = np.bincount(ages, minlength=recipe.async_.max_staleness + 1)
    failed, surplus = count_failures(entry).total(), sum(r.startswith(SURPLUS) for r in entry.filtered.values())
    groups = len(np.unique(rollouts.group))
    own = groups - len(entry.reused)
    return {
        "samples": len(rollouts),
        "groups": groups,
        "missing_groups": recipe.trainer.prompts_per_step - own,
        "reused_groups": len(entry.reused),
        "reward": _mean(rollouts.rewards),
        "raw_reward": _mean(rollouts.raw_rewards),
        "length_mean": _mean(lengths),
        "length_max": int(lengths.max(initial=0)),
        "truncated": _mean(rollouts.finish == Finish.LENGTH),
        "repetition": repetition(rollouts),
        "age_mean": _mean(ages),
        "age_max": int(ages.max(initial=0)),
        "age_histogram": histogram.tolist(),
        "failed_groups": failed,
        "filtered_groups": len(entry.filtered) - failed - surplus,
        "surplus_groups": surplus,
        "extra_requests": entry.extra_requests,
        "dropped_requests": len(entry.dropped),
        "masked_tokens": batch.masked,
        **({"failures": dict(count_failures(entry))} if failed else {}),
        **of_generated(batch.generated),
    }


def of_generated(groups: Sequence[NDArray[np.float32]]) -> dict[str, float]:
    """Return metrics of all groups that were generated for a step, filtered ones too: those trained on alone would
    mislead."""
    rewards = np.concatenate([np.zeros(0, np.float32), *groups])
    found = {
        "generated_groups": len(groups),
        "generated_reward": _mean(rewards),
        "zero_std_groups": sum(bool(len(group)) and bool((group == group[0]).all()) for group in groups),
    }
    if not len(rewards) or not np.isin(rewards, (0.0, 1.0)).all():
        return found
    most = max(len(group) for group in groups)
    for k in powers_of_two(most):
        chances = [pass_at(len(group), int(group.sum()), k) for group in groups if len(group) >= k]
        found[f"pass_at_{k}"] = _mean(chances)
    return found


def repetition(rollouts: Rollouts) -> float:
    """Return the share of a sample's n-grams (REPEATED tokens in a row, all in the loss) that it had said before; mean
    over the samples that are long enough (seq-rep-4 of arXiv 1908.04319)."""
    chosen = rollouts.loss_mask == 1
    sample = np.repeat(np.arange(len(rollouts), dtype=np.uint64), np.diff(rollouts.offsets))[chosen]
    tokens = rollouts.tokens[chosen].astype(np.uint64)
    count = max(len(tokens) - REPEATED + 1, 0)
    hashes = np.zeros(count, np.uint64)
    for i in range(REPEATED):
        hashes = (hashes ^ tokens[i : i + count]) * _MIX
        hashes ^= hashes >> np.uint64(29)
    whole = sample[:count] == sample[len(sample) - count :]
    # The sample before 40 bits of hash, where two n-grams of a sample are next to never one: all are sorted at once.
    grams = np.sort((sample[:count] << _HASH_BITS | hashes >> np.uint64(64) - _HASH_BITS)[whole])
    of = (grams >> _HASH_BITS).astype(np.int64)
    said = np.bincount(of, minlength=len(rollouts))
    reused = np.bincount(of[1:][grams[1:] == grams[:-1]], minlength=len(rollouts))
    return _mean(reused[said > 0] / said[said > 0])


def _mean(values: Any) -> float:
    return float(np.mean(values)) if len(values) else 0.0
