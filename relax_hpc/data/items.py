"""What a source holds at an index, before a tokenizer has seen it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Item:
    """One task as its source says it."""

    content: Any
    """Text, or a list of chat messages."""
    answer: str | None
    metadata: dict[str, Any]


class Items(Protocol):
    """A map-style source of prompts; the same index is the same item in every process."""

    procedural: bool
    """Items are made, not read: there is no file that could be checked whole before a run."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item:
        """Raises RunError for an item that cannot be used; the message says where it stands."""
        ...

    def where(self, index: int) -> str:
        """Where a person finds the item, such as 'prompts.jsonl:17'."""
        ...
