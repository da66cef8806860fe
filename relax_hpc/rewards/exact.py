"""Exact match as a reward."""

from __future__ import annotations

from relax_hpc.records import Prompt


def exact(prompt: Prompt, answer: str, *, strip: bool = True, key: str | None = None) -> float:
    """1.0 when the answer is the reference answer, else 0.0; `strip`: white space around either does not count.

    key: the row's column with the reference, where the answer is something else to be learned, such as a tool call.
    """
    expected = (prompt.answer or "") if key is None else str(prompt.metadata[key])
    return float(answer.strip() == expected.strip() if strip else answer == expected)
