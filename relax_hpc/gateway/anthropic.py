"""Anthropic's messages: a body ──Messages──► Call; Turn ──► the reply, whole or as events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from relax_hpc.gateway.messages import text_of
from relax_hpc.gateway.openai import MODEL, Request, check_model
from relax_hpc.gateway.refusals import Refusal, unsupported
from relax_hpc.gateway.sessions import Call, Turn


class Messages(Request):
    """The body of /v1/messages."""

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int = Field(ge=1)
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    # of no effect here: the recipe's sampling holds
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None


class Anthropic:
    """Translates messages."""

    def call(self, body: Mapping[str, Any]) -> Call:
        """Read a body. Raises Refusal."""
        asked: Messages = Messages.read(body)
        check_model(asked.model)
        choice = (asked.tool_choice or {}).get("type", "auto")
        if choice not in ("auto", "none"):
            raise unsupported(
                "tool_choice", asked.tool_choice, "the model decides; use {'type': 'auto'} or {'type': 'none'}"
            )
        if (asked.thinking or {}).get("type", "disabled") != "disabled":
            raise unsupported("thinking", asked.thinking, "leave it out; the model's chat template decides")
        messages: list[dict[str, Any]] = []
        if asked.system:
            messages.append({"role": "system", "content": text_of(asked.system, "system")})
        for i, message in enumerate(asked.messages):
            messages += _messages(message, f"messages.{i}")
        tools = [] if choice == "none" else [_tool(tool, f"tools.{i}") for i, tool in enumerate(asked.tools or ())]
        stop = tuple(asked.stop_sequences or ())
        return Call(messages, tools=tools, max_tokens=asked.max_tokens, stop=stop, stream=bool(asked.stream))

    def reply(self, call: Call, turn: Turn, words: list[str]) -> dict[str, Any]:
        """The whole reply."""
        return {**_about(turn), "content": _blocks(turn), "stop_reason": _stopped(turn), "stop_sequence": None}

    def events(self, call: Call, turn: Turn, words: list[str]) -> Iterator[str]:
        """The reply as events: each block comes in one piece, when the answer has ended."""
        begun = {**_about(turn), "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message=begun)
        for i, block in enumerate(_blocks(turn)):
            if block["type"] == "text":
                empty: dict[str, Any] = {"type": "text", "text": ""}
                delta = {"type": "text_delta", "text": block["text"]}
            else:
                empty = block | {"input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield _event("content_block_start", index=i, content_block=empty)
            yield _event("content_block_delta", index=i, delta=delta)
            yield _event("content_block_stop", index=i)
        ended = {"stop_reason": _stopped(turn), "stop_sequence": None}
        yield _event("message_delta", delta=ended, usage={"output_tokens": len(turn.said.tokens)})
        yield _event("message_stop")

    def error(self, refusal: Refusal) -> dict[str, Any]:
        return refusal.anthropic()

    def error_event(self, refusal: Refusal) -> str:
        return _event("error", error=refusal.anthropic()["error"])


def _event(kind: str, **data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n"


def _about(turn: Turn) -> dict[str, Any]:
    tokens = {"input_tokens": turn.context, "output_tokens": len(turn.said.tokens)}
    return {"id": f"msg_{turn.id}", "type": "message", "role": "assistant", "model": MODEL, "usage": tokens}


def _stopped(turn: Turn) -> str:
    return "tool_use" if turn.calls else "max_tokens" if turn.cut else "end_turn"


def _blocks(turn: Turn) -> list[dict[str, Any]]:
    text = [{"type": "text", "text": turn.text}] if turn.text or not turn.calls else []
    calls = [
        {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": call["function"]["arguments"]}
        for call in turn.calls
    ]
    return text + calls


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if "input_schema" not in tool or tool.get("type", "custom") != "custom":
        raise unsupported(where, tool.get("type"), "give tools of your own, with name and input_schema")
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _messages(message: Mapping[str, Any], where: str) -> Sequence[dict[str, Any]]:
    """Return a message as OpenAI writes it: results of tools are messages of their own, before the rest."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return [{"role": message.get("role"), "content": content}]
    texts, calls, results = list[Mapping[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    for block in content:
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = text_of(block.get("content"), f"{where}.content")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result})
        else:
            texts.append(block)
    rest = {"role": message.get("role"), "content": text_of(texts, f"{where}.content")}
    if calls:
        rest["tool_calls"] = calls
    return [*results, *([rest] if texts or calls or not results else [])]
