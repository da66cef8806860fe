"""What an environment is: it answers the model's turns until it says done. One instance generates one sample."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from relax_hpc.records import Prompt


@dataclass(frozen=True, slots=True)
class Turn:
    """What the environment says to a turn of the model."""

    done: bool
    observation: str = ""
    """Text the model reads next; its tokens get loss mask 0."""
    reward: float | None = None
    """A reward of the environment's own; it takes the place of the source's reward function when it is given with `done`."""
    extra: dict[str, float] = field(default_factory=dict)
    """Numbers for columns of the shard, with `done`."""


class Environment(Protocol):
    """Fill this to add an environment.

    It lives in a process of its own kind, with a time limit for each call; it may raise: the group is then kept as failed, with the
    reason. Where another environment's hang costs it its process, a new one is shown the same prompt and answers once more.
    """

    def reset(self, prompt: Prompt) -> None:
        """Begin with this prompt (the model has seen its tokens)."""
        ...

    def step(self, answer: str) -> Turn:
        """The model said `answer`."""
        ...

    def close(self) -> None:
        """Free what it holds; called whatever happened."""
        ...
