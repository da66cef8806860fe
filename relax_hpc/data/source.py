"""One source of prompts, looked up by index; a row of it is read, rendered and tokenized when it is asked for.

item (file row or procedural) ──► text (chat template) ──► tokens, within the source's limits ──► Prompt
                                  └──► with media: the model's processor ──► expanded tokens, Media ──┘
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from relax_hpc.data.files import FileItems
from relax_hpc.data.items import Item, Items
from relax_hpc.data.media_rows import MediaRows, UnusablePrompt
from relax_hpc.data.parts import Place, placed
from relax_hpc.data.render import ContentError, render, render_answer
from relax_hpc.data.tasks import TaskItems
from relax_hpc.files.errors import RunError
from relax_hpc.media.process import Processor
from relax_hpc.media.values import MediaError
from relax_hpc.recipe.tables.source import AnyPrompts, FilePrompts
from relax_hpc.records import Media, Prompt

MOST_FAULTS = 20
"""Broken rows that one error names at most."""
CHECKED_AT_ONCE = 512
"""Rows that `check` tokenizes in one call."""
_KEPT, _TOO_LONG, _NO_ANSWER, _BROKEN = 1, 2, 3, 4
"""Outcome for a row of a source that drops some: kept, too long, without an answer, or with broken media."""
LOOKING_THREADS = 16
"""Rows whose media are looked at together: most of it is waiting for a file system."""


class Rendered(NamedTuple):
    """A prompt as text, and what it shows at the model's marks in it."""

    text: str
    is_chat: bool
    places: list[Place]


class Source:
    """A source of prompts. An index names the same prompt in every process.

    `number`: its place among the recipe's sources; `key`: that of its table. `learns`: its answers are trained on, so
    they need room in the `context` too. `processor`: the model's, where it has one. The constructor reads no prompt.
    """

    def __init__(
        self, number: int, key: str, recipe: AnyPrompts, tokenizer: Any, context: int, *, learns: bool = False,
        processor: Processor | None = None,
    ) -> None:  # fmt: skip
        self.number, self.key, self._learns = number, key, learns
        self._tokenizer, self._context, self._of_template = tokenizer, context, recipe.of_template
        own_tools = "tools" in recipe.template_options
        self._unseen_tools = [] if own_tools else [tool for tool in recipe.tools if isinstance(tool, dict)]
        """Tools of which it is not known yet that the chat template shows them."""
        self._file = recipe if isinstance(recipe, FilePrompts) else None
        self._media: MediaRows | None = None
        if isinstance(recipe, FilePrompts):
            items = FileItems(recipe)
            self._items: Items = items
            self._media = MediaRows(recipe, items, processor)
        else:
            self._items = TaskItems(recipe)
        self._cuts = self._file.max_prompt_tokens if self._file and self._file.too_long == "truncate" else None
        """Tokens to which a longer prompt is cut, at its beginning; None where nothing is cut."""
        own_limit = self._file.max_prompt_tokens if self._file else None
        self._longest = min(context - 1, own_limit or context)
        """The most tokens that a prompt may have."""
        self._status = np.zeros(len(self._items), np.int8)
        """Outcome of each row, where it may be dropped; 0 where not known yet."""
        self._number_cut = 0

    def __len__(self) -> int:
        return len(self._items)

    def prompt(self, index: int) -> Prompt:
        """The prompt with its tokens. Raises RunError where it cannot be used (too long, a broken row), UnusablePrompt
        where its media cannot."""
        item = self._items[index]
        rendered = self._render(index, item)
        if rendered.places:
            return self._showing(index, item, rendered)
        tokens = self._cut(self._encode(rendered))
        self._check_length(index, len(tokens))
        return self._prompt(index, item, rendered, np.asarray(tokens, np.int32))

    def _prompt(
        self, index: int, item: Item, rendered: Rendered, tokens: NDArray[np.int32], media: Media | None = None
    ) -> Prompt:
        return Prompt(self.number, index, rendered.text, tokens, item.answer, item.metadata, media)

    def _showing(self, index: int, item: Item, rendered: Rendered) -> Prompt:
        """The prompt with its media as the model's processor makes them. Raises UnusablePrompt."""
        with self._unusable(self._plain(index, item, rendered)):
            assert self._media is not None
            with self._placed(index):
                tokens, media = self._media.tokens(index, rendered.places, rendered.text, special=not rendered.is_chat)
            self._check_length(index, len(tokens))
        return self._prompt(index, item, rendered, tokens, media)

    def without_media(self, index: int) -> Prompt:
        """The prompt with its text's own tokens alone, for a group that fails."""
        item = self._items[index]
        return self._plain(index, item, self._render(index, item))

    def _plain(self, index: int, item: Item, rendered: Rendered) -> Prompt:
        return self._prompt(index, item, rendered, np.asarray(self._encode(rendered), np.int32))

    def example(self, index: int) -> tuple[Prompt, NDArray[np.int32]]:
        """The prompt, and the source's own answer as tokens with the one that ends it. Raises RunError where there is
        no answer, or no room for it, UnusablePrompt where its media cannot be used."""
        prompt = self.prompt(index)
        answer = self._answers([index])[0]
        with self._unusable(prompt if prompt.media else None):
            self._check_room(index, len(prompt.tokens), len(answer))
        return prompt, np.asarray(answer, np.int32)

    def text(self, index: int) -> str:
        """The prompt's text, not tokenized."""
        return self._render(index, self._items[index]).text

    def identity(self, index: int) -> str:
        """A text that prompts of all sources share if they ask and show the same: media count by their bytes."""
        rendered = self._render(index, self._items[index])
        if not rendered.places or self._media is None:
            return rendered.text
        return self._media.identity(rendered.text, index, rendered.places)

    def is_dropped(self, index: int) -> bool:
        """Return True if this row is left out: it is too long, lacks an answer, or its media are broken. Raises RunError
        for a broken row.

        Found once, then remembered; it depends on the row, the tokenizer and the recipe alone.
        """
        if self._file is None or not self._file.drops:
            return False
        if not self._status[index]:
            self._status[index] = self._look(index, self._file)
        return bool(self._status[index] != _KEPT)

    def _look(self, index: int, file: FilePrompts) -> int:
        item = self._items[index]
        has_answer = bool(item.answer and item.answer.strip())
        if file.missing_answer == "drop" and not has_answer:
            return _NO_ANSWER
        if "drop" not in (file.too_long, file.broken_media):
            return _KEPT
        rendered = self._render(index, item)
        if file.broken_media == "drop":
            try:
                self._look_at_media(index, rendered)
            except RunError:
                return _BROKEN
        if file.too_long != "drop":
            return _KEPT
        length = len(self._encode(rendered))
        if length > self._longest:
            return _TOO_LONG
        if self._learns and has_answer and length + len(self._answers([index])[0]) > self._context:
            return _TOO_LONG
        return _KEPT

    def faults(self, *, answers: bool) -> list[str]:
        """Check every row of a file, or the first item of a task; return what is wrong with up to MOST_FAULTS of them.

        answers: check those too, because they will be trained on.
        """
        rows, found, self._number_cut = 1 if self._file is None else len(self), list[str](), 0
        for begin in range(0, rows, CHECKED_AT_ONCE):
            found += self._faults(range(begin, min(begin + CHECKED_AT_ONCE, rows)), answers)
            if len(found) >= MOST_FAULTS:
                break
        return found

    def counts(self) -> dict[str, int]:
        """Count, after `faults`, the rows, those left out ("too_long", "no_answer", "broken_media") and those cut ("cut");
        empty for a source that leaves none out.

        Raises RunError where no row is left.
        """
        if self._file is None or not self._file.counted:
            return {}
        outcomes = {"too_long": _TOO_LONG, "no_answer": _NO_ANSWER} | (
            {"broken_media": _BROKEN} if self._file.broken_media == "drop" else {}
        )
        out = {name: int((self._status == outcome).sum()) for name, outcome in outcomes.items()}
        if sum(out.values()) == len(self):
            shown = f", {out['broken_media']} for their media" if "broken_media" in out else ""
            raise RunError(
                f"{self.key}.prompts = '{self._file.prompts}': all {len(self)} rows are left out ({out['too_long']} too long, "
                f"{out['no_answer']} without an answer{shown}): change its too_long, max_prompt_tokens, missing_answer"
                f"{', media' if shown else ''} or answer_key"
            )
        return {"rows": len(self), **out, "cut": self._number_cut}

    def _faults(self, rows: range, answers: bool) -> list[str]:
        """Find the faults of these rows; rows are looked at one by one only where there is a fault."""
        try:
            self._check(rows, answers)
        except RunError as error:
            if len(rows) == 1:
                return [str(error)]
            found = (fault for row in rows for fault in self._faults(range(row, row + 1), answers))
            return list(itertools.islice(found, MOST_FAULTS)) or [str(error)]
        return []

    def _check(self, every: range, answers: bool) -> None:
        rows = [row for row in every if not self.is_dropped(row)]
        rendered = {row: self._render(row, self._items[row]) for row in rows}
        lengths: dict[int, int] = {}
        self._look_at_all(rendered)
        for is_chat in (False, True):
            chosen = [(row, one.text) for row, one in rendered.items() if one.is_chat == is_chat]
            if not chosen:
                continue
            encoded = self._tokenizer([text for _, text in chosen], add_special_tokens=not is_chat)["input_ids"]
            for (row, _), tokens in zip(chosen, encoded, strict=True):
                lengths[row] = len(self._cut(tokens))
                self._check_length(row, lengths[row])
                self._number_cut += lengths[row] < len(tokens)
        if answers and rows:
            for row, tokens in zip(rows, self._answers(rows), strict=True):
                self._check_room(row, lengths[row], len(tokens))

    def _look_at_all(self, rendered: dict[int, Rendered]) -> None:
        """Look at the media of rows before the run, unless that was done to see which are dropped."""
        if self._file is None or self._file.broken_media == "drop":
            return
        if showing := [(row, one) for row, one in rendered.items() if one.places or self._file.media]:
            with ThreadPoolExecutor(min(LOOKING_THREADS, len(showing))) as pool:
                for _ in pool.map(lambda both: self._look_at_media(*both), showing):
                    pass

    def _look_at_media(self, index: int, rendered: Rendered) -> None:
        if self._media is not None:
            with self._placed(index):
                self._media.look(index, rendered.places, rendered.text)

    def _render(self, index: int, item: Item) -> Rendered:
        with self._placed(index):
            content, places = item.content, list[Place]()
            if self._media is not None:
                content, places = placed(content, self._media.columns, self._media.marks)
            rendered = Rendered(*render(content, self._tokenizer, **self._of_template), places)
            if rendered.is_chat and self._unseen_tools:
                self._check_tools(content, rendered.text)
            return rendered

    def _check_tools(self, content: Any, text: str) -> None:
        """Raise ContentError unless the chat template shows the source's tools; once is enough."""
        without, _ = render(content, self._tokenizer, **{**self._of_template, "tools": None})
        if without == text:
            names = ", ".join(str(tool["function"]["name"]) for tool in self._unseen_tools)
            raise ContentError(
                f"the model's chat template does not show the tools {names}, so the model would not know of them: use a model whose template "
                "does, or describe them in the prompts and set template_options = {tools = []}"
            )
        self._unseen_tools = []

    def _encode(self, rendered: Rendered) -> list[int]:
        """Tokenize the prompt's text; media are one token each yet."""
        tokens: list[int] = self._tokenizer.encode(rendered.text, add_special_tokens=not rendered.is_chat)
        return tokens

    @contextmanager
    def _placed(self, index: int) -> Iterator[None]:
        """Name the row in errors about its content."""
        try:
            yield
        except (ContentError, MediaError) as error:
            raise RunError(f"{self._where(index)}: {error}") from None

    @contextmanager
    def _unusable(self, prompt: Prompt | None) -> Iterator[None]:
        """Turn errors into UnusablePrompt, which costs a group and not the run; without a prompt, leave them."""
        try:
            yield
        except RunError as error:
            if prompt is None:
                raise
            raise UnusablePrompt(prompt, "the prompt's media cannot be used", str(error)) from error

    def _cut(self, tokens: list[int]) -> list[int]:
        return tokens if self._cuts is None else tokens[-self._cuts :]

    def _answers(self, rows: Sequence[int]) -> list[list[int]]:
        """Tokenize the answers of these rows, each ended as the model ends its own."""
        texts: list[str] = []
        ended: list[bool] = []
        for index in rows:
            item = self._items[index]
            if not item.answer or not item.answer.strip():
                raise RunError(
                    f"{self._where(index)}: there is no answer to learn: give one ({self.key}.answer_key names its "
                    f"column), or take the row out ({self.key}.missing_answer = 'drop' leaves all such rows out)"
                )
            with self._placed(index):
                marked = (
                    placed(item.content, self._media.columns, self._media.marks)[0] if self._media else item.content
                )
                text, done = render_answer(marked, item.answer, self._tokenizer, **self._of_template)
            texts.append(text)
            ended.append(done)
        encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        end = self._tokenizer.eos_token_id
        if end is None and not all(ended):
            raise RunError(
                "the model's tokenizer has no end-of-sequence token, so nothing would end an answer: add one"
            )
        return [tokens if done else [*tokens, end] for tokens, done in zip(encoded, ended, strict=True)]

    def _check_room(self, index: int, prompt: int, answer: int) -> None:
        if prompt + answer > self._context:
            raise RunError(
                f"{self._where(index)}: the prompt has {prompt} tokens and its answer {answer} with the one that ends it, more "
                f"than the model's context of {self._context} together: shorten it or take it out"
            )

    def _check_length(self, index: int, length: int) -> None:
        if 0 < length <= self._longest:
            return
        why = (
            f"which leaves room for an answer in the model's context of {self._context}"
            if self._longest == self._context - 1
            else "its source's max_prompt_tokens"
        )
        key = f"{self.key}.too_long" if self._file else "the task's config"
        raise RunError(
            f"{self._where(index)}: the prompt has {length} tokens; it needs at least 1 and at most "
            f"{self._longest}, {why}: shorten it or take it out ({key} does it for all)"
        )

    def _where(self, index: int) -> str:
        return f"{self.key.replace('.', ' ')}, prompt {index} ({self._items.where(index)})"
