"""The simulation itself: simulated time, simulated workers and trainer, and the real book of orders.

    trainer   choose (OrderBook) ► train ► publish ► apply, release (OrderBook) ► a checkpoint each N steps
              fault: restart, then every step since the checkpoint again, without waiting for data
    workers   claim the first open order by name ► take the newest weights ► play ► publish the shard, and claim again
              fault of their node: orders are open again once it counts as lost; the node comes back

Who waits looks as often as spool.watch lets it. Answers of an order have the same lengths whoever plays it, and however
often; two simulations that differ in workers, staleness or faults see the same orders.
"""

from __future__ import annotations

import bisect
import functools
import heapq
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import simpy

from relax_hpc.launch.simulation.file_calls import pauses
from relax_hpc.launch.simulation.times import Times
from relax_hpc.run_dir import RunError
from relax_hpc.spool.orders import MAX_DROPS, Choice, Order, OrderBook

Late = Literal["wait", "drop", "mask"]
LOOK_AT_STARTS_S = 0.1
"""As in roles.intake."""
VAIN_FAULTS = 100
"""Faults of the trainer without a new checkpoint, after which it is clear that there will be none."""
Work = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True)
class Setup:
    """What is simulated."""

    workers: int
    workers_per_node: int
    max_staleness: int
    late: Late
    orders_per_step: int
    groups_per_order: int
    copies: int
    """Samples a group."""
    steps: int
    checkpoint_every: int
    trainer_mtbf_s: float = float("inf")
    """Of all its nodes together."""
    node_mtbf_s: float = float("inf")
    """Of each rollout node."""
    seed: int = 0

    @property
    def nodes(self) -> int:
        """Rollout nodes."""
        return -(-self.workers // self.workers_per_node)


class Prompt(NamedTuple):
    source: int
    index: int


class Prompts:
    """A cursor that never ends: prompt i is (0, i)."""

    def __init__(self) -> None:
        self.position = 0

    def take(self, count: int) -> list[Prompt]:
        self.position += count
        return [Prompt(0, i) for i in range(self.position - count, self.position)]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Spans(NamedTuple):
    """Of an order that was played: the versions that made it, oldest first, and the share of its tokens that each made."""

    versions: tuple[int, ...]
    shares: tuple[float, ...]


@dataclass(eq=False, slots=True)
class Worker:
    node: int
    held: int = -1
    """Its version of the weights."""
    order: str | None = None
    wake: simpy.Event | None = None
    """While it waits for an order."""
    waits_since: float = 0.0
    idle_s: float = 0.0
    process: simpy.Process | None = None


@dataclass(slots=True)
class Trace:
    """What happened."""

    ledger: list[tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)
    """Of each step: the orders it took, those it dropped."""
    ended_s: list[float] = field(default_factory=list)
    """When each step was made, for the first time."""
    ages: list[int] = field(default_factory=list)
    """Of each order that was taken: the step less the oldest version in the loss."""
    tokens: float = 0.0
    """Generated, of orders that were taken."""
    masked_tokens: float = 0.0
    trainer_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("wait", "work", "checkpoint", "lost"), 0.0))
    """Where its time went; `lost` is restarts, steps that a fault cut off, and repeated ones."""
    idle_s: float = 0.0
    """Of all workers together."""
    trainer_faults: int = 0
    node_faults: int = 0
    orders_played: int = 0


class Simulation:
    """One run in simulated time."""

    def __init__(self, setup: Setup, times: Times) -> None:
        self.setup, self.times, self.env, self.trace = setup, times, simpy.Environment(), Trace()
        work, steps, replaced, faults, looks = (
            np.random.default_rng(s) for s in np.random.SeedSequence(setup.seed).spawn(5)
        )
        self._work_rng, self._replaced_rng, self._fault_rng, self._look_rng = work, replaced, faults, looks
        self._train, self._publish = times.steps(steps, setup.steps)
        self.book = OrderBook(
            n=setup.orders_per_step, groups_per_order=setup.groups_per_order, copies=setup.copies,
            max_staleness=setup.max_staleness, late=setup.late, seed=setup.seed, cursor=Prompts(),
            ahead=setup.max_staleness, batches=setup.steps,
        )  # fmt: skip
        self.version = 0
        self._published_at = [0.0]
        """When each version was there."""
        self._open: dict[str, int] = {}
        """Oldest version that each open order may start from."""
        self._by_name: list[str] = []
        """A heap of open orders; some are claimed or withdrawn."""
        self._work: dict[str, tuple[float, float]] = {}
        """Seconds and tokens of orders that nobody has trained on."""
        self._started: dict[str, int] = {}
        self._complete: dict[str, Spans] = {}
        self._first: dict[str, int] = {}
        """First version of each complete order: what the book asks for."""
        self._news = self.env.event()
        self._looked_at_starts = float("-inf")
        self._waiting: dict[Worker, None] = {}
        self._workers = [Worker(i // setup.workers_per_node) for i in range(setup.workers)]

    def run(self) -> Trace:
        """To the end of the last step. Raises RunError where faults come faster than checkpoints."""
        env, setup = self.env, self.setup
        for worker in self._workers:
            worker.process = env.process(self._labour(worker))
        trainer = env.process(self._train_all())
        if setup.trainer_mtbf_s < float("inf"):
            env.process(self._trainer_faults(trainer))
        if setup.node_mtbf_s < float("inf"):
            for node in range(setup.nodes):
                env.process(self._node_faults([w for w in self._workers if w.node == node]))
        env.run(until=trainer)
        self.trace.idle_s = sum(w.idle_s for w in self._workers) + sum(env.now - w.waits_since for w in self._waiting)
        return self.trace

    # orders

    def _put(self, orders: list[Order], rng: np.random.Generator) -> None:
        """Draw what orders will take, and open them."""
        if orders:
            seconds, tokens = self.times.orders.draw(rng, len(orders))
            self._work |= zip((o.id for o in orders), zip(seconds.tolist(), tokens.tolist(), strict=True), strict=True)
            self._reopen({o.id: o.min_version for o in orders})

    def _reopen(self, orders: dict[str, int]) -> None:
        self._open |= orders
        for order_id in orders:
            heapq.heappush(self._by_name, order_id)
        self._call(len(self._open))

    def _claim(self) -> str | None:
        """The first open order by name that the newest weights may start, as spool.queue claims it."""
        too_new, found = [], None
        while self._by_name and found is None:
            order_id = heapq.heappop(self._by_name)
            if order_id not in self._open:
                continue
            if self._open[order_id] > self.version:
                too_new.append(order_id)
            else:
                found = order_id
        for order_id in too_new:
            heapq.heappush(self._by_name, order_id)
        if found is not None:
            del self._open[found]
            self._started[found] = self.version
        return found

    def _call(self, count: int) -> None:
        """Let the `count` workers look that look next; the later ones would find nothing."""
        if not self._waiting or not count:
            return
        since, each = pauses(self.setup.workers)
        waiting, now = list(self._waiting), self.env.now
        pause = np.array([each[bisect.bisect_right(since, now - w.waits_since) - 1] for w in waiting])
        delay = pause * self._look_rng.random(len(waiting))
        for i in np.argsort(delay, kind="stable")[:count]:
            worker = waiting[i]
            assert worker.wake is not None
            del self._waiting[worker]
            worker.wake.succeed(float(delay[i]))

    # workers

    def _labour(self, worker: Worker) -> Work:
        while True:
            try:
                yield from self._one_order(worker)
            except simpy.Interrupt:
                self._lose(worker)
                yield from self._out(worker)

    def _one_order(self, worker: Worker) -> Work:
        env, began = self.env, self.env.now
        worker.waits_since = began
        while (order_id := self._claim()) is None:
            worker.wake = env.event()
            self._waiting[worker] = None
            yield env.timeout((yield worker.wake))
        worker.idle_s += env.now - began
        worker.waits_since, worker.order = env.now, order_id
        version = self._started[order_id]
        if version != worker.held:
            yield env.timeout(self.times.fetch_s)
            worker.held = version
        seconds, _ = self._work[order_id]
        if self.setup.late == "mask":
            spans = yield from self._swapping(worker, seconds)
        else:
            yield env.timeout(seconds)
            spans = Spans((version,), (1.0,))
        worker.order = None
        shard = env.timeout(self.times.shard_s)
        assert shard.callbacks is not None
        shard.callbacks.append(functools.partial(self._published, order_id, spans))

    def _swapping(self, worker: Worker, seconds: float) -> Generator[simpy.Event, Any, Spans]:
        """Play an order while new weights are taken as they come; for each, generation stands still meanwhile."""
        at, left = self.env.now, seconds
        versions, shares = [worker.held], [0.0]
        while True:
            end = at + left
            yield self.env.timeout(max(end - self.env.now, 0.0))
            newer = worker.held + 1
            if newer > self.version or self._published_at[newer] >= end:
                shares[-1] += left
                return Spans(tuple(versions), tuple(s / seconds for s in shares))
            taken = max(self._published_at[newer], at)
            shares[-1] += taken - at
            left -= taken - at
            worker.held = bisect.bisect_right(self._published_at, taken) - 1
            versions.append(worker.held)
            shares.append(0.0)
            at = taken + self.times.fetch_s

    def _published(self, order_id: str, spans: Spans, _: simpy.Event) -> None:
        self._started.pop(order_id, None)
        self.trace.orders_played += 1
        if order_id in self.book.outstanding:  # it was not dropped meanwhile
            self._complete[order_id], self._first[order_id] = spans, spans.versions[0]
            self._tell()

    def _lose(self, worker: Worker) -> None:
        """Its node is lost: what it played is given back once that is noticed."""
        worker.held = -1
        if worker.order is None:
            worker.idle_s += self.env.now - worker.waits_since
            self._waiting.pop(worker, None)
            self._call(len(self._open))  # it may have been called for an order
            return
        gone = self.env.timeout(self.times.worker_lost_s)
        assert gone.callbacks is not None
        gone.callbacks.append(functools.partial(self._give_back, worker.order))
        worker.order = None

    def _give_back(self, order_id: str, _: simpy.Event) -> None:
        self._reopen({order_id: self._started.pop(order_id)})
        self._tell()  # what nobody plays any more may start later, and holds nothing up

    def _out(self, worker: Worker) -> Work:
        while True:
            try:
                yield self.env.timeout(self.times.worker_restart_s)
                return
            except simpy.Interrupt:
                continue

    def _node_faults(self, workers: list[Worker]) -> Work:
        while True:
            yield self.env.timeout(self._fault_rng.exponential(self.setup.node_mtbf_s))
            self.trace.node_faults += 1
            for worker in workers:
                assert worker.process is not None
                worker.process.interrupt()

    # the trainer

    def _train_all(self) -> Work:
        setup, times = self.setup, self.times
        at = made = saved = vain = 0
        choice: Choice | None = None
        self._put(self.book.release(upto=self.book.last_batch(0)), self._work_rng)
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
        """Raises RunError when there were too many faults since the last checkpoint."""
        if vain > VAIN_FAULTS:
            raise RunError(
                f"no checkpoint in {vain} faults of the trainer, one each {self.setup.trainer_mtbf_s:.0f} s on average (--mtbf over "
                f"its nodes): a restart takes {self.times.restart_s:.0f} s (--restart-s), and there are run.checkpoint_every = "
                f"{self.setup.checkpoint_every} steps between checkpoints: lower one of them"
            )

    def _spend(self, on: str, seconds: float) -> Work:
        """Let time pass; where a fault cuts it off, it is lost."""
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
        """Wait for what `step` takes, as roles.intake does."""
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
        if len(self._first) < self.book.n or self._held_up(step):
            return None
        choice = self.book.choose(step, self._first, {})
        if choice is None or choice.drop:  # something unfinished seems due: look when it was started
            yield self.env.timeout(max(self._looked_at_starts + LOOK_AT_STARTS_S - self.env.now, 0.0))
            self._looked_at_starts = self.env.now
            self._open = {i: max(oldest, self.version) for i, oldest in self._open.items()}
            choice = self.book.choose(step, self._first, self._open | self._started)
        return choice

    def _held_up(self, step: int) -> bool:
        """Whether an order in play is due now that the book is known to wait for: to find that out by asking it takes longer."""
        version, orders = step - self.book.max_staleness, self.book.outstanding
        due = (i for i, started in self._started.items() if started == version and i in orders)
        if self.setup.late == "drop":
            return any(orders[i].drops >= MAX_DROPS for i in due)
        return self.setup.late == "wait" and any(True for _ in due)

    def _settle(self, step: int, choice: Choice) -> None:
        """The step is made, and its version is there."""
        self._published_at.append(self.env.now)
        self.version += 1
        self.trace.ended_s.append(self.env.now)
        self.trace.ledger.append((choice.take, choice.drop))
        for order_id in choice.take:
            self._account(step, self._complete[order_id], self._work[order_id][1])
        for order_id in (*choice.take, *choice.drop):
            self._complete.pop(order_id, None)
            self._first.pop(order_id, None)
            self._open.pop(order_id, None)
            if order_id not in self._started:
                del self._work[order_id]
        replacements = self.book.apply(step, choice.take, choice.drop)
        self._put(replacements, self._replaced_rng)
        self._put(self.book.release(upto=self.book.last_batch(step + 1)), self._work_rng)

    def _account(self, step: int, spans: Spans, tokens: float) -> None:
        """What `step` trains on of an order: all of it, or what is within the bound where async.late = "mask"."""
        oldest = step - self.book.max_staleness if self.setup.late == "mask" else 0
        inside = [v for v, share in zip(*spans, strict=True) if v >= oldest and share > 0]
        masked = sum(share for v, share in zip(*spans, strict=True) if v < oldest)
        self.trace.tokens += tokens
        self.trace.masked_tokens += tokens * masked
        if inside:
            self.trace.ages.append(step - inside[0])

    def _tell(self) -> None:
        """The trainer looks again, if it waits."""
        if not self._news.triggered:
            self._news.succeed()
