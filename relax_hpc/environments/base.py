"""The interface of an environment: it answers the model's turns until it says done. One instance serves one sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from relax_hpc.records import Prompt

Message = Mapping[str, Any]
"""A chat message: {"role": "tool", "content": …}; its content is text, or parts."""
Part = Mapping[str, Any]
"""A part of content: {"type": "text", "text": …}, or {"type": "image", "image": …}, "video" or "audio", each with a value as a
data set has it: bytes, a path, base64, frames, samples with their rate."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The environment's answer to a turn of the model."""

    done: bool
    observation: str | Sequence[Part] | Sequence[Message] = ""
    """Text that the model reads next as it is, or parts with images, video or sound; or chat messages, which the chat template
    renders. Its tokens get loss mask 0."""
    reward: float | None = None
    """A reward of the environment's own for this turn; the sample's is the sum of its turns'. On the last turn it takes the
    place of the source's reward function."""
    extra: dict[str, float] = field(default_factory=dict)
    """Numbers for columns of the shard, given with `done`."""
    answer: str | None = None
    """The answer that the source's reward scores where the sample ends here; None: the turn's text where the environment has
    tools, else all that the model said in all turns."""


class ToolError(Exception):
    """Raised by `step` where a tool fails in a way that the model is to read: the message becomes the tool's answer."""

    def observation(self) -> list[Message]:
        return [{"role": "tool", "content": f"error: {self}"}]


class Environment(Protocol):
    """The interface to fill to add an environment.

    It lives in a process apart, which it may share with others, with a time limit for each call; it may raise: the
    sample is then kept as failed, with the reason. When another environment hangs and the shared process is killed, a
    new instance is shown the same prompt and answers once more.

    It may have `tools(self) -> list`, called before `reset`: JSON schemas, or functions with type hints and a docstring, which
    the chat template shows the model. It may have `state(self)` and `restore(self, prompt, state)`: a new instance is then
    restored, in place of reset and steps; states are of JSON values and bytes, asked for after each step.

    `reset`, `step`, `close` may be `async def`: many such environments then work side by side in one process.
    """

    def reset(self, prompt: Prompt) -> None:
        """Begin with this prompt, whose tokens the model has seen."""
        ...

    def step(self, answer: str) -> Turn:
        """Answer the model's turn `answer`. Raises ToolError for what the model is to read as a tool's failure."""
        ...

    def close(self) -> None:
        """Free what the environment holds; called in any case, also after errors."""
        ...
