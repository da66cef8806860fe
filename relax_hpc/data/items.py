"""Items of a source, as they are before a tokenizer has seen them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Item:
    """One task as its source gives it."""

    content: Any
    """Text, or a list of chat messages."""
    answer: str | None
    metadata: dict[str, Any]


class Items(Protocol):
    """A map-style source of prompts; the same index is the same item in every process."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Item:
        """The item at `index`. Raises RunError for one that cannot be used, with its place."""
        ...

    def where(self, index: int) -> str:
        """The place where a person finds the item, such as 'prompts.jsonl:17'."""
        ...
