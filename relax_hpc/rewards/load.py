"""Loading of rewards: from a recipe's `reward = NAME` to a function, checked before anything starts."""

from __future__ import annotations

import asyncio
import functools
import importlib
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
from relax_hpc.rewards.hub.answers import dapo, f1, gpqa
from relax_hpc.rewards.hub.composed import Part, WeightedSum
from relax_hpc.rewards.hub.form import length
from relax_hpc.rewards.tags import multiple_choice

QUICK: dict[str, Reward] = {
    "exact": exact, "multiple_choice": multiple_choice, "dapo": dapo, "gpqa": gpqa, "f1": f1, "length": length,
}  # fmt: skip
ELSEWHERE = {
    "math": "math:equivalent", "geo3k": "math:geo3k", "openr1mm": "math:openr1mm", "deepscaler": "math:deepscaler",
    "ifeval": "hub.instructions:ifeval", "format": "hub.form:of_format", "remote": "hub.remote:remote",
    "code": "hub.code:code",
}  # fmt: skip
"""Name -> MODULE:FUNCTION within relax_hpc.rewards. They may take long, or need a library that only they import."""
BUILT_IN = (*QUICK, *ELSEWHERE, "reasoning_gym")
NO_REFERENCE = frozenset({"ifeval", "format", "length", "remote", "code"})
"""Those that need no reference answer."""


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
    if not source.rewards:
        return _load_one(key, source, source.reward, source.reward_options)
    loaded = [_load_one(f"{key}.rewards.{i}", source, p.reward, p.options) for i, p in enumerate(source.rewards)]
    parts = [Part(p.name or p.reward, p.weight, one, p.kind) for p, one in zip(source.rewards, loaded, strict=True)]
    name = " + ".join(part.name for part in parts)
    return LoadedReward(name, WeightedSum(parts, source.reward_column), {}, all(one.is_quick for one in loaded))


def _load_one(key: str, source: AnyPrompts, name: str, options: dict[str, Any]) -> LoadedReward:
    function, is_quick = _function(key, source, name)
    check_call("reward", name, function, "prompt", "answer", **options)
    return LoadedReward(name, function, options, is_quick)


def _function(key: str, source: AnyPrompts, name: str) -> tuple[Reward, bool]:
    if name == "reasoning_gym":
        if not isinstance(source, TaskPrompts):
            raise RunError(f"{key}.reward = 'reasoning_gym': only a source with a `task` has its verifier")
        from relax_hpc.rewards.reasoning_gym import Verifier

        verifier = Verifier(source)
        return verifier, verifier.is_quick
    if name in BUILT_IN and name not in NO_REFERENCE and not getattr(source, "answer_key", "answer"):
        raise RunError(f"{key}.reward = '{name}' compares with an answer, but answer_key is empty")
    if name in QUICK:
        return QUICK[name], True
    if name in ELSEWHERE:
        module, _, attribute = ELSEWHERE[name].partition(":")
        return getattr(importlib.import_module(f"relax_hpc.rewards.{module}"), attribute), False
    return resolve("reward", name, dict.fromkeys(BUILT_IN)), False
