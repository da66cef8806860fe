"""Processes in which rewards run that may raise, hang or crash: a pebble pool of light children.

Judge ──(source, prompt, answer)──► child: reward(prompt, answer) ──► (reward, extras) or what went wrong, as text
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from pebble import ProcessPool

from relax_hpc.parent import LightContext, end_with
from relax_hpc.recipe.source import AnyPrompts
from relax_hpc.records import Prompt
from relax_hpc.registry import WrongValue, said
from relax_hpc.rewards.load import LoadedReward, make_rewards

Outcome = tuple[float, dict[str, float]] | tuple[str, str]
"""(reward, extras), or what went wrong, in general and in this case: text, because an exception of the user's own may not unpickle."""
_rewards: list[LoadedReward] = []
"""In a child: the rewards of all sources."""


def make_pool(sources: Sequence[AnyPrompts], processes: int) -> ProcessPool:
    """A pool whose children have the sources' rewards loaded; run `judge_in_child` in it."""
    return ProcessPool(
        processes, initializer=_begin_child, initargs=(list(sources), os.getpid()), context=LightContext()
    )


def judge_in_child(source: int, prompt: Prompt, answer: str) -> Outcome:
    """`judge` with the child's own copy of the source's reward."""
    return judge(_rewards[source], prompt, answer)


def judge(reward: LoadedReward, prompt: Prompt, answer: str) -> Outcome:
    """Call a reward, whatever it does."""
    try:
        return reward(prompt, answer)
    except WrongValue as error:
        return "returned a wrong value", str(error)
    except Exception as error:  # a reward may do anything; the reason goes into its group
        return f"raised {type(error).__name__}", said(error, behind=2)


def _begin_child(sources: Sequence[AnyPrompts], parent: int) -> None:
    # A reward in an endless loop never notices that its parent was killed; the kernel does.
    end_with(parent)
    _rewards[:] = make_rewards(sources)
