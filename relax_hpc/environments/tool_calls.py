"""Calls of tools in a model's text, as Qwen3 and Hermes write them: <tool_call>{"name": …, "arguments": {…}}</tool_call>."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from relax_hpc.environments.base import ToolError

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool's name and what the model gives it."""

    name: str
    arguments: dict[str, Any]


def tool_calls(text: str) -> list[Call]:
    """Read the calls in a model's text, in their order. Raises ToolError, for the model, where one is not JSON or lacks a
    name."""
    calls = []
    for said in _CALL.findall(text):
        try:
            call = json.loads(said)
        except ValueError as error:
            raise ToolError(f"the tool call is not JSON: {error}") from error
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ToolError('a tool call needs a "name": {"name": …, "arguments": {…}}')
        arguments = call.get("arguments", {})
        if not isinstance(arguments, dict):
            raise ToolError('the "arguments" of a tool call are an object: {"name": …, "arguments": {…}}')
        calls.append(Call(call["name"], arguments))
    return calls
