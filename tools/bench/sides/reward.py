"""The reward of the TRL benchmark, the same function on both sides: cheap, deterministic, and it can be learned."""

from __future__ import annotations

from typing import Any


def vowels(prompt: Any, answer: str) -> float:
    """The share of vowels among the answer's characters."""
    return sum(answer.count(v) for v in "aeiou") / max(1, len(answer))
