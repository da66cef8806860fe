"""A run in a made-up cluster, and everything that a driver may do to it: processes, caches, clocks, faults, power.

    driver (hypothesis, or a random generator) ──events──► World ──► actors, one at a time ──► Checks
                                               ──at the end: nothing fails any more──► all is trained, in bounded time

Workers have hosts of their own; trainer and scorer share that of their supervisor. A supervisor that was killed or
superseded leaves its children running: whoever is not fenced does harm.
"""

from __future__ import annotations

import shutil
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from relax_hpc.files.errors import RunError
from tools.faults.model import roles
from tools.faults.model.actors import ERRNOS, Actor, Fault, Violation
from tools.faults.model.checks import Checks
from tools.faults.model.client import SECOND_NS, Client, Server

SHARED_MEMORY = Path("/dev/shm")
CALL_S = 0.001
"""Seconds that a call takes while nothing fails."""
STANDS_S = 3.0
"""Seconds for which those that are paused at the end stand still; the others do their work meanwhile."""
ROUNDS_TO_LEAVE = 60
LIMIT_CALLS, LIMIT_S, LONGEST_GAP_S = 40_000, 900.0, 10.0
"""Calls and seconds within which all is done once nothing fails, and the longest time without a change of the run; the last where
no cache was ever old."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The kind of a run, and of its file system."""

    staleness: int = 1
    on_stale: Literal["wait", "drop"] = "wait"
    columns: bool = False
    extra: bool = False
    """Steps ask for further requests in place of those that they do not want."""
    partial: bool = False
    workers: int = 2
    watchers: int = 1
    """How many workers seem to watch each folder: the more there are, the more rarely it is listed."""
    whole_seconds: bool = False
    keep: int = 1
    """Checkpoints that are kept."""


class World:
    """A run with its processes."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._folder = tempfile.TemporaryDirectory(
            dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None, prefix="faults-"
        )
        self.run = roles.make_run(Path(self._folder.name) / "run")
        self.server = Server(self.run.root, SECOND_NS if shape.whole_seconds else 4_000_000)
        self.clients = {
            name: Client(self.server, name) for name in ("s0", "s1", *(f"w{k}" for k in range(shape.workers)))
        }
        self.actors: list[Actor] = []
        self._children: dict[Actor, dict[str, Actor]] = {}
        self._parents: dict[Actor, Actor] = {}
        self.suspects: set[Actor] = set()
        self._drained: set[Actor] = set()
        self._parts: set[Actor] = set()
        self._stalls: list[tuple[float, float]] = []
        self.ever_stale = False
        self.states: set[int] = set()
        self.checks = Checks(self)
        self.server.observe = self.checks.saw
        self.programs: dict[str, Callable[[Actor], object]] = {}
        for k in range(shape.workers):
            self.programs[f"worker{k}"] = partial(roles.worker, self)
        if shape.columns:
            self.programs["scorer"] = partial(roles.scorer, self)
        self.start_supervisor("s0")

    @property
    def fresh(self) -> bool:
        """True while no client was ever shown anything old."""
        return not self.ever_stale

    # what the roles ask

    def _actor(self, role: str, host: str, program: Callable[[Actor], object]) -> Actor:
        name = f"{role}-{len(self.actors):04d}"
        actor = Actor(self.server, name, role.rstrip("0123456789"), self.clients[host], program)
        self.actors.append(actor)
        return actor

    def start(self, by: Actor, role: str, program: Callable[[Actor], object]) -> Actor:
        """Start a child of a supervisor, in the place of the one that it had."""
        host = f"w{role.removeprefix('worker')}" if role.startswith("worker") else by.client.name
        child = self._actor(role, host, program)
        self._children[by][role], self._parents[child] = child, by
        return child

    def children(self, by: Actor) -> dict[str, Actor]:
        return self._children[by]

    def parent(self, child: Actor) -> Actor | None:
        return self._parents.get(child)

    def end_children(self, by: Actor) -> None:
        self._drained |= {*self._children[by].values()}

    def drained(self, worker: Actor) -> bool:
        return worker in self._drained

    def gives_back_parts(self, worker: Actor, claim: object) -> bool:
        wanted = worker in self._parts
        self._parts.discard(worker)
        return wanted

    def stalled_since(self, at: float) -> float:
        return sum(seconds for begun, seconds in self._stalls if begun >= at)

    # what a driver may do

    def start_supervisor(self, host: str) -> Actor:
        actor = self._actor("supervisor", host, partial(roles.supervisor, self))
        self._children[actor] = {}
        return actor

    @property
    def living(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.alive]

    def advance(self, actor: Actor, calls: int, fault: Fault | None = None) -> None:
        """Let an actor go on, and judge how it ends."""
        actor.advance(calls, fault)
        if fault is not None:
            actor.faults.append(fault)
        self._judge(actor)

    def _judge(self, actor: Actor) -> None:
        where = [
            (a.name.rpartition("-")[0], a.pending.op, a.pending.path.rpartition("/")[0])
            for a in self.living
            if a.pending
        ]
        self.states.add(hash((self.server.fingerprint, tuple(where))))
        if self.server.violation is not None:
            raise self.server.violation
        if actor.ended and actor.error is not None and not self._may_end(actor, actor.error):
            trace = "".join(traceback.format_exception(actor.error))
            raise Violation(f"nobody ends with an error that nothing caused: {actor.name}\n{trace}")

    def _may_end(self, actor: Actor, error: BaseException) -> bool:
        """Return True for errors that a process may end with: ours, those of one that was superseded, and of old caches."""
        last = actor.faults[-1] if actor.faults else None
        if isinstance(error, Violation):
            raise error
        if isinstance(error, OSError) and error.errno in ERRNOS and actor.faults:
            return True
        if actor.role == "worker" and not self._claim_dir(actor).exists():
            return isinstance(error, FileNotFoundError) or self.ever_stale
        if isinstance(error, FileNotFoundError):
            again = last is not None and last.how == "again"
            return again or self.ever_stale or actor is not self._in_office(actor) or actor in self.suspects
        if isinstance(error, FileExistsError):
            return last is not None and last.how == "again" and actor.role == "trainer"
        if actor.role == "supervisor":
            return isinstance(error, RunError) and actor.name not in str(error)  # nobody is refused by its own lease
        return isinstance(error, RunError) and self.ever_stale

    def _in_office(self, actor: Actor) -> Actor | None:
        """Return who has this actor's place now: itself, unless a successor does."""
        if actor.role == "supervisor":
            return self.checks.holder
        parent = self._parents[actor]
        return None if parent is not self.checks.holder else self._children[parent].get(actor.name.rpartition("-")[0])

    def suspect(self, actor: Actor) -> None:
        """Let the supervisor believe that a child of its is lost."""
        self.suspects.add(actor)

    def kill(self, actor: Actor) -> None:
        actor.kill()

    def drain(self, actor: Actor) -> None:
        """Ask a worker to leave."""
        self._drained.add(actor)

    def want_part(self, actor: Actor) -> None:
        """Let a worker give its next request back, partly generated."""
        if self.shape.partial:
            self._parts.add(actor)

    def freeze(self, client: Client, seconds: float, listings: bool, absences: bool) -> None:
        self.ever_stale = True
        client.freeze(seconds, listings, absences)

    def stall(self, seconds: float) -> None:
        """Let time pass while nobody runs."""
        self._stalls.append((self.server.now_s, seconds))
        self.server.now_s += seconds

    def set_clock(self, client: Client, off_s: float) -> None:
        client.clock_s = off_s

    def lose_power(self, names: bool) -> None:
        """Kill everybody, and lose what is not on the disk. names: names too, else contents alone."""
        for actor in self.living:
            actor.kill()
        for client in self.clients.values():
            client.thaw()
        self.checks.lost_power(self.server.lose_power(names))
        self.start_supervisor("s0")

    # the end

    def finish(self, paused: Collection[Actor] = ()) -> None:
        """Let everybody go on while nothing fails, those that are paused later: all must be trained, in bounded time."""
        for client in self.clients.values():
            client.thaw()
        began_s, changed_s, changes = self.server.now_s, self.server.now_s, self.checks.changes
        ready = {actor: self.server.now_s + STANDS_S * (actor in paused) for actor in self.living}
        for _ in range(LIMIT_CALLS):
            if self._is_done():
                break
            if not any(a.role == "supervisor" for a in self.living):
                self.start_supervisor("s1")
            for actor in self.living:
                ready.setdefault(actor, self.server.now_s)
            actor = min(self.living, key=lambda a: (max(ready[a], a.wakes_at), self.actors.index(a)))
            self.server.now_s = max(self.server.now_s, ready[actor])
            before = actor.calls
            self.advance(actor, 8)
            ready[actor] = self.server.now_s + CALL_S * (actor.calls - before)
            held = self.checks.holder is not None and self.checks.holder.alive
            if changes != self.checks.changes or not held:
                changes, changed_s = self.checks.changes, self.server.now_s
            self._expect_progress(began_s, changed_s)
        if not self._is_done():
            raise Violation(f"nothing is lost for good: {self._describe()}")
        self.checks.finished()
        self._wind_up()

    def _expect_progress(self, began_s: float, changed_s: float) -> None:
        now_s = self.server.now_s
        slow = self.fresh and now_s - changed_s > LONGEST_GAP_S
        if now_s - began_s > LIMIT_S or slow:
            raise Violation(f"all is done in bounded time: {now_s - began_s:.1f} s: {self._describe()}")

    def _is_done(self) -> bool:
        return any(actor.result == "done" and actor.role == "supervisor" for actor in self.actors)

    def _wind_up(self) -> None:
        """Let those go on who were superseded, given up, or drained: they do nothing more, and leave."""
        given_up = [a for a in self.living if a.role == "worker" and not self._claim_dir(a).exists()]
        for k in range(len(given_up)):  # a worker learns of it when it wants to claim
            (self.run.open_requests / f"r{999_000 + k:06d}-000.a0.v0").write_bytes(b"")
        self.server.touch(f"{self.run.open_requests}/x")
        leaving = [*given_up, *(a for a in self.living if a.role == "trainer" or a in self.checks.holders)]
        for _ in range(ROUNDS_TO_LEAVE):
            for actor in leaving:
                self.advance(actor, 40)
        self.checks.finished()
        left = [actor.name for actor in leaving if actor.alive and actor.role != "trainer"]
        if left:
            raise Violation(f"who was superseded or given up learns of it: {left}")

    def _claim_dir(self, worker: Actor) -> Path:
        return self.run.claimed_requests / worker.name

    def _describe(self) -> str:
        where = [f"{a.name} before {a.pending.op} {Path(a.pending.path).name}" for a in self.living if a.pending]
        places = {request: sorted(paths) for request, paths in self.checks.places.items() if paths}
        return f"entries {sorted(self.checks.entries)}, requests {places}, shards {sorted(self.checks.shards)}, {where}"

    def close(self) -> None:
        for actor in self.living:
            actor.kill()
        for client in self.clients.values():
            client.thaw()
        shutil.rmtree(self._folder.name, ignore_errors=True)
        self._folder.cleanup()


@contextmanager
def opened(shape: Shape) -> Iterator[World]:
    """A world that ends with the block."""
    world = World(shape)
    try:
        yield world
    finally:
        world.close()
