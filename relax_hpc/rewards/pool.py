"""Processes for rewards, which may raise, hang or crash: a pebble pool of light children.

RewardRunner ──(source, prompt, answer)──► child: reward(prompt, answer) ──► (reward, extras), or the error as text
"""

from __future__ import annotations

import asyncio
import itertools
import os
import traceback
from collections.abc import Sequence
from pathlib import Path

from pebble import ProcessPool

import relax_hpc.rewards.load as load
from relax_hpc.parent import LightContext, end_with
from relax_hpc.recipe.tables.source import AnyPrompts
from relax_hpc.records import Prompt
from relax_hpc.registry import WrongValue, said
from relax_hpc.rewards.load import LoadedReward, make_rewards

Outcome = tuple[float, dict[str, float]] | tuple[str, str]
"""(reward, extras), or the error as text (in general, in this case): a user's own exception may not unpickle."""
_CALLERS = (__file__, load.__file__, str(Path(asyncio.__file__).parent))
"""Files through which a reward is called: their frames are not the user's."""
_rewards: list[LoadedReward] = []
"""In a child process: the rewards of all sources."""


def make_pool(sources: Sequence[AnyPrompts], processes: int) -> ProcessPool:
    """Make a pool whose children have the sources' rewards loaded; run `score_in_child` in it."""
    return ProcessPool(
        processes, initializer=_begin_child, initargs=(list(sources), os.getpid()), context=LightContext()
    )


def score_in_child(source: int, prompt: Prompt, answers: Sequence[str]) -> list[Outcome]:
    """Run `call_reward` with the child's own copy of the source's reward."""
    return call_reward(_rewards[source], prompt, answers)


def call_reward(reward: LoadedReward, prompt: Prompt, answers: Sequence[str]) -> list[Outcome]:
    """Call a reward, whatever it does; returns the outcome of each answer. An error counts for all of them."""
    try:
        return [*reward(prompt, answers)]
    except WrongValue as error:
        return [("returned a wrong value", str(error))] * len(answers)
    except Exception as error:  # a reward may do anything; the reason goes into its group
        return [(f"raised {type(error).__name__}", said(error, _behind(error)))] * len(answers)


def _behind(error: Exception) -> int:
    """Count the frames between `call_reward` and the reward's own; an event loop adds some."""
    frames = traceback.extract_tb(error.__traceback__)
    return sum(1 for _ in itertools.takewhile(lambda frame: frame.filename.startswith(_CALLERS), frames))


def _begin_child(sources: Sequence[AnyPrompts], parent: int) -> None:
    # A reward in an endless loop never notices that its parent was killed; the kernel does.
    end_with(parent)
    _rewards[:] = make_rewards(sources)
