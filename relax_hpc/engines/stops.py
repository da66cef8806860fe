"""Stop strings: found in the text, with the text made only where a stop could have ended."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

UNKNOWN = "\ufffd"
"""What a token that is only part of a character decodes to."""


class StopStrings:
    """Tells which rows have just completed one of the stop strings."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...], device: torch.device) -> None:
        self.tokenizer, self.stops = tokenizer, stops
        self.window = max(len(stop.encode()) for stop in stops) + 1
        """Tokens that hold any stop: a token of text has at least a byte, and one before it may lead with a space."""
        pieces = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        last = {stop[-1] for stop in stops}
        # A token alone may lose a space that it has in a text, so a stop that ends with one is looked for everywhere
        anywhere = any(character.isspace() for character in last)
        candidates = [anywhere or UNKNOWN in piece or not last.isdisjoint(piece) for piece in pieces]
        self.candidates = torch.tensor(candidates, device=device)

    def ended(self, tokens: Tensor, drawn: Tensor) -> Tensor:
        """[B] bool. tokens: [B, T] what each row has generated; drawn: [B] the last of them."""
        ended = self.candidates[drawn.clamp(max=len(self.candidates) - 1)]
        for row in ended.nonzero().flatten().tolist():
            text = self.tokenizer.decode(tokens[row, -self.window :].tolist())
            ended[row] = any(stop in text for stop in self.stops)
        return ended
