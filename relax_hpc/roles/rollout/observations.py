"""What environments show: text, or parts with images, video and sound ──► tokens that continue a sample, and its media.

The model's processor runs on what is added alone; tokens and tensors that are there already are never made again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax_hpc.data.parts import observed
from relax_hpc.data.render import ContentError
from relax_hpc.media.process import Processor
from relax_hpc.media.values import MediaError
from relax_hpc.records import Media


class UnusableObservation(Exception):
    """An observation with media that cannot be shown to the model. The message says why."""


class Observations:
    """Makes tokens and media of observations, by the model's tokenizer and processor."""

    def __init__(self, tokenizer: Any, processor: Processor) -> None:
        self._tokenizer, self._processor = tokenizer, processor

    def tokens(self, observation: Any) -> tuple[list[int], Media | None]:
        """Return the observation's tokens, and what it shows. Raises UnusableObservation."""
        if isinstance(observation, str):
            plain: list[int] = self._tokenizer.encode(observation, add_special_tokens=False)
            return plain, None
        try:
            text, cells = observed(observation, self._processor.family.marks)
            if not cells:
                return self.tokens(text)
            tokens, media = self._processor.tokens(text, cells, Path(), special=False)
        except (ContentError, MediaError) as error:
            raise UnusableObservation(str(error)) from error
        return tokens.tolist(), media

    def joined(self, before: Media | None, added: Media) -> Media:
        """Return the media of a sample that shows `added` after all that it showed before."""
        return added if before is None else Media.of(self._processor.family.joined([before, added]))
