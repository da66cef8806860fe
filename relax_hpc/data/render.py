"""Rendering: content ──chat template──► text ──tokenizer──► tokens; and what stands behind the words that a model has said.

    template(… + assistant's words + MARK + new messages) ──behind MARK──► end-of-turn token … next generation prompt

Words that were sampled are never encoded again. A template that shows them otherwise once more has been said (some leave
out old thinking) is found by what stands before MARK.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_hpc.recipe.tables.source import MODALITIES


MARK = "relaxhpcendsaying"
CALL_ID = "000000000"
"""Identifies a tool's answer where the environment gave none; some templates want nine characters."""
Message = Mapping[str, Any]


class ContentError(Exception):
    """A prompt's content cannot become text. The message says why; the caller adds where."""


def render(content: Any, tokenizer: Any, **options: Any) -> tuple[str, bool]:
    """Render a prompt's content as text; returns (text, is_chat). is_chat: the chat template made it, special tokens
    included; `options` are further arguments of it.

    Raises ContentError for content that is neither text nor chat messages of text, and where there is no chat template.
    """
    if isinstance(content, str):
        return content, False
    if not isinstance(content, list) or not content or not all(isinstance(m, dict) for m in content):
        raise ContentError(f"a prompt is text or a list of chat messages, found {str(content)[:80]!r}")
    if not getattr(tokenizer, "chat_template", None):
        raise ContentError(
            "the prompt is a list of chat messages, but the model's tokenizer has no chat template: "
            "give the prompt as text, or use a model with a chat template"
        )
    messages = [message_of(message) for message in content]
    return through_template(messages, tokenizer, add_generation_prompt=True, **options), True


def render_answer(content: Any, answer: str, tokenizer: Any, **options: Any) -> tuple[str, bool]:
    """Render `answer` as it follows the rendered `content`; returns (text, True where the chat template ended it).

    A template that continues its own generation prompt says how it ends a message, and what it puts before it (such as
    an empty thought); otherwise the text is the answer alone. Raises ContentError as `render` does.
    """
    prompt, is_chat = render(content, tokenizer, **options)
    if not is_chat:
        return answer, False
    messages = [*(message_of(message) for message in content), {"role": "assistant", "content": answer}]
    whole = through_template(messages, tokenizer, **options)
    said = whole.removeprefix(prompt).rstrip()
    if not whole.startswith(prompt) or said.endswith(answer.rstrip()):
        return answer, False
    return said, True


def through_template(messages: Sequence[Mapping[str, Any]], tokenizer: Any, **options: Any) -> str:
    """Render messages by the model's chat template. Raises ContentError where it refuses them."""
    try:
        return str(tokenizer.apply_chat_template([*messages], tokenize=False, **options))
    except Exception as error:  # a template is a program of the model's: some refuse a role, or an order of roles
        roles = [str(message["role"]) for message in messages]
        raise ContentError(f"the model's chat template refuses messages of the roles {roles}: {error}") from error


def message_of(message: dict[str, Any]) -> dict[str, Any]:
    """A chat message with its content as one text, or as parts where it shows something; fields that a Parquet struct
    holds as null are left out."""
    if "role" not in message or message.get("content") is None:
        raise ContentError(f"a chat message needs 'role' and 'content', found {sorted(message)}")
    content = message["content"]
    if isinstance(content, list):
        kinds = {str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in content}
        if other := sorted(kinds - {"text", *MODALITIES}):
            raise ContentError(
                f"parts of type {other} are not known in prompts: they are 'text' or of {list(MODALITIES)}"
            )
        if kinds <= {"text"}:
            content = "".join(str(part["text"]) for part in content)
    return {**{k: v for k, v in message.items() if v is not None}, "content": content}


@dataclass(frozen=True, slots=True)
class NextTurn:
    """The text between a turn of the model and its next one."""

    text: str
    """It begins with the token that ends the turn before."""
    rewritten: bool
    """True where the template now shows the model's words, or what was before them, otherwise than the model saw them."""


def rendered_turn(
    tokenizer: Any,
    before: Sequence[Message],
    new: Sequence[Message],
    tools: Sequence[Any] = (),
    options: Mapping[str, Any] | None = None,
) -> NextTurn:
    """Render the messages that follow an assistant's turn.

    tools: JSON schemas. before: the conversation; its last message is the assistant's, with the turn's own text as content. options: further
    arguments of the chat template. Raises ContentError where the template refuses them, or leaves the turn out.
    """
    named = {"tools": list(tools) or None, **(options or {})}
    said = str(before[-1]["content"])
    marked = [*before[:-1], {**before[-1], "content": said + MARK}, *map(_identified, new)]
    whole = through_template(marked, tokenizer, add_generation_prompt=True, **named)
    shown, found, text = whole.rpartition(MARK)
    if not found:
        raise ContentError("the model's chat template leaves out what the assistant said before the new messages")
    seen = through_template(before[:-1], tokenizer, add_generation_prompt=True, **named) + said
    return NextTurn(text, _letters(shown) != _letters(seen))


def after_dummy(said: str) -> list[Message]:
    """A conversation whose last turn is `said`: templates render what follows it by the last messages alone."""
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]


def _identified(message: Message) -> Message:
    if message["role"] != "tool":
        return message
    return {"tool_call_id": CALL_ID, **message}


def _letters(text: str) -> str:
    """Leave out white space, which templates strip at the ends of messages."""
    return "".join(text.split())
