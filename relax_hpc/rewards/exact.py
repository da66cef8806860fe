"""Exact match as a reward."""

from __future__ import annotations

from relax_hpc.records import Prompt


def exact(prompt: Prompt, answer: str, *, strip: bool = True) -> float:
    """1.0 when the answer is the reference answer, else 0.0; `strip`: white space around either does not count."""
    expected = prompt.answer or ""
    return float(answer.strip() == expected.strip() if strip else answer == expected)
