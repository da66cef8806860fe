"""Filters of your own: groups that are generated and kept, but not trained on. filter.toml uses both."""

from __future__ import annotations

from relax_hpc.records import Finish, Group


def mostly_cut(group: Group) -> str | None:
    """Keep out groups of which more than half of the answers were cut off at the length limit."""
    cut = sum(sample.finish == Finish.LENGTH for sample in group.samples)
    if 2 * cut > len(group.samples):
        return f"mostly cut: {cut} of {len(group.samples)} answers"
    return None


def easy(group: Group) -> str | None:
    """Keep out prompts that are solved nearly always; rewards and the row's metadata are there to be looked at."""
    solved = sum(sample.raw_reward >= 1.0 for sample in group.samples) / len(group.samples)
    return f"easy: {solved:.0%} solved" if solved > 0.9 else None
