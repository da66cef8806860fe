"""OpenAI's chat completions: a body ──Chat──► Call; Turn ──► the reply, whole or as events of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from relax_hpc.gateway.refusals import Refusal, unsupported
from relax_hpc.gateway.sessions import Call, Turn

MODEL = "policy"
"""The one model that is served."""
SAMPLED = "rollout.temperature, top_p and top_k of the recipe hold, whatever is sent: the loss is of that distribution"


class Request(BaseModel):
    """What all APIs share: unknown arguments are refused by name, values are converted only where nothing is lost."""

    model_config = ConfigDict(extra="forbid")

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Any:
        """Check a body. Raises Refusal, which names the first argument that is wrong."""
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            if first["type"] == "extra_forbidden":
                raise unsupported(name, first["input"], "leave it out") from error
            raise Refusal(f"{name}: {first['msg']}, found {str(first['input'])[:80]!r}", param=name) from error


def check_model(name: str) -> None:
    """Raise Refusal unless the policy is asked for."""
    if name != MODEL:
        raise Refusal(
            f"there is no model '{name}': use model = '{MODEL}' ($RELAX_HPC_MODEL), the policy that is trained", 404, "model",
            "model_not_found",
        )  # fmt: skip


class StreamOptions(BaseModel):
    include_usage: bool = False


class Chat(Request):
    """The body of /v1/chat/completions."""

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: Literal[True] | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    n: Literal[1] | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # of no effect here: SAMPLED
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    # of no effect anywhere but in OpenAI's own service
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class OpenAI:
    """Translates chat completions."""

    def call(self, body: Mapping[str, Any]) -> Call:
        """Read a body. Raises Refusal."""
        asked: Chat = Chat.read(body)
        check_model(asked.model)
        if asked.tool_choice not in (None, "auto", "none"):
            raise unsupported("tool_choice", asked.tool_choice, "the model decides; use 'auto' or 'none'")
        if asked.response_format and asked.response_format.get("type") != "text":
            raise unsupported("response_format", asked.response_format, "ask for the format in the messages")
        stop = (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop or ())
        return Call(
            messages=asked.messages,
            tools=(asked.tools or ()) if asked.tool_choice != "none" else (),
            options=asked.chat_template_kwargs or {},
            max_tokens=asked.max_completion_tokens or asked.max_tokens,
            stop=stop,
            seed=asked.seed,
            stream=bool(asked.stream),
            logprobs=bool(asked.logprobs),
            usage=bool(asked.stream_options and asked.stream_options.include_usage),
        )

    def reply(self, call: Call, turn: Turn, words: list[str]) -> dict[str, Any]:
        """The whole reply. words: the text of each token."""
        message: dict[str, Any] = {
            "role": "assistant",
            "content": turn.text or (None if turn.calls else ""),
            "refusal": None,
        }
        if turn.calls:
            message["tool_calls"] = [_call(call) for call in turn.calls]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": _finish(turn),
            "logprobs": _logprobs(call, turn, words),
        }
        return {**_about(turn, "chat.completion"), "choices": [choice], "usage": usage(turn)}

    def events(self, call: Call, turn: Turn, words: list[str]) -> Iterator[str]:
        """The reply as events: the answer comes in one piece, when it has ended."""
        delta: dict[str, Any] = {"role": "assistant", "content": turn.text}
        if turn.calls:
            delta["tool_calls"] = [{"index": i, **_call(call)} for i, call in enumerate(turn.calls)]
        about = _about(turn, "chat.completion.chunk")
        first = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": _logprobs(call, turn, words)}
        last = {"index": 0, "delta": {}, "finish_reason": _finish(turn), "logprobs": None}
        chunks: list[dict[str, Any]] = [{**about, "choices": [first]}, {**about, "choices": [last]}]
        if call.usage:
            chunks.append({**about, "choices": [], "usage": usage(turn)})
        for chunk in chunks:
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    def error(self, refusal: Refusal) -> dict[str, Any]:
        return refusal.openai()

    def error_event(self, refusal: Refusal) -> str:
        return f"data: {json.dumps(refusal.openai())}\n\n"


def models(context: int) -> dict[str, Any]:
    """The reply of /v1/models."""
    one = {"id": MODEL, "object": "model", "created": 0, "owned_by": "relax_hpc", "max_model_len": context}
    return {"object": "list", "data": [one]}


def usage(turn: Turn) -> dict[str, int]:
    said = len(turn.said.tokens)
    return {"prompt_tokens": turn.context, "completion_tokens": said, "total_tokens": turn.context + said}


def _about(turn: Turn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.id}", "object": kind, "created": turn.created, "model": MODEL}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}


def _finish(turn: Turn) -> str:
    return "tool_calls" if turn.calls else "length" if turn.cut else "stop"


def _logprobs(call: Call, turn: Turn, words: list[str]) -> dict[str, Any] | None:
    if not call.logprobs:
        return None
    content = [
        {"token": word, "logprob": float(logprob), "bytes": list(word.encode()), "top_logprobs": []}
        for word, logprob in zip(words, turn.said.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}
