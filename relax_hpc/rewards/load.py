"""Loading of rewards: from a recipe's `reward = NAME` to a function, checked before anything starts."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relax_hpc.files.errors import RunError
from relax_hpc.recipe.tables.source import AnyPrompts, TaskPrompts, keys_of
from relax_hpc.records import Prompt
from relax_hpc.registry import WrongValue, check_call, resolve, shown
from relax_hpc.rewards.base import BATCH, Reward, parts
from relax_hpc.rewards.exact import exact
from relax_hpc.rewards.tags import multiple_choice

QUICK = {"exact": exact, "multiple_choice": multiple_choice}
BY_MATH_VERIFY = {"math": "equivalent", "geo3k": "geo3k", "openr1mm": "openr1mm"}
"""Name -> the function of relax_hpc.rewards.math, whose library is imported where it is needed only."""
BUILT_IN = (*QUICK, *BY_MATH_VERIFY, "reasoning_gym")


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A source's reward, ready to be called."""

    name: str
    function: Reward
    options: dict[str, Any]
    is_quick: bool
    """True for a reward that is pure and quick, whatever the answer: it needs no process of its own."""

    @property
    def is_batch(self) -> bool:
        """True where the reward takes the answers of a group at once."""
        return getattr(self.function, BATCH, False) is True

    def __call__(self, prompt: Prompt, answers: Sequence[str]) -> list[tuple[float, dict[str, float]]]:
        """(reward, extras) for each answer. Raises what the reward raises, and WrongValue for what is not finite."""
        if not self.is_batch:
            return [parts(self._call(prompt, answer)) for answer in answers]
        values = self._call(prompt, list(answers))
        if not isinstance(values, list | tuple) or len(values) != len(answers):
            raise WrongValue(
                f"returned {shown(values)}, expected a list with one value for each of {len(answers)} answers"
            )
        return [parts(value) for value in values]

    def _call(self, prompt: Prompt, what: str | list[str]) -> Any:
        value = self.function(prompt, what, **self.options)
        return _runner().run(value) if inspect.iscoroutine(value) else value


@functools.cache
def _runner() -> asyncio.Runner:
    """The event loop for all calls in this process: things that a reward keeps, such as connections, belong to a loop."""
    return asyncio.Runner()


def make_rewards(sources: Sequence[AnyPrompts]) -> list[LoadedReward]:
    """Load the reward of every source. Raises RunError or RegistryError for one that cannot be used."""
    return [_load(key, source) for key, source in zip(keys_of(sources), sources, strict=True)]


def _load(key: str, source: AnyPrompts) -> LoadedReward:
    function, is_quick = _function(key, source)
    check_call("reward", source.reward, function, "prompt", "answer", **source.reward_options)
    return LoadedReward(source.reward, function, source.reward_options, is_quick)


def _function(key: str, source: AnyPrompts) -> tuple[Reward, bool]:
    if source.reward == "reasoning_gym":
        if not isinstance(source, TaskPrompts):
            raise RunError(f"{key}.reward = 'reasoning_gym': only a source with a `task` has its verifier")
        from relax_hpc.rewards.reasoning_gym import Verifier

        verifier = Verifier(source)
        return verifier, verifier.is_quick
    if source.reward in BUILT_IN and not getattr(source, "answer_key", "answer"):
        raise RunError(f"{key}.reward = '{source.reward}' compares with an answer, but answer_key is empty")
    if source.reward in QUICK:
        return QUICK[source.reward], True
    if source.reward in BY_MATH_VERIFY:
        import relax_hpc.rewards.math as by_math_verify

        return getattr(by_math_verify, BY_MATH_VERIFY[source.reward]), False
    return resolve("reward", source.reward, dict.fromkeys(BUILT_IN)), False
