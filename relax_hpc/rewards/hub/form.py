"""Rewards of an answer's form, whatever it says: `format`, `length`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from relax_hpc.records import Prompt


def of_format(prompt: Prompt, answer: str, *, pattern: str = "", tags: Sequence[str] = ()) -> float:
    """1.0 where the whole answer matches the regular expression `pattern` (`.` is any character), and has each tag of
    `tags` once, opened and closed, in this order and not one within another; else 0.0.

    Raises ValueError where neither is given, or `pattern` is no regular expression.
    """
    if not pattern and not tags:
        raise ValueError("reward 'format' needs `pattern` or `tags` in reward_options")
    try:
        if pattern and not re.fullmatch(pattern, answer.strip(), re.DOTALL):
            return 0.0
    except re.error as error:
        raise ValueError(f"pattern = {pattern!r} of reward 'format' is no regular expression: {error}") from None
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    if any(answer.count(mark) != 1 for mark in marks):
        return 0.0
    places = [answer.index(mark) for mark in marks]
    return float(places == sorted(places))


def length(prompt: Prompt, answer: str, *, most: int, margin: int = 0, least: int = 0, unit: str = "words") -> float:
    """1.0 for an answer of `least` to `most` units, 0.0 beyond `margin` units more, and a straight line in between.

    unit: "words" (between white space) or "characters". Raises ValueError for another unit, or limits out of order.
    """
    if unit not in ("words", "characters"):
        raise ValueError(f"unit = {unit!r} of reward 'length', expected 'words' or 'characters'")
    if not 0 <= least <= most or margin < 0:
        raise ValueError(
            f"least = {least}, most = {most}, margin = {margin} of reward 'length': expected 0 <= least <= most, margin >= 0"
        )
    count = len(answer.split()) if unit == "words" else len(answer)
    if count < least:
        return 0.0
    return max(0.0, 1.0 - (count - most) / (margin + 1)) if count > most else 1.0
