"""What a reward is: a function of a prompt and an answer's text."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

from relax_hpc.records import Prompt

Reward = Callable[..., "float | dict[str, float]"]
"""reward(prompt, answer, **options) -> a number, or {"reward": …, other names: numbers} (they become `extra` columns).

`prompt`: relax_hpc.records.Prompt; `answer`: the model's text. `options` are the recipe's `reward_options`.
It runs in a process of its own, with a time limit; it may raise: the group is then kept as failed, with the reason.
"""


def parts(value: float | dict[str, float]) -> tuple[float, dict[str, float]]:
    """(reward, extras) of what a reward returned. Raises ValueError for anything that is not a finite number."""
    if not isinstance(value, dict):
        return _number("the reward", value), {}
    if "reward" not in value:
        raise ValueError(f"returned {{{', '.join(map(repr, value))}}}, expected a number or a dict with 'reward'")
    extras = {str(name): _number(f"'{name}'", number) for name, number in value.items() if name != "reward"}
    return _number("'reward'", value["reward"]), extras


def _number(name: str, value: object) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"returned {value!r} ({type(value).__name__}) as {name}, expected a finite number")
    return float(value)


def example(prompt: Prompt, answer: str, **options: object) -> float:
    """The shape of a reward: 1.0 when the answer is the reference, to the letter."""
    return float(answer == prompt.answer)
