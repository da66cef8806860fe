"""Prompts with their sources' own answers, to be learned: read, rendered and tokenized by torchdata's loader.

    PromptCursor ──PromptRef──► worker processes: row ► chat template ► tokens ──► Example, in the cursor's order

What workers read ahead is not part of the state: a checkpoint names the last example that was taken, and the next one
follows it exactly.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from relax_hpc.data.cursor import PromptCursor, PromptRef
from relax_hpc.data.media_rows import UnusablePrompt
from relax_hpc.data.sources import PromptSources
from relax_hpc.files.errors import RunError
from relax_hpc.records import Media

AHEAD = 64
"""Examples that each worker process holds ready, or prepares."""
MOST_LEFT_OUT = 1000
"""Examples with unusable media that are passed over in one step, before the data are held to be wrong as a whole."""


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the answer to learn."""

    ref: PromptRef
    prompt: NDArray[np.int32]
    """[P] tokens."""
    answer: NDArray[np.int32]
    """[A] tokens, with the one that ends it."""
    media: Media | None = None
    """The images, videos and sounds of the prompt."""


class Unusable(str):
    """The reason why a prompt's media cannot be used: its example is left out."""


class ExampleLoader:
    """A checkpointable stream of examples in the order of a PromptCursor."""

    def __init__(self, sources: PromptSources, seed: int, workers: int = 0) -> None:
        """workers: processes that prepare examples ahead of need; with 0 it is done when they are taken."""
        with warnings.catch_warnings():  # torchdata 0.11 calls what later torch deprecates; a log need not say so
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            # A generator of its own: the loader would draw from torch's, and the run would depend on how often.
            self._loader: StatefulDataLoader[Example | str] = StatefulDataLoader(
                _Examples(sources), sampler=PromptCursor(sources, seed), batch_size=None, num_workers=workers,
                prefetch_factor=AHEAD if workers else None, generator=torch.Generator(),
            )  # fmt: skip
        self._examples: Iterator[Example | str] | None = None
        self._step, self._of_step = -1, list[Example]()

    def of(self, step: int, count: int) -> list[Example]:
        """Return the next `count` examples as those of `step`: the same again where they are asked for again (while the
        disk is full)."""
        if self._step != step:
            self._step, self._of_step = step, self.draw(count)
        return self._of_step

    def draw(self, count: int) -> list[Example]:
        """Return the next `count` examples, without those whose media turn out to be unusable. Raises RunError for one
        that cannot be learned otherwise."""
        taken, left_out = list[Example](), 0
        if self._examples is None:
            self._examples = iter(self._loader)
        while len(taken) < count:
            example = next(self._examples)
            if isinstance(example, Unusable) and left_out < MOST_LEFT_OUT:
                logging.getLogger("examples").warning("%s", example)
                left_out += 1
                continue
            if isinstance(example, str):
                raise RunError(example)
            taken.append(example)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """The state after the last example taken, JSON-like."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken. Raises RunError for the state of another seed or of other sources."""
        self._loader.load_state_dict(state)
        self._examples = iter(self._loader)


class _Examples(Dataset[Example | str]):
    """The loader's data set: looks a prompt and its answer up by name."""

    def __init__(self, sources: PromptSources) -> None:
        self._sources = sources

    def __getitem__(self, ref: PromptRef) -> Example | str:
        """Return the example, or what is wrong with it: an error that crosses processes would bring its traceback."""
        try:
            prompt, answer = self._sources.example(ref.source, ref.index)
        except UnusablePrompt as error:
            return Unusable(error)
        except RunError as error:
            return str(error)
        return Example(ref, prompt.tokens, answer, prompt.media)
