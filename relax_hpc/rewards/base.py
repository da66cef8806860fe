"""What a reward is: a function of a prompt and an answer's text."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from numbers import Real

import numpy as np

from relax_hpc.records import Prompt
from relax_hpc.registry import shown

Reward = Callable[..., "float | dict[str, float]"]
"""reward(prompt, answer, **options) -> a number, or {"reward": …, other names: numbers} (they become `extra` columns).

`prompt`: relax_hpc.records.Prompt; `answer`: the model's text. `options` are the recipe's `reward_options`.
It runs in a process of its own, with a time limit; it may raise: the group is then kept as failed, with the reason.
"""


def parts(value: object) -> tuple[float, dict[str, float]]:
    """(reward, extras) of what a reward returned. Raises ValueError for anything else than finite numbers under names of columns."""
    if not isinstance(value, dict):
        return _number("the reward", value), {}
    if "reward" not in value:
        raise ValueError(f"returned a dict of {shown(list(value))}, expected a number or a dict with 'reward'")
    return _number("'reward'", value["reward"]), {
        _name(name): _number(f"'{name}'", number) for name, number in value.items() if name != "reward"
    }


def _number(name: str, value: object) -> float:
    if isinstance(value, Real):
        with np.errstate(over="ignore"), contextlib.suppress(OverflowError):
            if np.isfinite(np.float32(value)):
                return float(value)
    raise ValueError(f"returned {shown(value)} as {name}, expected a finite number (of 32 bits)")


def _name(name: object) -> str:
    # It becomes an HDF5 dataset in a shard, and a column of tables.
    if isinstance(name, str) and name.isprintable() and name.strip(".") and "/" not in name:
        return name
    raise ValueError(f"returned a value under the name {shown(name)}, expected printable text without '/'")


def example(prompt: Prompt, answer: str, **options: object) -> float:
    """The shape of a reward: 1.0 when the answer is the reference, to the letter."""
    return float(answer == prompt.answer)
