"""Processes in which rewards run that may raise, hang or crash: a pebble pool of light children.

Judge ──(source, prompt, answer)──► child: reward(prompt, answer) ──► (reward, extras) or what went wrong, as text
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any

from pebble import ProcessPool

from relax_hpc.parent import end_with
from relax_hpc.recipe.source import AnyPrompts
from relax_hpc.records import Prompt
from relax_hpc.rewards.load import LoadedReward, make_rewards

Outcome = tuple[float, dict[str, float]] | str
"""(reward, extras), or what went wrong: text, because an exception of the user's own may not unpickle."""
REASON_CHARACTERS = 1000
"""Kept of what a reward raised: it stands in the shard and in the ledger."""
_main_module = threading.Lock()
_rewards: list[LoadedReward] = []
"""In a child: the rewards of all sources."""


def make_pool(sources: Sequence[AnyPrompts], processes: int) -> ProcessPool:
    """A pool whose children have the sources' rewards loaded; run `judge_in_child` in it."""
    return ProcessPool(
        processes, initializer=_begin_child, initargs=(list(sources), os.getpid()), context=_LightContext()
    )


def judge_in_child(source: int, prompt: Prompt, answer: str) -> Outcome:
    """`judge` with the child's own copy of the source's reward."""
    return judge(_rewards[source], prompt, answer)


def judge(reward: LoadedReward, prompt: Prompt, answer: str) -> Outcome:
    """Call a reward, whatever it does."""
    try:
        return reward(prompt, answer)
    except Exception as error:  # a reward may do anything; the reason goes into its group
        said = f"{type(error).__name__}: {error}"[:REASON_CHARACTERS]
        return said.encode(errors="replace").decode()  # lone surrogates are in no file


def _begin_child(sources: Sequence[AnyPrompts], parent: int) -> None:
    # A reward in an endless loop never notices that its parent was killed; the kernel does.
    end_with(parent)
    _rewards[:] = make_rewards(sources)


class _LightProcess(SpawnProcess):
    """A spawned process that does not import its parent's main module (a role's imports torch: seconds and memory)."""

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        main = sys.modules["__main__"]
        with _main_module:
            spec = main.__spec__
            # multiprocessing.spawn leaves out the main module of a package, and judges by its name
            main.__spec__ = ModuleSpec("relax_hpc.__main__", None)
            try:
                return SpawnProcess._Popen(process_obj)
            finally:
                main.__spec__ = spec


class _LightContext(SpawnContext):
    Process = _LightProcess
