"""What became of every group that was generated, from the ledger alone.

ledger entries ──► order: taken at a step | dropped | not decided ──► group: trained | filtered | failed | late | unused
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from relax_hpc.run_dir import RunDir, RunError, read_json
from relax_hpc.spool.ledger import FAILED, Entry, read_entry

Fate = Literal["trained", "filtered", "failed", "late", "unused", "evaluation"]
FATES: tuple[Fate, ...] = ("trained", "filtered", "failed", "late", "unused", "evaluation")
"""trained: in the loss. filtered: taken by a step, kept out of its loss by a filter, or since the batch was full. failed: the group could not be played or
scored, whatever became of its order. late: its order was dropped. unused: no step has taken its order, or its file lost a
race. evaluation: a held-out prompt."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one group."""

    fate: Fate
    reason: str = ""
    detail: str = ""
    """Of a group that failed: which prompt, and what was said."""


@dataclass(frozen=True, slots=True)
class OrderFate:
    """What became of one order, and of each of its groups."""

    fate: Fate
    step: int | None = None
    """The step that took the order."""
    reason: str = ""
    filtered: dict[int, str] | None = None
    """Group -> why a filter kept it out of the loss."""

    def group(self, group: int, failure: str = "", detail: str = "") -> Verdict:
        """The verdict on a group; `failure` and `detail` are what the shard says of a group that failed."""
        if self.fate == "evaluation":
            return Verdict("evaluation", failure, detail)
        if failure:
            return Verdict("failed", failure, detail)
        if self.filtered and group in self.filtered:
            return Verdict("filtered", self.filtered[group])
        return Verdict(self.fate, self.reason)


class Fates:
    """The ledger, read from the orders' side."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.orders: dict[str, OrderFate] = {}
        """Every order that an entry names."""
        for entry in entries:
            filtered: dict[str, dict[int, str]] = {}
            for name, reason in entry.filtered.items():
                if reason.startswith(FAILED):  # the shard says it too, of orders that no step took as well
                    continue
                order, _, group = name.rpartition("/")
                filtered.setdefault(order, {})[int(group)] = reason
            for taken in entry.take:
                self.orders[taken.order] = OrderFate("trained", entry.step, "", filtered.get(taken.order))
            for dropped in entry.dropped:
                self.orders[dropped.order] = OrderFate("late", None, dropped.reason)

    def of(self, path: Path) -> OrderFate:
        """The fate of the order whose shard is at `path` (in shards/, evals/ or aside/)."""
        if path.parent.name == "aside":
            note: dict[str, Any] = read_json(path.with_suffix(".reason.json")) or {}
            return OrderFate("unused", None, str(note.get("reason", "put aside")))
        if path.parent.name == "evals":
            return OrderFate("evaluation")
        return self.orders.get(path.stem, OrderFate("unused"))


def read_entries(run: RunDir, broken: list[RunError] | None = None) -> list[Entry]:
    """All ledger entries, by step. Raises RunError naming an entry that cannot be read, unless `broken` is given, which collects them."""
    entries: list[Entry] = []
    for path in sorted(path for path in run.ledger.glob("*/*.json") if path.stem.isdigit()):
        try:
            entry = read_entry(path)
        except RunError as error:
            if broken is None:
                raise
            broken.append(error)
            continue
        if entry is not None:
            entries.append(entry)
    return entries
