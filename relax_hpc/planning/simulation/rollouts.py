"""The simulated rollout workers, and the open requests that they claim.

    claim the first open request by name ► take the newest weights ► generate ► publish the shard, and claim again
    fault of their node: requests are open again once it counts as lost; the node comes back

Waiting workers look for requests as often as files.watch lets them.
"""

from __future__ import annotations

import bisect
import functools
import heapq
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from relax_hpc.planning.simulation.file_calls import pauses
from relax_hpc.planning.simulation.setup import Setup, Spans, Trace
from relax_hpc.planning.simulation.times import Times

Work = Generator[simpy.Event, Any, None]


@dataclass(eq=False, slots=True)
class Worker:
    node: int
    held: int = -1
    """Version of the weights that it holds; -1 before the first."""
    request: str | None = None
    wake: simpy.Event | None = None
    """The event that wakes it while it waits for a request; else None."""
    waits_since: float = 0.0
    idle_s: float = 0.0
    process: simpy.Process | None = None


class Rollouts:
    """All workers of a run."""

    def __init__(
        self,
        env: simpy.Environment,
        setup: Setup,
        times: Times,
        trace: Trace,
        rngs: tuple[np.random.Generator, np.random.Generator],
        generated: Callable[[str, Spans], None],
        given_back: Callable[[], None],
    ) -> None:
        """rngs: for faults, for looks. generated: called for a new shard; given_back: when a request is open again."""
        self.env, self.setup, self.times, self.trace = env, setup, times, trace
        self._fault_rng, self._look_rng = rngs
        self._generated, self._given_back = generated, given_back
        self.version = 0
        """The newest version."""
        self._published_at = [0.0]
        """Time at which each version was published."""
        self.open: dict[str, int] = {}
        """Open request -> the oldest version that it may start from."""
        self.started: dict[str, int] = {}
        """Claimed request -> the version that it was started with."""
        self._by_name: list[str] = []
        """A heap of the names of open requests; some are claimed or withdrawn since."""
        self._seconds: dict[str, float] = {}
        """Open or claimed request -> seconds that generating it takes."""
        self.waiting: dict[Worker, None] = {}
        self.workers = [Worker(i // setup.workers_per_node) for i in range(setup.workers)]
        for worker in self.workers:
            worker.process = env.process(self._labour(worker))
        if setup.node_mtbf_s < float("inf"):
            for node in range(setup.nodes):
                env.process(self._node_faults([w for w in self.workers if w.node == node]))

    def put(self, oldest: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Open requests, given the oldest version that each may start from and the seconds that generating it takes."""
        self._seconds |= seconds
        self._open(oldest)

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """Withdraw those of the requests that are open; a worker that already generates one goes on in vain."""
        for request_id in request_ids:
            if self.open.pop(request_id, None) is not None:
                del self._seconds[request_id]

    def announce(self) -> None:
        """Publish one more version."""
        self.version += 1
        self._published_at.append(self.env.now)

    def in_progress(self) -> dict[str, int]:
        """Open or claimed request -> version: the newest for an open one, as spool.queue gives it."""
        self.open = {i: max(oldest, self.version) for i, oldest in self.open.items()}
        return self.open | self.started

    def idle_s(self) -> float:
        """Seconds that all workers together have waited for requests."""
        return sum(w.idle_s for w in self.workers) + sum(self.env.now - w.waits_since for w in self.waiting)

    def _open(self, requests: Mapping[str, int]) -> None:
        self.open |= requests
        for request_id in requests:
            heapq.heappush(self._by_name, request_id)
        self.call(len(self.open))

    def claim(self) -> str | None:
        """Claim the first open request, by name, that the newest weights may start, as spool.queue does."""
        too_new, found = [], None
        while self._by_name and found is None:
            request_id = heapq.heappop(self._by_name)
            if request_id not in self.open:
                continue
            if self.open[request_id] > self.version:
                too_new.append(request_id)
            else:
                found = request_id
        for request_id in too_new:
            heapq.heappush(self._by_name, request_id)
        if found is not None:
            del self.open[found]
            self.started[found] = self.version
        return found

    def call(self, count: int) -> None:
        """Wake the `count` workers whose turn it is: one of each node looks and calls the next."""
        if not self.waiting or not count:
            return
        since, each = pauses(self.setup.nodes)
        poll_leaders: dict[int, float] = {}
        for worker in self.waiting:  # workers that wait longest come first
            poll_leaders.setdefault(worker.node, self.env.now - worker.waits_since)
        pause = np.array([each[bisect.bisect_right(since, waited) - 1] for waited in poll_leaders.values()])
        delays = dict(zip(poll_leaders, (pause * self._look_rng.random(len(pause))).tolist(), strict=True))
        for worker in sorted(self.waiting, key=lambda worker: delays[worker.node])[:count]:
            assert worker.wake is not None
            del self.waiting[worker]
            worker.wake.succeed(delays[worker.node])

    def _labour(self, worker: Worker) -> Work:
        while True:
            try:
                yield from self._one_request(worker)
            except simpy.Interrupt:
                self._lose(worker)
                yield from self._out(worker)

    def _one_request(self, worker: Worker) -> Work:
        env, began = self.env, self.env.now
        worker.waits_since = began
        while (request_id := self.claim()) is None:
            worker.wake = env.event()
            self.waiting[worker] = None
            yield env.timeout((yield worker.wake))
        worker.idle_s += env.now - began
        worker.waits_since, worker.request = env.now, request_id
        version = self.started[request_id]
        if version != worker.held:
            yield env.timeout(self.times.fetch_s)
            worker.held = version
        seconds = self._seconds[request_id]
        if self.setup.on_stale == "mask":
            spans = yield from self._swapping(worker, seconds)
        else:
            yield env.timeout(seconds)
            spans = Spans((version,), (1.0,))
        worker.request = None
        shard = env.timeout(self.times.shard_s)
        assert shard.callbacks is not None
        shard.callbacks.append(functools.partial(self._published, request_id, spans))

    def _swapping(self, worker: Worker, seconds: float) -> Generator[simpy.Event, Any, Spans]:
        """Generate a request and take new weights as they come; generation stands still for each."""
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

    def _published(self, request_id: str, spans: Spans, _: simpy.Event) -> None:
        del self.started[request_id], self._seconds[request_id]
        self.trace.requests_generated += 1
        self._generated(request_id, spans)

    def _lose(self, worker: Worker) -> None:
        """Lose the worker's node: its request is given back once the loss is noticed."""
        worker.held = -1
        if worker.request is None:
            worker.idle_s += self.env.now - worker.waits_since
            self.waiting.pop(worker, None)
            self.call(len(self.open))  # the lost worker may have been woken for a request
            return
        gone = self.env.timeout(self.times.worker_lost_s)
        assert gone.callbacks is not None
        gone.callbacks.append(functools.partial(self._give_back, worker.request))
        worker.request = None

    def _give_back(self, request_id: str, _: simpy.Event) -> None:
        self._open({request_id: self.started.pop(request_id)})
        self._given_back()

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
