"""What environments show ──► tokens that continue a sample, and its media.

    text ────────────────────────────────────────────────► tokens as they are
    parts with images, video or sound ──the processor────► tokens and tensors
    chat messages ──template, behind the model's words────► from the end-of-turn token on ──► the same

Tokens and tensors that are there already are never made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from relax_hpc.data.parts import filled, observed, placed
from relax_hpc.data.render import ContentError, after_dummy, rendered_turn
from relax_hpc.media.process import Processor
from relax_hpc.media.values import MediaError
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Media

CUTS = 3
"""Times that a long observation is cut: a shorter text may have more tokens than was reckoned."""
Shown = tuple[list[int], Media | None]


class UnusableObservation(Exception):
    """An observation that cannot be shown to the model. The message says why."""


class Observations:
    """Makes tokens and media of observations, by the model's tokenizer and processor."""

    def __init__(self, tokenizer: Any, processor: Processor, recipe: Recipe) -> None:
        self._tokenizer, self._processor, self._sources = tokenizer, processor, recipe.sources
        self._cuts = recipe.rollout.long_observation == "cut"
        self._refuses = recipe.rollout.rewritten_history == "refuse"

    def fitting(self, observation: Any, source: int, said: NDArray[Any], room: int) -> Shown:
        """Return the observation's tokens and what it shows, cut to `room` tokens where the recipe cuts and that can be
        done. said: the model's turn before it. Raises UnusableObservation."""
        tokens, shown = self.tokens(observation, source, said)
        for _ in range(CUTS if self._cuts else 0):
            if len(tokens) <= room:
                break
            observation = self._cut(observation, len(tokens) - room)
            tokens, shown = self.tokens(observation, source, said)
        return tokens, shown

    def tokens(self, observation: Any, source: int, said: NDArray[Any]) -> Shown:
        """Return the observation's tokens, and what it shows. Raises UnusableObservation."""
        try:
            if _is_messages(observation) and getattr(self._tokenizer, "chat_template", None):
                return self._messages(observation, source, said)
            if _is_messages(observation):
                observation = "\n".join(str(message["content"]) for message in observation) + "\n"
            return self._encode(*observed(observation, self._processor.family.marks))
        except (ContentError, MediaError) as error:
            raise UnusableObservation(str(error)) from error

    def joined(self, before: Media | None, added: Media) -> Media:
        """Return the media of a sample that shows `added` after all that it showed before."""
        return added if before is None else Media.of(self._processor.family.joined([before, added]))

    def _messages(self, messages: Sequence[dict[str, Any]], source: int, said: NDArray[Any]) -> Shown:
        """Render chat messages behind the model's turn; the token that ended the turn is there already."""
        last = int(said[-1]) if len(said) else None
        ended = last in self._tokenizer.all_special_ids
        words = self._tokenizer.decode(said[: len(said) - ended].tolist(), skip_special_tokens=False)
        asked = self._sources[source]
        content, places = placed(list(messages), (), self._processor.family.marks)
        turn = rendered_turn(self._tokenizer, after_dummy(words), content, asked.tools, asked.template_options)
        if turn.rewritten and self._refuses:
            raise ContentError(
                "the model's chat template shows what the model said otherwise once more was said (such as without its thinking), so that the "
                'model would not see the tokens that it sampled; with rollout.rewritten_history = "keep" these are kept'
            )
        tokens, shown = self._encode(turn.text, filled(places, {}, {}))
        return (tokens[1:] if tokens and tokens[0] == last else tokens), shown

    def _encode(self, text: str, cells: list[Any]) -> Shown:
        if not cells:
            plain: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
            return plain, None
        tokens, media = self._processor.tokens(text, cells, Path(), special=False)
        return tokens.tolist(), media

    def _cut(self, observation: Any, excess: int) -> Any:
        """Leave out the last `excess` tokens of an observation's longest text; other things are left as they are."""
        if isinstance(observation, str):
            kept = self._tokenizer.encode(observation, add_special_tokens=False)[:-excess]
            return str(self._tokenizer.decode(kept, skip_special_tokens=False))
        key = "content" if _is_messages(observation) else "text"
        texts = [item.get(key) if isinstance(item.get(key), str) else "" for item in observation]
        longest = max(range(len(texts)), key=lambda i: len(texts[i]))
        return [*observation[:longest], {**observation[longest], key: self._cut(texts[longest], excess)}, *observation[longest + 1 :]] if texts[longest] else observation  # fmt: skip


def _is_messages(observation: Any) -> bool:
    return not isinstance(observation, str) and all("role" in item for item in observation)
