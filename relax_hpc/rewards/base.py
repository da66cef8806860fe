"""The interface of a reward: a function of a prompt and an answer's text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_hpc.records import Media
from relax_hpc.registry import WrongValue, finite_number, finite_numbers, shown

BATCH = "batch"
"""Attribute of a reward function: True where it takes all answers of a group at once, and returns a list."""
Reward = Callable[..., Any]
"""reward(prompt, answer, **options) -> a number, or {"reward": …, other names: numbers} (they become `extra` columns).

It may be `async def`. If its attribute `batch` is True it is called as (prompt, answers, **options), and returns a list
of such values. `prompt`: relax_hpc.records.Prompt; `answer`: a Trajectory, which is the model's text. `options` are the recipe's
`reward_options`. It runs in a process of its own, with a time limit; it may raise: the group is then kept as failed,
with the reason.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """A turn of the model, and what its environment answered."""

    said: str
    calls: Sequence[Mapping[str, Any]]
    """Tool calls in it, {"name": …, "arguments": {…}}; none where one of them is broken."""
    observation: str | Sequence[Mapping[str, Any]]
    reward: float | None


class Trajectory(str):
    """A sample's answer, as text; it knows all that led to it."""

    turns: Sequence[Step] = ()
    media: Media | None = None
    """All that the sample shows, its prompt's media first."""

    @classmethod
    def of(cls, answer: str, turns: Sequence[Step], media: Media | None) -> Trajectory:
        """Make one of an answer and what led to it."""
        made = cls(answer)
        made.turns, made.media = turns, media
        return made


def parts(value: object) -> tuple[float, dict[str, float]]:
    """Split a reward's return value into (reward, extras). Raises WrongValue unless these are finite numbers, the
    extras under names that columns may have."""
    if not isinstance(value, dict):
        return finite_number("the reward", value), {}
    if "reward" not in value:
        raise WrongValue(f"returned a dict of {shown(list(value))}, expected a number or a dict with 'reward'")
    extras = finite_numbers({name: number for name, number in value.items() if name != "reward"})
    return finite_number("'reward'", value["reward"]), extras
