"""Media of one source's rows: looked at before the run, decoded when a prompt is asked for, compared by their bytes.

places in the content + the row's cells ──► cells in order ──► the model's processor ──► (tokens, Media)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from relax_hpc.data.files import FileItems
from relax_hpc.data.parts import Place, filled
from relax_hpc.data.render import ContentError
from relax_hpc.files.errors import RunError
from relax_hpc.media.process import Cell, Processor
from relax_hpc.media.values import MediaError, Stored, digest, stored
from relax_hpc.recipe.tables.source import FilePrompts
from relax_hpc.records import Failure, Media, Prompt

MOST_LOOKED_AT = 10_000
"""Rows of a source whose media's headers are read before a run; of more rows, as many, evenly spread."""


class UnusablePrompt(RunError):
    """A prompt whose media turned out to be unusable when they were decoded. It costs its own group."""

    def __init__(self, prompt: Prompt, reason: str, said: str) -> None:
        super().__init__(said)
        self.prompt, self.failure = prompt, Failure(reason, said)


class MediaRows:
    """The media of a file's rows."""

    def __init__(self, source: FilePrompts, items: FileItems, processor: Processor | None) -> None:
        self._source, self._items, self._processor = source, items, processor
        prompts = source.prompts.absolute()
        self._folder = prompts if prompts.is_dir() else prompts.parent
        self.marks = dict(processor.family.marks) if processor else {}
        self.columns = tuple(source.media)
        self._every = 1 if source.broken_media == "drop" else math.ceil(len(items) / MOST_LOOKED_AT)

    def look(self, index: int, places: Sequence[Place], text: str) -> None:
        """Compare the counts of a row, and look at its media's headers where it is one of those to be looked at.

        Raises ContentError, MediaError.
        """
        wholly = index % self._every == 0
        if self._processor is None or not (wholly or self._items.media_are_cheap):
            return
        cells = self._cells(index, places)
        self._processor.check_marks(text, cells)
        for number, cell in enumerate(cells):
            try:
                if wholly:
                    self._processor.look(cell, self._folder)
                else:
                    _exists(cell, self._folder)
            except MediaError as error:
                raise MediaError(f"{cell.modality} {number + 1} of {len(cells)}: {error}") from None

    def tokens(
        self, index: int, places: Sequence[Place], text: str, *, special: bool
    ) -> tuple[NDArray[np.int32], Media]:
        """Process a row with media. Raises ContentError, MediaError."""
        assert self._processor is not None, "places are found for models with a processor only"
        return self._processor.tokens(text, self._cells(index, places), self._folder, special=special)

    def identity(self, text: str, index: int, places: Sequence[Place]) -> str:
        """A text that two prompts share if they show the same: their text, and the digests of their media's bytes."""
        try:
            digests = [
                f"{cell.modality} {digest(cell.value, self._folder).hex()}" for cell in self._cells(index, places)
            ]
        except (ContentError, MediaError) as error:
            digests = [f"row {index}: {error}"]
        return "\0".join([text, *digests])

    def _cells(self, index: int, places: Sequence[Place]) -> list[Cell]:
        columns = self._items.media(index) if self._source.media else {}
        return filled(places, columns, self._source.media)


def _exists(cell: Cell, folder: Path) -> None:
    if isinstance(cell.value, str) and isinstance((file := stored(cell.value, folder)).data, Path):
        Stored(file.data).check()
