"""What environments with tools share.

the model's turn ──tool calls?──yes──► each tool's answer, or what was wrong, as a message ──► the next turn
                      └──no──► the final answer, which the source's reward scores
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from relax_hpc.environments.base import Message, Part, ToolError, Turn
from relax_hpc.environments.tools.calls import Call, CallError, parse_calls
from relax_hpc.records import Prompt

Schema = dict[str, Any]


def schema(name: str, about: str, **parameters: tuple[str, str]) -> Schema:
    """Make a tool's JSON schema; parameters: name -> (JSON type, description), all of them required."""
    properties = {key: {"type": kind, "description": text} for key, (kind, text) in parameters.items()}
    described = {"type": "object", "properties": properties, "required": [*parameters]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": described}}


class WithTools:
    """An environment whose tools are methods: a tool called NAME is the method `use_NAME`."""

    schemas: ClassVar[tuple[Schema, ...]]
    """The tools' JSON schemas, as chat templates and OpenAI's interface take them."""

    def tools(self) -> list[Schema]:
        """The tools that the model may call."""
        return [*self.schemas]

    def reset(self, prompt: Prompt) -> None:
        self.used = self.wrong = 0

    def step(self, answer: str) -> Turn:
        try:
            calls = parse_calls(answer)
        except CallError as error:
            self.wrong += 1
            return Turn(False, ToolError(str(error)).observation())
        if not calls:
            return self.ended(answer)
        return Turn(False, [self._answered(call) for call in calls])

    def ended(self, answer: str) -> Turn:
        """Say that the episode is over with this answer."""
        return Turn(True, extra=self.numbers(), answer=answer)

    def numbers(self) -> dict[str, float]:
        """Numbers for columns of the shard."""
        return {"tool_calls": self.used, "tool_errors": self.wrong}

    def close(self) -> None: ...

    def _answered(self, call: Call) -> Message:
        self.used += 1
        try:
            content = self._use(call)
        except ToolError as error:
            self.wrong += 1
            content = f"error: {error}"
        return {"role": "tool", "name": call.name, "content": content}

    def _use(self, call: Call) -> str | list[Part]:
        described = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in self.tools()}
        if call.name not in described:
            raise ToolError(f"there is no tool '{call.name}', only {', '.join(described)}")
        _check(call, described[call.name])
        content: str | list[Part] = getattr(self, f"use_{call.name}")(**call.arguments)
        return content


JSON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "array": (list,),
}


def _check(call: Call, properties: Mapping[str, Any]) -> None:
    if {*call.arguments} != {*properties}:
        raise ToolError(f"{call.name} takes {', '.join(properties)}, found {', '.join(call.arguments) or 'nothing'}")
    for name, value in call.arguments.items():
        kind = properties[name]["type"]
        if isinstance(value, bool) or not isinstance(value, JSON_TYPES[kind]):
            raise ToolError(f"{call.name}: '{name}' is a {kind}, found {value!r:.80}")
