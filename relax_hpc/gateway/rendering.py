"""Chat messages ──the model's chat template──► tokens: a whole history, or what follows a turn that the model said."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_hpc.gateway.messages import Message
from relax_hpc.gateway.refusals import Refusal

_SAID = "relaxhpcsaid"
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


class Renderer:
    """Renders messages with a chat template. It has a tokenizer of its own: another thread may use the worker's."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def whole(self, messages: Sequence[Message], tools: Any, options: Mapping[str, Any]) -> NDArray[np.int32]:
        """Return the tokens of a history, up to where the model speaks. Raises Refusal."""
        return self._encode(self._text(messages, tools, options, speaks=True))

    def after(
        self, said: NDArray[np.int32], new: Sequence[Message], tools: Any, options: Mapping[str, Any]
    ) -> NDArray[np.int32]:
        """Return what follows tokens that the model said: the rest of its turn's end, the new messages, up to where it
        speaks again. Raises Refusal."""
        call = [{"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {}}}]
        answers = bool(new) and new[0]["role"] == "tool"
        spoke: Message = {"role": "assistant", "content": _SAID} | ({"tool_calls": call} if answers else {})
        before: list[Message] = [{"role": "user", "content": "?"}, spoke]
        bare = self._text(before, tools, options, speaks=False)
        text = self._text([*before, *new], tools, options, speaks=True)
        head, mark, rest = text.partition(_SAID)
        if answers:  # what ends the dummy's turn stands behind its call
            end = bare[len(head) + len(mark) :].rfind(self._end())
            rest = rest[max(end, 0) :]
        if not mark:
            raise Refusal("the model's chat template does not show what the model said: it cannot be continued")
        tokens = self._encode(rest)
        return tokens[1:] if len(said) and len(tokens) and said[-1] == tokens[0] else tokens

    def _end(self) -> str:
        return str(self.tokenizer.eos_token)

    def _text(self, messages: Sequence[Message], tools: Any, options: Mapping[str, Any], speaks: bool) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise Refusal(
                "the model's tokenizer has no chat template: use a model with one, or speak tokens to /inference/v1/generate"
            )
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tools=tools or None, tokenize=False, add_generation_prompt=speaks, **options
                )
            )
        except Exception as error:  # a template is a program of the model's
            roles = [message["role"] for message in messages]
            raise Refusal(f"the model's chat template refuses messages of the roles {roles}: {error}") from error

    def _encode(self, text: str) -> NDArray[np.int32]:
        return np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int32)

    def text(self, tokens: NDArray[np.int32], stop: Sequence[str] = ()) -> str:
        """Return what the model said as text, up to a stop string."""
        text = str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))
        return text[: min([at for s in stop if (at := text.find(s)) >= 0], default=len(text))]

    def calls(self, text: str) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        """Split what the model said into its text and its calls of tools. A call that cannot be read stays text."""
        found = []
        for match in _CALL.finditer(text):
            try:
                call = json.loads(match[1])
                found.append((str(call["name"]), dict(call.get("arguments") or {})))
            except (ValueError, KeyError, TypeError):
                return text, []
        return (_CALL.sub("", text).strip(), found) if found else (text, [])
