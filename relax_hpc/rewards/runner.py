"""Scoring of many samples: quick rewards in this process, all others in a pool of processes with a time limit for each
call."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeGuard

from pebble import ProcessExpired, ProcessPool

from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Failure, Prompt
from relax_hpc.rewards.load import make_rewards
from relax_hpc.rewards.pool import Outcome, call_reward, make_pool, score_in_child

BROKE = ("broke the pool of its processes", "")
_HEARTBEAT_S = 0.5
"""Seconds between two calls of `progress` while rewards run."""


@dataclass(frozen=True, slots=True)
class Score:
    """A reward function's result for one sample."""

    reward: float
    extra: dict[str, float]


class RewardRunner:
    """Runs the rewards of a recipe's sources. Raises RunError or RegistryError for one that cannot be used."""

    def __init__(self, recipe: Recipe) -> None:
        self._sources, self._limit_s = recipe.sources, recipe.rollout.reward_time_limit_s
        self._processes = recipe.rollout.processes
        self._rewards = make_rewards(recipe.sources)
        self._pool: ProcessPool | None = None
        self.seconds = 0.0
        """Seconds that all calls of `score` took."""

    def score(
        self,
        samples: Sequence[tuple[Prompt, str]],
        progress: Callable[[], None] = lambda: None,
        groups: Sequence[int] = (),
    ) -> list[Score | Failure]:
        """Score every (prompt, answer); returns a score or a failure for each, in their order.

        groups: the group of each sample. As soon as a sample fails, its group is scored no further, and all of the
        group has that failure. By default each sample is a group. `progress` is called at least twice a second, however
        long the rewards take.
        """
        began = time.perf_counter()
        batch = _Batch(list(groups) or [*range(len(samples))])
        left = []
        for i in batch.fairly():
            prompt, answer = samples[i]
            reward = self._rewards[prompt.source]
            if not reward.is_quick:
                left.append(i)
            elif batch.open(i):
                batch.settle(i, self._verdict(prompt, call_reward(reward, prompt, [answer])[0]))
                progress()
        # A child that dies between two samples breaks its pool; what is left is tried once more, in a new one.
        for _ in range(2):
            self._in_pool(samples, [i for i in left if batch.open(i)], batch, progress)
        for i in left:
            if batch.open(i):
                batch.settle(i, self._verdict(samples[i][0], BROKE))
        self.seconds += time.perf_counter() - began
        return batch.verdicts()

    def is_quick(self, source: int) -> bool:
        """Return True where a source's reward looks at the answer's text alone."""
        return self._rewards[source].is_quick

    def warm_up(self, progress: Callable[[], None] = lambda: None) -> None:
        """Start the processes now, so that no request waits for their Python; for as long as one reward may take."""
        if all(reward.is_quick for reward in self._rewards):
            return
        self._pool = make_pool(self._sources, self._processes)
        until = time.monotonic() + self._limit_s
        with contextlib.suppress(RuntimeError):  # raised by pebble where the pool broke: the first score meets it again
            ready = [self._pool.schedule(os.getpid) for _ in range(self._processes)]
            while wait(ready, _HEARTBEAT_S).not_done and self._pool.active and time.monotonic() < until:
                progress()

    def close(self) -> None:
        """Stop the processes, also in the middle of a reward."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _in_pool(
        self, samples: Sequence[tuple[Prompt, str]], left: Sequence[int], batch: _Batch, progress: Callable[[], None]
    ) -> None:
        """Score the samples `left` side by side; those that were under way when the pool broke stay open."""
        if not left:
            return
        if self._pool is not None and not self._pool.active:
            self.close()
        if self._pool is None:
            self._pool = make_pool(self._sources, self._processes)
        ended = SimpleQueue[int]()
        futures: dict[int, Future[list[Outcome]]] = {}
        calls = self._calls(samples, left, batch)
        try:
            for first, call in calls.items():
                prompt, answers = samples[first][0], [samples[i][1] for i in call]
                futures[first] = self._pool.schedule(
                    score_in_child, args=(prompt.source, prompt, answers), timeout=self._limit_s
                )
                futures[first].add_done_callback(lambda _, first=first: ended.put(first))  # type: ignore[misc]
        except RuntimeError:  # raised by pebble when the pool broke a moment ago
            return
        pending = set(calls)
        while pending and (self._pool.active or not ended.empty()):
            try:
                first = ended.get(timeout=_HEARTBEAT_S)
            except Empty:
                progress()
                continue
            progress()
            pending.discard(first)
            outcomes = [] if futures[first].cancelled() else self._outcomes(futures[first], len(calls[first]))
            for i, outcome in zip(calls[first], outcomes, strict=False):  # none where the pool broke
                if batch.open(i):
                    batch.settle(i, self._verdict(samples[i][0], outcome))
            for other in [k for k in pending if not batch.open(k)] if any(map(_failed, outcomes)) else ():
                pending.discard(other)
                futures[other].cancel()  # one that runs is killed

    def _calls(self, samples: Sequence[tuple[Prompt, str]], left: Sequence[int], batch: _Batch) -> dict[int, list[int]]:
        """First sample -> samples of its call: itself, or its group where the reward takes a group at once."""
        calls: dict[int, list[int]] = {}
        firsts: dict[int, int] = {}
        for i in left:
            first = firsts.setdefault(batch.group(i), i) if self._rewards[samples[i][0].source].is_batch else i
            calls.setdefault(first, []).append(i)
        return calls

    def _outcomes(self, future: Future[list[Outcome]], count: int) -> list[Outcome]:
        """The outcome of each sample of a call; empty where the pool broke."""
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, BrokenProcessPool):
            return []
        failure = f"raised {type(error).__name__}", str(error)
        if isinstance(error, TimeoutError):
            failure = f"took longer than {self._limit_s:g} s (rollout.reward_time_limit_s)", ""
        elif isinstance(error, ProcessExpired):
            failure = f"died with exit status {error.exitcode}", ""
        return [failure] * count

    def _verdict(self, prompt: Prompt, outcome: Outcome) -> Score | Failure:
        if not _failed(outcome):
            return Score(*outcome)
        what, detail = outcome
        return Failure.of(prompt, f"reward '{self._rewards[prompt.source].name}' {what}", detail)


class _Batch:
    """Samples that are scored together, and their verdicts."""

    def __init__(self, groups: list[int]) -> None:
        self._groups = groups
        self._verdicts: dict[int, Score | Failure] = {}
        self._failed: dict[int, Failure] = {}

    def fairly(self) -> list[int]:
        """The order of scoring: one of each group in turn, so that a group whose rewards hang holds up no other."""
        seen = Counter[int]()
        turns = []
        for i, group in enumerate(self._groups):
            turns.append((seen[group], i))
            seen[group] += 1
        return [i for _, i in sorted(turns)]

    def group(self, i: int) -> int:
        return self._groups[i]

    def open(self, i: int) -> bool:
        """Return True if a sample is still to be scored."""
        return i not in self._verdicts and self._groups[i] not in self._failed

    def settle(self, i: int, verdict: Score | Failure) -> None:
        self._verdicts[i] = verdict
        if isinstance(verdict, Failure):
            self._failed[self._groups[i]] = verdict

    def verdicts(self) -> list[Score | Failure]:
        return [self._failed.get(group) or self._verdicts[i] for i, group in enumerate(self._groups)]


def _failed(outcome: Outcome) -> TypeGuard[tuple[str, str]]:
    return isinstance(outcome[0], str)
