"""Chat messages ──the model's chat template──► tokens: a whole history, or what follows a turn that the model said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_hpc.data.render import ContentError, rendered_turn, through_template
from relax_hpc.environments.tools import Call, CallError, parse_calls
from relax_hpc.environments.tools.calls import HERMES, LLAMA, MISTRAL
from relax_hpc.gateway.messages import Message
from relax_hpc.gateway.refusals import Refusal

Tokens = NDArray[np.int32]


class Renderer:
    """Renders messages with a chat template. It has a tokenizer of its own: another thread may use the worker's."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def whole(self, messages: Sequence[Message], tools: Any, options: Mapping[str, Any]) -> Tokens:
        """Return the tokens of a history, up to where the model speaks. Raises Refusal."""
        self._require_template()
        shown = {"tools": list(tools) or None, **options}
        try:
            return self._encode(through_template(messages, self.tokenizer, add_generation_prompt=True, **shown))
        except ContentError as error:
            raise Refusal(str(error), param="messages") from error

    def after(
        self, said: Tokens, before: Sequence[Message], new: Sequence[Message], tools: Any, options: Mapping[str, Any]
    ) -> Tokens | None:
        """Return what follows the tokens of the model's last turn: the rest of the turn's end, the new messages, up to where
        it speaks again. None where the template now shows the history otherwise than the model saw it. Raises Refusal.

        before: the history, whose last message is that turn.
        """
        self._require_template()
        last = {"role": "assistant", "content": self._decode(self._without_end(said), special=True)}
        try:
            turn = rendered_turn(self.tokenizer, [*before[:-1], last], new, tools, options)
        except ContentError as error:
            raise Refusal(str(error), param="messages") from error
        if turn.rewritten:
            return None
        tokens = self._encode(turn.text)
        return tokens[1:] if len(said) and len(tokens) and said[-1] == tokens[0] else tokens

    def text(self, said: Tokens, stop: Sequence[str] = ()) -> str:
        """Return what the model said as text, up to a stop string."""
        text = self._decode(said, special=False)
        return text[: min([at for s in stop if (at := text.find(s)) >= 0], default=len(text))]

    def calls(self, said: Tokens, text: str) -> tuple[str, list[Call]]:
        """Split what the model said into the text before its calls of tools, and these. Calls that cannot be read stay
        text."""
        words = self._decode(self._without_end(said), special=True)
        try:
            found = parse_calls(words)
        except CallError:
            return text, []
        if not found:
            return text, []
        begin = min([at for mark in (HERMES, MISTRAL, LLAMA) if (at := words.find(mark)) >= 0], default=0)
        return words[:begin].strip(), found

    def _require_template(self) -> None:
        if not getattr(self.tokenizer, "chat_template", None):
            raise Refusal(
                "the model's tokenizer has no chat template: use a model with one, or speak tokens to /inference/v1/generate"
            )

    def _without_end(self, said: Tokens) -> Tokens:
        """Leave out the token that ended the turn."""
        return said[:-1] if len(said) and int(said[-1]) in self.tokenizer.all_special_ids else said

    def _decode(self, tokens: Tokens, special: bool) -> str:
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=not special))

    def _encode(self, text: str) -> Tokens:
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int32)
