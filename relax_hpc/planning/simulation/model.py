"""The simulation: simulated time, a simulated trainer, and the real request planner.

    trainer   choose (RequestPlanner) ► train ► publish ► apply, release (RequestPlanner) ► a checkpoint each N steps
              fault: restart, then every step since the checkpoint again, without waiting for data
    workers   rollouts.py

Answers to the same prompts have the same lengths, whichever worker generates them and however often: a request that was
given back, or that replaces a dropped one, takes as long again. Two simulations that differ in workers, staleness or
faults see the same requests.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import numpy as np
import simpy

from relax_hpc.files.errors import RunError
from relax_hpc.planning.simulation.file_calls import pauses
from relax_hpc.planning.simulation.rollouts import Rollouts, Work
from relax_hpc.planning.simulation.setup import Prompts, Setup, Spans, Trace
from relax_hpc.planning.simulation.times import Times
from relax_hpc.spool.planner import MAX_DROPS, Choice, RequestPlanner
from relax_hpc.spool.queue import LOOK_AT_STARTS_S
from relax_hpc.spool.request import Request

VAIN_FAULTS = 100
"""Faults of the trainer without a new checkpoint, after which the simulation gives up hope of one."""


class Simulation:
    """One run in simulated time."""

    def __init__(self, setup: Setup, times: Times) -> None:
        self.setup, self.times, self.env, self.trace = setup, times, simpy.Environment(), Trace()
        work, steps, faults, looks = (np.random.default_rng(s) for s in np.random.SeedSequence(setup.seed).spawn(4))
        self._work_rng, self._fault_rng, self._look_rng = work, faults, looks
        self._train, self._publish = times.steps(steps, setup.steps)
        self.planner = RequestPlanner(
            n=setup.requests_per_step, groups_per_request=setup.groups_per_request, samples_per_prompt=setup.samples_per_prompt,
            max_staleness=setup.max_staleness, on_stale=setup.on_stale, seed=setup.seed, cursor=Prompts(),
            ahead=setup.max_staleness, batches=setup.steps,
        )  # fmt: skip
        self.rollouts = Rollouts(self.env, setup, times, self.trace, (faults, looks), self._generated, self._tell)
        self.drawn: dict[str, tuple[float, float]] = {}
        """Request -> (seconds, tokens), of outstanding requests."""
        self.complete: dict[str, Spans] = {}
        self.first: dict[str, int] = {}
        """Complete request -> the version that began it: the planner asks for it."""
        self._news = self.env.event()
        self._looked_at_starts = float("-inf")

    def run(self) -> Trace:
        """Run to the end of the last step. Raises RunError where faults come faster than checkpoints."""
        trainer = self.env.process(self._train_all())
        if self.setup.trainer_mtbf_s < float("inf"):
            self.env.process(self._trainer_faults(trainer))
        self.env.run(until=trainer)
        self.trace.idle_s = self.rollouts.idle_s()
        return self.trace

    def _release(self, upto: int) -> None:
        """Release batches of requests, and draw what each will take."""
        requests = self.planner.release(upto)
        if requests:
            seconds, tokens = self.times.requests.draw(self._work_rng, len(requests))
            self._put(requests, zip(seconds.tolist(), tokens.tolist(), strict=True))

    def _put(self, requests: list[Request], drawn: Iterable[tuple[float, float]]) -> None:
        found = dict(zip((request.id for request in requests), drawn, strict=True))
        self.drawn |= found
        oldest = {request.id: request.min_version for request in requests}
        self.rollouts.put(oldest, {request_id: seconds for request_id, (seconds, _) in found.items()})

    def _generated(self, request_id: str, spans: Spans) -> None:
        """Note that a request's shard is published."""
        if request_id in self.planner.outstanding:  # else it was dropped meanwhile
            self.complete[request_id], self.first[request_id] = spans, spans.versions[0]
            self._tell()

    def _train_all(self) -> Work:
        setup, times = self.setup, self.times
        at = made = saved = vain = 0
        choice: Choice | None = None
        self._release(self.planner.last_batch(0))
        while at < setup.steps:
            try:
                if at < made:
                    yield from self._spend("lost", self._train[at])
                else:
                    choice = choice or (yield from self._take(at))
                    yield from self._spend("work", self._train[at] + self._publish[at])
                    self._settle(at, choice)
                    choice, made = None, made + 1
                at += 1
                if at % setup.checkpoint_every == 0 and at > saved:
                    yield from self._spend("checkpoint", times.checkpoint_s)
                    saved, vain = at, 0
            except simpy.Interrupt:
                vain, at = vain + 1, saved
                while not (yield from self._restarted()):
                    vain += 1
                    self._check(vain)
                self._check(vain)

    def _check(self, vain: int) -> None:
        """Raise RunError when there were too many faults since the last checkpoint."""
        if vain > VAIN_FAULTS:
            raise RunError(
                f"no checkpoint in {vain} faults of the trainer, one each {self.setup.trainer_mtbf_s:.0f} s on average (--mtbf over "
                f"its nodes): a restart takes {self.times.restart_s:.0f} s (--restart-s), and there are run.checkpoint_every = "
                f"{self.setup.checkpoint_every} steps between checkpoints: lower one of them"
            )

    def _spend(self, on: str, seconds: float) -> Work:
        """Let `seconds` pass on `on`; where a fault cuts the work off, it is lost."""
        began = self.env.now
        try:
            yield self.env.timeout(seconds)
        except simpy.Interrupt:
            self.trace.trainer_s["lost"] += self.env.now - began
            raise
        self.trace.trainer_s[on] += seconds

    def _restarted(self) -> Generator[simpy.Event, Any, bool]:
        try:
            yield from self._spend("lost", self.times.restart_s)
        except simpy.Interrupt:
            return False
        return True

    def _trainer_faults(self, trainer: simpy.Process) -> Work:
        while trainer.is_alive:
            yield self.env.timeout(self._fault_rng.exponential(self.setup.trainer_mtbf_s))
            self.trace.trainer_faults += 1
            trainer.interrupt()

    def _take(self, step: int) -> Generator[simpy.Event, Any, Choice]:
        """Wait for the requests that `step` takes, as roles.training.batch_scheduler does."""
        began = self.env.now
        longest_s = pauses(1)[1][-1]
        try:
            while (choice := (yield from self._choose(step))) is None:
                self._news = self.env.event()
                yield self._news
                yield self.env.timeout(longest_s * self._look_rng.random())
            return choice
        finally:
            self.trace.trainer_s["wait"] += self.env.now - began

    def _choose(self, step: int) -> Generator[simpy.Event, Any, Choice | None]:
        if len(self.first) < self.planner.n or self._held_up(step):
            return None
        choice = self.planner.choose(step, self.first, {})
        if choice is None or choice.drop:  # something unfinished seems due: look when it was started
            yield self.env.timeout(max(self._looked_at_starts + LOOK_AT_STARTS_S - self.env.now, 0.0))
            self._looked_at_starts = self.env.now
            choice = self.planner.choose(step, self.first, self.rollouts.in_progress())
        return choice

    def _held_up(self, step: int) -> bool:
        """True if a request in progress is known to be due, so that the slower planner need not be asked."""
        version, requests = step - self.planner.max_staleness, self.planner.outstanding
        due = (i for i, started in self.rollouts.started.items() if started == version and i in requests)
        if self.setup.on_stale == "drop":
            return any(requests[i].drops >= MAX_DROPS for i in due)
        return self.setup.on_stale == "wait" and any(True for _ in due)

    def _settle(self, step: int, choice: Choice) -> None:
        """Publish the version of a step that is made, apply its choice to the planner, and release further requests."""
        self.rollouts.announce()
        self.trace.ended_s.append(self.env.now)
        self.trace.ledger.append((choice.take, choice.drop))
        for request_id in choice.take:
            self._account(step, self.complete[request_id], self.drawn[request_id][1])
        again = [self.drawn[request_id] for request_id in choice.drop]
        for request_id in (*choice.take, *choice.drop):
            self.complete.pop(request_id, None)
            self.first.pop(request_id, None)
            del self.drawn[request_id]
        self.rollouts.withdraw(choice.drop)
        self._put(self.planner.apply(step, choice.take, choice.drop), again)  # the same prompts: they take as long
        self._release(self.planner.last_batch(step + 1))

    def _account(self, step: int, spans: Spans, tokens: float) -> None:
        """Record what `step` trains on of a request: all, or what is within the bound if async.on_stale = "mask"."""
        oldest = step - self.planner.max_staleness if self.setup.on_stale == "mask" else 0
        inside = [v for v, share in zip(*spans, strict=True) if v >= oldest and share > 0]
        masked = sum(share for v, share in zip(*spans, strict=True) if v < oldest)
        self.trace.tokens += tokens
        self.trace.masked_tokens += tokens * masked
        if inside:
            self.trace.ages.append(step - inside[0])

    def _tell(self) -> None:
        """Wake a waiting trainer: a request is complete, or is open again and holds nothing up any more."""
        if not self._news.triggered:
            self._news.succeed()
