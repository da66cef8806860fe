"""Answers between tags: `<think>…</think> … <answer>…</answer>`."""

from __future__ import annotations

from relax_hpc.records import Prompt

BEGIN, END = "<answer>", "</answer>"


def tagged(text: str) -> str | None:
    """The text of the last `<answer>…</answer>`, without white space around it; None where there is none."""
    inside = text.rpartition(BEGIN)
    said, end, _ = inside[2].partition(END)
    return said.strip() if inside[1] and end else None


def multiple_choice(prompt: Prompt, answer: str) -> float:
    """1.0 when the text in the answer's `<answer>` is the reference answer, which may have the tags too; else 0.0."""
    reference = prompt.answer or ""
    expected = tagged(reference)
    return float(tagged(answer) == (reference.strip() if expected is None else expected))
