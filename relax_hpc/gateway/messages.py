"""Chat messages as agents send them ──► messages for the chat template, and fingerprints that recognize a history."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import xxhash

from relax_hpc.gateway.refusals import Refusal

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
TEMPLATE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id")


def for_template(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages as a chat template reads them: contents are texts, arguments of calls are objects. Raises
    Refusal."""
    if not messages:
        raise Refusal("messages is empty: send at least one", param="messages")
    return [_for_template(message, f"messages.{i}") for i, message in enumerate(messages)]


def _for_template(message: Mapping[str, Any], where: str) -> Message:
    role = {"developer": "system"}.get(str(message.get("role")), message.get("role"))
    if role not in ROLES:
        raise Refusal(f"{where}.role = {role!r} is not known: use one of {', '.join(ROLES)}", param=f"{where}.role")
    found = {key: message[key] for key in TEMPLATE_KEYS if message.get(key) is not None}
    found |= {"role": role, "content": text_of(message.get("content"), f"{where}.content")}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call(call, f"{where}.tool_calls.{i}") for i, call in enumerate(calls)]
    return found


def _call(call: Mapping[str, Any], where: str) -> Message:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refusal(f"{where} is no call of a function: it needs function.name and function.arguments", param=where)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise Refusal(f"{where}.function.arguments is not JSON: {arguments[:80]!r}", param=where) from None
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def text_of(content: Any, where: str) -> str:
    """Return a message's content as one text. Raises Refusal for parts that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text", "output_text"):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise Refusal(f"{where} has a part of type {kind!r}: the gateway takes text only", param=where)
        texts.append(str(part.get("text", "")))
    return "".join(texts)


def fingerprints(messages: Sequence[Message], about: object) -> Iterator[str]:
    """Return for each message a fingerprint of the history that ends with it. about: what else decides how a history is
    rendered, such as the tools.

    An assistant's message counts by its text without surrounding blanks, and its calls by name and arguments: harnesses
    strip texts, write JSON anew and rename calls.
    """
    chain = xxhash.xxh3_128(json.dumps(about, sort_keys=True).encode())
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        said = message["content"].strip() if message["role"] == "assistant" else message["content"]
        chain.update(json.dumps([message["role"], said, calls], sort_keys=True).encode())
        yield chain.hexdigest()
