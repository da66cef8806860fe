"""Stop strings, searched in the text; a row's text is made only when its last token could end one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

UNKNOWN = "\ufffd"
"""The character that a token decodes to when it is only part of a character."""


class StopStrings:
    """Finds the rows that have just completed one of the stop strings."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...], device: torch.device) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.window = window(stops)
        pieces = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        last = {stop[-1] for stop in stops}
        # A token alone may lose a space that it has in a text, so a stop that ends with one is looked for everywhere
        anywhere = any(character.isspace() for character in last)
        candidates = [anywhere or UNKNOWN in piece or not last.isdisjoint(piece) for piece in pieces]
        self.candidates = torch.tensor(candidates, device=device)

    def possible(self, drawn: Tensor) -> list[int]:
        """Return the rows whose last tokens, `drawn` [B], could make a stop string complete."""
        rows: list[int] = self.candidates[drawn.clamp(max=len(self.candidates) - 1)].nonzero().flatten().tolist()
        return rows

    def complete(self, tokens: Sequence[int]) -> bool:
        """Return True if there is a stop string in the last `window` of these tokens."""
        text = self.tokenizer.decode(tokens[-self.window :])
        return any(stop in text for stop in self.stops)


def window(stops: Sequence[str]) -> int:
    """The number of last tokens that surely contains any stop string: each has a byte, the first may lead with a space."""
    return max(len(stop.encode()) for stop in stops) + 1


def straddling(tokenizer: Any, stops: Sequence[str], begun: Sequence[int], tokens: Sequence[int]) -> int | None:
    """The number of `tokens` that complete a stop string begun in `begun`; None where none is completed."""
    if not stops or not begun:
        return None
    size = window(stops)
    for count in range(1, min(size, len(tokens)) + 1):
        text = tokenizer.decode([*begun, *tokens[:count]][-size:])
        if any(stop in text for stop in stops):
            return count
    return None
