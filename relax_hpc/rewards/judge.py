"""Scores many samples: quick rewards here, all others in a pool of processes with a time limit for each sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from pebble import ProcessExpired, ProcessPool

from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Prompt
from relax_hpc.rewards.load import make_rewards
from relax_hpc.rewards.pool import Outcome, judge, judge_in_child, make_pool

LEAST_PROCESSES = 2
"""One reward that hangs must not hold up all others."""
_BEAT_S = 0.5
"""How often `progress` is called while rewards run."""


@dataclass(frozen=True, slots=True)
class Score:
    """What a reward said about a sample."""

    reward: float
    extra: dict[str, float]


@dataclass(frozen=True, slots=True)
class Failure:
    """A reward that did not give a finite number; its group is kept as failed with this reason."""

    reason: str


class Judge:
    """The rewards of a recipe's sources.

    Raises RunError or RegistryError at construction for a reward that does not load or does not fit its signature.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._sources, self._limit_s = recipe.sources, recipe.rollout.reward_time_limit_s
        self._processes = max(LEAST_PROCESSES, recipe.rollout.threads)
        self._rewards = make_rewards(recipe.sources)
        self._pool: ProcessPool | None = None
        self.seconds = 0.0
        """What all calls of `score` took."""

    def score(
        self, samples: Sequence[tuple[Prompt, str]], progress: Callable[[], None] = lambda: None
    ) -> list[Score | Failure]:
        """A score or a failure for every (prompt, answer), in their order.

        `progress` is called at least twice a second, however long the rewards take.
        """
        began = time.perf_counter()
        verdicts: list[Score | Failure | None] = [None] * len(samples)
        left = []
        for i, (prompt, answer) in enumerate(samples):
            reward = self._rewards[prompt.source]
            if reward.is_quick:
                verdicts[i] = self._verdict(prompt, judge(reward, prompt, answer))
                progress()
            else:
                left.append(i)
        # A child that dies between two samples breaks its pool; what is left is tried once more, in a new one.
        for _ in range(2):
            outcomes = self._in_pool([samples[i] for i in left], progress)
            for i, outcome in zip(left, outcomes, strict=True):
                verdicts[i] = self._verdict(samples[i][0], outcome or "the pool of reward processes broke")
            left = [i for i, outcome in zip(left, outcomes, strict=True) if outcome is None]
        self.seconds += time.perf_counter() - began
        return [verdict for verdict in verdicts if verdict is not None]

    def close(self) -> None:
        """Stop the processes, also those in the middle of a reward."""
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            self._pool.join()
            self._pool = None

    def _in_pool(self, samples: Sequence[tuple[Prompt, str]], progress: Callable[[], None]) -> list[Outcome | None]:
        """What became of each sample; None where the pool broke before it was done."""
        if not samples:
            return []
        if self._pool is not None and not self._pool.active:
            self.close()
        if self._pool is None:
            self._pool = make_pool(self._sources, self._processes)
        try:
            futures = [
                self._pool.schedule(judge_in_child, args=(prompt.source, prompt, answer), timeout=self._limit_s)
                for prompt, answer in samples
            ]
        except RuntimeError:  # what pebble raises when the pool broke a moment ago
            return [None] * len(samples)
        while wait(futures, timeout=_BEAT_S).not_done and self._pool.active:
            progress()
        return [self._outcome(future) if future.done() else None for future in futures]

    def _outcome(self, future: Future[Outcome]) -> Outcome | None:
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, BrokenProcessPool):
            return None
        if isinstance(error, TimeoutError):
            return f"took longer than {self._limit_s:g} s (rollout.reward_time_limit_s)"
        if isinstance(error, ProcessExpired):
            return f"its process died with exit status {error.exitcode}"
        return f"{type(error).__name__}: {error}"

    def _verdict(self, prompt: Prompt, result: Outcome) -> Score | Failure:
        if not isinstance(result, str):
            return Score(*result)
        name = self._rewards[prompt.source].name
        return Failure(f"reward '{name}' on source {prompt.source}, prompt {prompt.index}: {result}")
