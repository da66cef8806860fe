"""The parts of an answer that rewards look at, and references that may be several."""

from __future__ import annotations

import json

from relax_hpc.records import Prompt

THOUGHT = "</think>"


def after_thinking(text: str) -> str:
    """The text behind the last `</think>`; all of it where there is none."""
    return text.rpartition(THOUGHT)[2]


def references(prompt: Prompt) -> list[str]:
    """The reference answers: one, or the entries of a JSON list. Raises ValueError where there is none."""
    text = (prompt.answer or "").strip()
    if not text:
        raise ValueError("the reference answer is empty: answer_key names the column that has it")
    if text.startswith("["):
        try:
            found = json.loads(text)
        except ValueError:
            return [text]
        if found and all(isinstance(one, str | int | float) for one in found):
            return [str(one) for one in found]
    return [text]
