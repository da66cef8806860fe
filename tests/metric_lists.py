"""docs/metrics.md as a test reads it: which names a line of each kind has."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
COMMON = {"time", "attempt", "kind", "non_finite"}


@dataclass(slots=True)
class Names:
    """Of a kind of line."""

    always: set[str] = field(default_factory=set)
    sometimes: set[str] = field(default_factory=set)
    """Where a name ends in _K, K is a number."""

    @property
    def names(self) -> set[str]:
        return self.always | self.sometimes

    def complaint(self, line: dict[str, Any]) -> str:
        """What of a line is not as listed; empty when nothing is."""
        said = {re.sub(r"_\d+$", "_K", name) for name in line} - COMMON
        more, less = said - self.always - self.sometimes, self.always - said
        return f"not listed: {sorted(more)}, missing: {sorted(less)}" if more or less else ""


def listed() -> dict[str, Names]:
    """Kind -> its names."""
    kinds: dict[str, Names] = {}
    here = Names()
    for text in PAGE.read_text().splitlines():
        if text.startswith("#"):
            found = re.findall(r"`(\w+)`", text)
            here = kinds.setdefault(found[0], Names()) if len(found) == 1 else Names()
        cells = [cell.strip() for cell in text.split("|")]
        if len(cells) == 6 and cells[1].startswith("`"):
            names = set(re.findall(r"`(\w+)`", cells[1]))
            (here.always if cells[2] == "always" else here.sometimes).update(names)
    return kinds
