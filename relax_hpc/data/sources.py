"""Prompts of the recipe's [[source]] and [[evaluation.source]] tables, looked up by (source, index).

Source, Source, … ──► Prompt
       └──► in the held-out share, or asked by an evaluation source? then never trained on
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_hpc.data.holdout import falls_in, fingerprint
from relax_hpc.data.shuffle import order
from relax_hpc.data.source import MOST_FAULTS, Source
from relax_hpc.files.errors import RunError
from relax_hpc.media.process import Processor
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.source import AnyEvaluationSource, AnySource, FilePrompts, keys_of
from relax_hpc.records import Prompt

_TRAINED, _SHARE, _ELSEWHERE = 1, 2, 3
"""Use of a training source's prompt: it is trained on; it is in the held-out share; it is left out because an
evaluation source has it."""


class PromptSources:
    """All sources of a recipe. A (source, index) names the same prompt in every process.

    `tokenizer`: a Hugging Face tokenizer. `context`: the model's longest sequence in tokens. `holdout`: the share of
    distinct prompts of the training sources that is held out (0: none). `evaluation`: sources for evaluation only; their
    numbers follow those of training. `learns`: answers of training sources are trained on, so they need room too.
    `processor`: the model's, for prompts with media. The constructor reads no prompt; call `check` once before a run
    starts.
    """

    def __init__(
        self,
        sources: Sequence[AnySource],
        tokenizer: Any,
        context: int,
        holdout: float = 0.0,
        evaluation: Sequence[AnyEvaluationSource] = (),
        learns: bool = False,
        processor: Processor | None = None,
    ) -> None:
        self._evaluation, self._holdout = evaluation, holdout
        every = [*sources, *evaluation]
        self._processor, self._recipe = processor, every
        self._sources = [
            Source(number, key, own, tokenizer, context, learns=learns and number < len(sources), processor=processor)
            for number, (key, own) in enumerate(zip(keys_of(every), every, strict=True))
        ]
        self._trained = self._sources[: len(sources)]
        self.sizes = [len(source) for source in self._trained]
        """Number of items of each training source."""
        self.weights = [source.weight for source in sources]
        """Weight of each training source: its share of the prompts, relative to the others."""
        self._side: list[NDArray[np.int8]] = [np.zeros(size, np.int8) for size in self.sizes]
        """Results of `_side_of` by index; 0 where not known yet."""

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: Any, context: int, folder: Path) -> PromptSources:
        """The prompt sources of `recipe`; `folder`: the model's, with its processor where it has one."""
        asked = recipe.evaluation
        learns = recipe.supervised or recipe.sft_warm_start is not None
        return cls(
            recipe.source, tokenizer, context, asked.holdout if asked else 0.0, asked.source if asked else (), learns,
            Processor(folder, recipe.media, keeps_files=recipe.spool.media == "source"),
        )  # fmt: skip

    def prompt(self, source: int, index: int) -> Prompt:
        """The prompt with its tokens. Raises RunError where it cannot be used (too long, a broken row), UnusablePrompt
        where its media cannot."""
        return self._sources[source].prompt(index)

    def without_media(self, source: int, index: int) -> Prompt:
        """The prompt with its text's own tokens alone, for a group that fails."""
        return self._sources[source].without_media(index)

    @property
    def show(self) -> bool:
        """True where prompts may show images, video or sound: the model's family knows them, and there are rows of files."""
        shows = self._processor is not None and bool(self._processor.family.modalities)
        return shows and any(isinstance(one, FilePrompts) for one in self._recipe)

    def media_bytes(self, count: int) -> int:
        """Bytes that a shard keeps of a prompt's media: the most of `count` prompts of each training source, evenly spread."""
        most = 0
        for source in self._trained if self.show else ():
            for index in np.linspace(0, len(source) - 1, min(count, len(source)), dtype=int).tolist():
                with contextlib.suppress(RunError):
                    media = source.prompt(index).media
                    most = max(most, media.bytes if media else 0)
        return most

    def example(self, source: int, index: int) -> tuple[Prompt, NDArray[np.int32]]:
        """The prompt, and its source's own answer as tokens with the one that ends it. Raises RunError where there is
        no answer, or no room for it."""
        return self._sources[source].example(index)

    def text(self, source: int, index: int) -> str:
        """The prompt's text, not tokenized."""
        return self._sources[source].text(index)

    def is_dropped(self, source: int, index: int) -> bool:
        """Return True if the source leaves this row out: it is too long, or lacks an answer. Raises RunError for a
        broken row."""
        return self._sources[source].is_dropped(index)

    def check(self, *, answers: bool = False) -> dict[str, dict[str, int]]:
        """Check every row of the file sources, and the first item of the others. Raises RunError, which names up to
        MOST_FAULTS faults.

        Columns, chat messages, and the length in tokens are checked; the cost is about one tokenization of the files,
        two for those that drop rows. `answers`: check those of training sources too, because they will be trained on.
        Returns, by the keys of the sources that drop or cut rows, how many there are ("rows"), are left out
        ("too_long", "no_answer", "broken_media") and cut ("cut").
        """
        if self._processor is not None:
            self._processor.serve(
                {
                    f"{key}.media.{modality}": modality
                    for key, one in zip(keys_of(self._recipe), self._recipe, strict=True)
                    if isinstance(one, FilePrompts)
                    for modality in one.media
                }
            )
        faults = [
            fault for source in self._sources for fault in source.faults(answers=answers and source in self._trained)
        ]
        if len(faults) == 1:
            raise RunError(faults[0])
        if faults:
            count = f"at least {MOST_FAULTS}" if len(faults) >= MOST_FAULTS else len(faults)
            raise RunError("\n".join([f"{count} prompts cannot be used:", *faults[:MOST_FAULTS]]))
        return {source.key: counts for source in self._sources if (counts := source.counts())}

    def is_held_out(self, source: int, index: int) -> bool:
        """Return True if a training source's prompt is for evaluation alone: by the hash of its text and
        media, or because an evaluation source has it."""
        return self._side_of(source, index) != _TRAINED

    def is_trained(self, source: int, index: int) -> bool:
        """Return True if a training source's prompt is trained on: neither held out nor dropped."""
        return not self.is_held_out(source, index) and not self.is_dropped(source, index)

    def _side_of(self, source: int, index: int) -> int:
        """Look up _TRAINED, _SHARE or _ELSEWHERE for a prompt. Found once, then remembered."""
        if not self._holdout and not self._evaluation:
            return _TRAINED
        side = self._side[source]
        if not side[index]:
            asked = self._sources[source].identity(index)
            elsewhere = _ELSEWHERE if fingerprint(asked) in self._evaluated_elsewhere else _TRAINED
            side[index] = _SHARE if falls_in(asked, self._holdout) else elsewhere
        return int(side[index])

    @cached_property
    def _evaluated_elsewhere(self) -> frozenset[bytes]:
        """Fingerprints of all prompts of the evaluation sources, those beyond their limits too."""
        numbers = range(len(self._trained), len(self._sources))
        return frozenset(
            fingerprint(self._sources[n].identity(i)) for n in numbers for i in range(len(self._sources[n]))
        )

    def evaluated(self, count: int) -> list[tuple[int, int]]:
        """(source, index) of all prompts that are evaluated: `count` of the held-out share, then each evaluation
        source's own.

        They depend on the sources alone, not on the run's seed. Raises RunError where nothing is held out.
        """
        found = self.held_out(count) if self._holdout else []
        for number, asked in enumerate(self._evaluation, start=len(self._trained)):
            seen: set[str] = set()
            for index in order(len(self._sources[number]), "evaluated", number).tolist():
                if len(seen) == asked.limit:
                    break
                same = self._sources[number].identity(index)
                if same not in seen and not self.is_dropped(number, index):
                    seen.add(same)
                    found.append((number, index))
        return found

    def held_out(self, count: int) -> list[tuple[int, int]]:
        """(source, index) of up to `count` distinct prompts of the held-out share, shared among sources by weight.

        They depend on the sources alone, not on the run's seed. Raises RunError where nothing is held out.
        """
        found: list[tuple[int, int]] = []
        seen: set[str] = set()
        streams = {source: self._held_out_of(source) for source in range(len(self._trained))}
        taken = [0] * len(streams)
        while streams and len(found) < count:
            source = next_source(taken, self.weights, streams)
            index = next(streams[source], None)
            if index is None:
                del streams[source]
            elif (same := self._sources[source].identity(index)) not in seen:
                seen.add(same)
                found.append((source, index))
                taken[source] += 1
        if not found:
            raise RunError(
                f"evaluation.holdout = {self._holdout} of {sum(self.sizes)} prompts holds none out: "
                "raise it, give more prompts, set it to 0 where there are [[evaluation.source]]s, or remove [evaluation]"
            )
        return found

    def _held_out_of(self, source: int) -> Iterator[int]:
        indices = order(self.sizes[source], "held out", source).tolist()
        return (i for i in indices if self._side_of(source, i) == _SHARE and not self.is_dropped(source, i))


def next_source(taken: Sequence[int], weights: Sequence[float], among: Iterable[int]) -> int:
    """Choose the next source after `taken` prompts of each: the one that is furthest behind its share.

    The highest-averages method of Webster: every prefix of the stream follows the weights, and no random state is kept.
    """
    return min(among, key=lambda source: ((taken[source] + 0.5) / weights[source], source))
