"""Prompts of the recipe's [[source]] and [[evaluation.source]] tables, looked up by (source, index).

item (file row or procedural) ──► text (chat template) ──► tokens ──► Prompt
                                    └──► in the held-out share, or asked by an evaluation source? then never trained on
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_hpc.data.files import FileItems
from relax_hpc.data.holdout import falls_in, fingerprint
from relax_hpc.data.items import Item, Items
from relax_hpc.data.render import ContentError, render, render_answer
from relax_hpc.data.shuffle import order
from relax_hpc.data.tasks import TaskItems
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.source import AnyEvaluationSource, AnySource, FilePrompts, keys_of
from relax_hpc.records import Prompt

MOST_FAULTS = 20
"""Broken rows that one error names at most."""
CHECKED_AT_ONCE = 512
"""Rows that `check` tokenizes in one call."""
_TRAINED, _SHARE, _ELSEWHERE = 1, 2, 3
"""Use of a training source's prompt: it is trained on; it is in the held-out share; it is left out because an
evaluation source has it."""
_KEPT, _TOO_LONG, _NO_ANSWER = 1, 2, 3
"""Outcome for a row of a source that drops some: kept, too long, or without an answer."""


class PromptSources:
    """All sources of a recipe. A (source, index) names the same prompt in every process.

    `tokenizer`: a Hugging Face tokenizer. `context`: the model's longest sequence in tokens. `holdout`: the share of
    distinct texts of the training sources that is held out (0: none). `evaluation`: sources for evaluation only; their
    numbers follow those of training. `learns`: answers of training sources are trained on, so they need room too. The
    constructor reads no prompt; call `check` once before a run starts.
    """

    def __init__(
        self,
        sources: Sequence[AnySource],
        tokenizer: Any,
        context: int,
        holdout: float = 0.0,
        evaluation: Sequence[AnyEvaluationSource] = (),
        learns: bool = False,
    ) -> None:
        self._sources, self._evaluation, self._learns = sources, evaluation, learns
        self._tokenizer, self._context, self._holdout = tokenizer, context, holdout
        every = self._every = [*sources, *evaluation]
        self._keys = keys_of(every)
        self._items: list[Items] = [FileItems(s) if isinstance(s, FilePrompts) else TaskItems(s) for s in every]
        self._side: list[NDArray[np.int8]] = [np.zeros(len(items), np.int8) for items in self._items]
        """Results of `_side_of` by index; 0 where not known yet."""
        self._status: list[NDArray[np.int8]] = [np.zeros(len(items), np.int8) for items in self._items]
        """Results of `_status_of` by index; 0 where not known yet."""

    @classmethod
    def of(cls, recipe: Recipe, tokenizer: Any, context: int) -> PromptSources:
        """The prompt sources of `recipe`."""
        asked = recipe.evaluation
        learns = recipe.supervised or recipe.sft_warm_start is not None
        return cls(
            recipe.source, tokenizer, context, asked.holdout if asked else 0.0, asked.source if asked else (), learns
        )

    @property
    def sizes(self) -> list[int]:
        """Number of items of each training source."""
        return [len(items) for items in self._items[: len(self._sources)]]

    @property
    def weights(self) -> list[float]:
        """Weight of each training source: its share of the prompts, relative to the others."""
        return [source.weight for source in self._sources]

    def prompt(self, source: int, index: int) -> Prompt:
        """The prompt with its tokens. Raises RunError where it cannot be used (too long, a broken row, media)."""
        item = self._items[source][index]
        text, tokens = self._tokens(source, index, item)
        tokens = self._cut(source, tokens)
        self._check_length(source, index, len(tokens))
        return Prompt(source, index, text, np.asarray(tokens, np.int32), item.answer, item.metadata)

    def example(self, source: int, index: int) -> tuple[Prompt, NDArray[np.int32]]:
        """The prompt, and its source's own answer as tokens with the one that ends it. Raises RunError where there is
        no answer, or no room for it."""
        prompt = self.prompt(source, index)
        answer = self._answers(source, [index])[0]
        self._check_example(source, index, len(prompt.tokens), len(answer))
        return prompt, np.asarray(answer, np.int32)

    def text(self, source: int, index: int) -> str:
        """The prompt's text, not tokenized."""
        return self._render(source, index, self._items[source][index])[0]

    def _tokens(self, source: int, index: int, item: Item) -> tuple[str, list[int]]:
        """Render and tokenize the prompt; returns its text and all of its tokens."""
        text, is_chat = self._render(source, index, item)
        return text, self._tokenizer.encode(text, add_special_tokens=not is_chat)

    def _cut(self, source: int, tokens: list[int]) -> list[int]:
        """Cut tokens off the beginning where the source has too long prompts truncated."""
        own = self._every[source]
        if isinstance(own, FilePrompts) and own.too_long == "truncate" and own.max_prompt_tokens is not None:
            return tokens[-own.max_prompt_tokens :]
        return tokens

    def _longest(self, source: int) -> int:
        """The most tokens that a prompt of this source may have."""
        own = self._every[source]
        return min(
            self._context - 1, (own.max_prompt_tokens if isinstance(own, FilePrompts) else None) or self._context
        )

    def is_dropped(self, source: int, index: int) -> bool:
        """Return True if the source leaves this row out: it is too long, or lacks an answer. Raises RunError for a
        broken row."""
        return self._status_of(source, index) != _KEPT

    def _status_of(self, source: int, index: int) -> int:
        """Look up _KEPT, _TOO_LONG or _NO_ANSWER for a row. Found once, then remembered; it depends on the row, the
        tokenizer and the recipe alone."""
        own, status = self._every[source], self._status[source]
        if not isinstance(own, FilePrompts) or not own.drops:
            return _KEPT
        if not status[index]:
            status[index] = self._look(source, index, own)
        return int(status[index])

    def _look(self, source: int, index: int, own: FilePrompts) -> int:
        item = self._items[source][index]
        has_answer = bool(item.answer and item.answer.strip())
        if own.missing_answer == "drop" and not has_answer:
            return _NO_ANSWER
        if own.too_long != "drop":
            return _KEPT
        length = len(self._tokens(source, index, item)[1])
        if length > self._longest(source):
            return _TOO_LONG
        learned = self._learns and source < len(self._sources) and has_answer
        if learned and length + len(self._answers(source, [index])[0]) > self._context:
            return _TOO_LONG
        return _KEPT

    def check(self, *, answers: bool = False) -> dict[str, dict[str, int]]:
        """Check every row of the file sources, and the first item of the others. Raises RunError, which names up to
        MOST_FAULTS faults.

        Columns, chat messages, and the length in tokens are checked; the cost is about one tokenization of the files,
        two for those that drop rows. `answers`: check those of training sources too, because they will be trained on.
        Returns, by the keys of the sources that drop or cut rows, how many there are ("rows"), are left out
        ("too_long", "no_answer") and cut ("cut").
        """
        self._number_cut = [0] * len(self._every)
        faults: list[str] = []
        for source, items in enumerate(self._items):
            rows = 1 if items.procedural else len(items)
            for begin in range(0, rows, CHECKED_AT_ONCE):
                learned = answers and source < len(self._sources)
                faults += self._faults(source, range(begin, min(begin + CHECKED_AT_ONCE, rows)), learned)
                if len(faults) >= MOST_FAULTS:
                    break
        if len(faults) == 1:
            raise RunError(faults[0])
        if faults:
            count = f"at least {MOST_FAULTS}" if len(faults) >= MOST_FAULTS else len(faults)
            raise RunError("\n".join([f"{count} prompts cannot be used:", *faults[:MOST_FAULTS]]))
        return self._counted()

    def _counted(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for source, own in enumerate(self._every):
            if not isinstance(own, FilePrompts) or not own.counted:
                continue
            rows, status = len(self._items[source]), self._status[source]
            left_out = {"too_long": int((status == _TOO_LONG).sum()), "no_answer": int((status == _NO_ANSWER).sum())}
            if sum(left_out.values()) == rows:
                raise RunError(
                    f"{self._keys[source]}.prompts = '{own.prompts}': all {rows} rows are left out ({left_out['too_long']} too long, "
                    f"{left_out['no_answer']} without an answer): change its too_long, max_prompt_tokens, missing_answer or answer_key"
                )
            found[self._keys[source]] = {"rows": rows, **left_out, "cut": self._number_cut[source]}
        return found

    def _faults(self, source: int, rows: range, answers: bool) -> list[str]:
        """Find the faults of these rows; rows are looked at one by one only where there is a fault."""
        try:
            self._check_rows(source, rows, answers)
        except RunError as error:
            if len(rows) == 1:
                return [str(error)]
            found = (fault for row in rows for fault in self._faults(source, range(row, row + 1), answers))
            return list(itertools.islice(found, MOST_FAULTS)) or [str(error)]
        return []

    def is_held_out(self, source: int, index: int) -> bool:
        """Return True if a training source's prompt is for evaluation alone: by the hash of its text, or because an
        evaluation source has it."""
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
            text = self.text(source, index)
            elsewhere = _ELSEWHERE if fingerprint(text) in self._evaluation_texts else _TRAINED
            side[index] = _SHARE if falls_in(text, self._holdout) else elsewhere
        return int(side[index])

    @cached_property
    def _evaluation_texts(self) -> frozenset[bytes]:
        """Fingerprints of all texts of the evaluation sources, those beyond their limits too."""
        numbers = range(len(self._sources), len(self._items))
        return frozenset(fingerprint(self.text(n, i)) for n in numbers for i in range(len(self._items[n])))

    def evaluated(self, count: int) -> list[tuple[int, int]]:
        """(source, index) of all prompts that are evaluated: `count` of the held-out share, then each evaluation
        source's own.

        They depend on the sources alone, not on the run's seed. Raises RunError where nothing is held out.
        """
        found = self.held_out(count) if self._holdout else []
        for number, asked in enumerate(self._evaluation, start=len(self._sources)):
            texts: set[str] = set()
            for index in order(len(self._items[number]), "evaluated", number).tolist():
                if len(texts) == asked.limit:
                    break
                if (text := self.text(number, index)) not in texts and not self.is_dropped(number, index):
                    texts.add(text)
                    found.append((number, index))
        return found

    def held_out(self, count: int) -> list[tuple[int, int]]:
        """(source, index) of up to `count` prompts of the held-out share, of distinct texts, shared among sources by weight.

        They depend on the sources alone, not on the run's seed. Raises RunError where nothing is held out.
        """
        found: list[tuple[int, int]] = []
        texts: set[str] = set()
        streams = {source: self._held_out_of(source) for source in range(len(self._sources))}
        taken = [0] * len(streams)
        while streams and len(found) < count:
            source = next_source(taken, self.weights, streams)
            index = next(streams[source], None)
            if index is None:
                del streams[source]
            elif (text := self.text(source, index)) not in texts:
                texts.add(text)
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

    def _render(self, source: int, index: int, item: Item) -> tuple[str, bool]:
        try:
            return render(item.content, self._tokenizer)
        except ContentError as error:
            raise RunError(f"{self._where(source, index)}: {error}") from None

    def _answers(self, source: int, rows: Sequence[int]) -> list[list[int]]:
        """Tokenize the answers of these rows, each ended as the model ends its own."""
        texts: list[str] = []
        ended: list[bool] = []
        for index in rows:
            item = self._items[source][index]
            if not item.answer or not item.answer.strip():
                raise RunError(
                    f"{self._where(source, index)}: there is no answer to learn: give one ({self._keys[source]}.answer_key names its "
                    f"column), or take the row out ({self._keys[source]}.missing_answer = 'drop' leaves all such rows out)"
                )
            try:
                text, done = render_answer(item.content, item.answer, self._tokenizer)
            except ContentError as error:
                raise RunError(f"{self._where(source, index)}: {error}") from None
            texts.append(text)
            ended.append(done)
        encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        if end is None and not all(ended):
            raise RunError(
                "the model's tokenizer has no end-of-sequence token, so nothing would end an answer: add one"
            )
        return [tokens if done else [*tokens, end] for tokens, done in zip(encoded, ended, strict=True)]

    def _check_rows(self, source: int, every: range, answers: bool) -> None:
        rows = [row for row in every if not self.is_dropped(source, row)]
        rendered = [self._render(source, index, self._items[source][index]) for index in rows]
        lengths: dict[int, int] = {}
        for is_chat in (False, True):
            chosen = [(row, text) for row, (text, chat) in zip(rows, rendered, strict=True) if chat == is_chat]
            if not chosen:
                continue
            encoded = self._tokenizer([text for _, text in chosen], add_special_tokens=not is_chat)["input_ids"]
            for (row, _), tokens in zip(chosen, encoded, strict=True):
                lengths[row] = len(self._cut(source, tokens))
                self._check_length(source, row, lengths[row])
                self._number_cut[source] += lengths[row] < len(tokens)
        if answers and rows:
            for row, tokens in zip(rows, self._answers(source, rows), strict=True):
                self._check_example(source, row, lengths[row], len(tokens))

    def _check_example(self, source: int, index: int, prompt: int, answer: int) -> None:
        if prompt + answer > self._context:
            raise RunError(
                f"{self._where(source, index)}: the prompt has {prompt} tokens and its answer {answer} with the one that ends it, more "
                f"than the model's context of {self._context} together: shorten it or take it out"
            )

    def _check_length(self, source: int, index: int, length: int) -> None:
        longest = self._longest(source)
        if not 0 < length <= longest:
            why = (
                f"which leaves room for an answer in the model's context of {self._context}"
                if longest == self._context - 1
                else "its source's max_prompt_tokens"
            )
            key = (
                f"{self._keys[source]}.too_long"
                if isinstance(self._every[source], FilePrompts)
                else "the task's config"
            )
            raise RunError(
                f"{self._where(source, index)}: the prompt has {length} tokens; it needs at least 1 and at most "
                f"{longest}, {why}: shorten it or take it out ({key} does it for all)"
            )

    def _where(self, source: int, index: int) -> str:
        return f"{self._keys[source].replace('.', ' ')}, prompt {index} ({self._items[source].where(index)})"


def next_source(taken: Sequence[int], weights: Sequence[float], among: Iterable[int]) -> int:
    """Choose the next source after `taken` prompts of each: the one that is furthest behind its share.

    The highest-averages method of Webster: every prefix of the stream follows the weights, and no random state is kept.
    """
    return min(among, key=lambda source: ((taken[source] + 0.5) / weights[source], source))
