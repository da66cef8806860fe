"""Rendering of prompts: content ──chat template──► text ──tokenizer──► tokens."""

from __future__ import annotations

from typing import Any

from relax_hpc.recipe.tables.source import MODALITIES


class ContentError(Exception):
    """A prompt's content cannot become text. The message says why; the caller adds where."""


def render(content: Any, tokenizer: Any) -> tuple[str, bool]:
    """Render a prompt's content as text; returns (text, is_chat). is_chat: the chat template made it, special tokens
    included.

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
    return _through_template(messages, tokenizer, add_generation_prompt=True), True


def render_answer(content: Any, answer: str, tokenizer: Any) -> tuple[str, bool]:
    """Render `answer` as it follows the rendered `content`; returns (text, True where the chat template ended it).

    A template that continues its own generation prompt says how it ends a message, and what it puts before it (such as
    an empty thought); otherwise the text is the answer alone. Raises ContentError as `render` does.
    """
    prompt, is_chat = render(content, tokenizer)
    if not is_chat:
        return answer, False
    messages = [*(message_of(message) for message in content), {"role": "assistant", "content": answer}]
    whole = _through_template(messages, tokenizer)
    said = whole.removeprefix(prompt).rstrip()
    if not whole.startswith(prompt) or said.endswith(answer.rstrip()):
        return answer, False
    return said, True


def _through_template(messages: list[dict[str, Any]], tokenizer: Any, **options: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
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
