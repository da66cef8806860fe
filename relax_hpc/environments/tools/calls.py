"""Tool calls in a model's text, in the formats that model families are trained on.

    Hermes, Qwen    <tool_call>{"name": …, "arguments": {…}}</tool_call>, once a call
    Mistral         [TOOL_CALLS][{"name": …, "arguments": {…}}, …], or [TOOL_CALLS]NAME[ARGS]{…}
    Llama 3         <|python_tag|>{"name": …, "parameters": {…}}; …

Some of these marks are special tokens, which an environment's answer comes without: the JSON alone is recognized too. The
servers' parsers are made for streams, and bring a server along; transformers' needs a template that few models have.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

HERMES, MISTRAL, MISTRAL_ARGUMENTS, LLAMA = "<tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"
_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|$)", re.DOTALL)
_NAMED = re.compile(r"\s*([\w.-]+)\s*\[ARGS\]")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool."""

    name: str
    arguments: dict[str, Any]


class CallError(ValueError):
    """A call that does not parse. The message is made for the model to read."""


def parse_calls(text: str) -> list[Call]:
    """Return the tool calls in an answer, in their order; none where it has none. Raises CallError for a broken one."""
    if HERMES in text:
        return [_call(_json(body)) for body in _HERMES.findall(text)]
    if MISTRAL in text:
        return _mistral(text.split(MISTRAL)[1:])
    bare = text.split(LLAMA)[-1].strip()
    if LLAMA in text:
        return [_call(value) for value in _several(bare)]
    try:  # without marks it is a call only if nothing else is there
        values = _several(bare) if bare[:1] in "{[" and bare else []
        return [_call(value) for value in values]
    except CallError:
        return []


def _mistral(bodies: list[str]) -> list[Call]:
    calls = []
    for body in bodies:
        if named := _NAMED.match(body):
            calls.append(_call({"name": named[1], "arguments": _json(body[named.end() :])}))
        else:
            calls += [_call(value) for value in _several(body.strip())]
    return calls


def _several(text: str) -> list[Any]:
    """Decode a JSON list, or JSON values with semicolons between them."""
    values, rest = [], text
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
        except ValueError as error:
            raise _broken(rest, error) from error
        values += value if isinstance(value, list) else [value]
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return values


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _broken(text, error) from error


def _broken(text: str, error: ValueError) -> CallError:
    return CallError(f"the tool call is not JSON ({error}): {text.strip()[:80]}")


def _call(value: Any) -> Call:
    """Check a decoded call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise CallError(f'a tool call is {{"name": …, "arguments": {{…}}}}, found {json.dumps(value)[:80]}')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        raise CallError(f"the arguments of a tool call are an object, found {json.dumps(arguments)[:80]}")
    return Call(value["name"], arguments)
