"""A reward made of others: parts with weights, each a column of its own, for all rows or those of one kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relax_hpc.records import Prompt

Loaded = Callable[[Prompt, Sequence[str]], list[tuple[float, dict[str, float]]]]
"""A reward that is loaded: a prompt and its answers to (reward, extras) of each."""


@dataclass(frozen=True, slots=True)
class Part:
    """One reward of a sum."""

    name: str
    weight: float
    reward: Loaded
    kind: str | None
    """The value of `reward_column` in the rows that it is for; None: all rows."""


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """Adds the parts' rewards, each times its weight. A part is the extra NAME, its own extras are NAME.EXTRA."""

    parts: Sequence[Part]
    column: str
    """The column that names a row's kind; empty where all parts are for all rows."""
    batch = True  # relax_hpc.rewards.base.BATCH

    def __call__(self, prompt: Prompt, answer: Sequence[str]) -> list[dict[str, float]]:
        """Score the answers of one prompt. Raises ValueError for a row that no part is for."""
        kind = str(prompt.metadata.get(self.column)) if self.column else None
        mine = [part for part in self.parts if part.kind in (None, kind)]
        if not mine:
            kinds = sorted({part.kind for part in self.parts if part.kind is not None})
            raise ValueError(
                f"column '{self.column}' (reward_column) is {kind!r}, expected one of {kinds}: no reward is for this row"
            )
        totals: list[dict[str, float]] = [{"reward": 0.0} for _ in answer]
        for part in mine:
            for total, (value, extras) in zip(totals, part.reward(prompt, answer), strict=True):
                total["reward"] += part.weight * value
                total[part.name] = value
                total |= {f"{part.name}.{extra}": number for extra, number in extras.items()}
        return totals
