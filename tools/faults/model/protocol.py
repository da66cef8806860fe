"""Adversaries of the protocol: a state machine of hypothesis, and a generator of random schedules, over the same events.

    seed ──► Shape, events (go, fault, kill, suspect, take over, freeze, stall, clock, power …) ──► World ──► finish

A schedule is a seed: playing it again gives the same calls in the same order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tools.faults.model.actors import ERRNOS, FAULTS, Actor, Fault, installed
from tools.faults.model.world import Shape, World, opened

MOST_SUPERVISORS = 3
FREEZE_S = (1.0, 3.0, 30.0, 60.0)
STALL_S = (0.3, 1.0, 7.0, 40.0)
OFF_S = (-86_400.0, -50.0, 0.0, 50.0, 86_400.0)


POINTS = ("link", "rename", "mkdir", "unlink", "listdir", "scandir", "stat", "read", "write", "utime", "sleep")
"""Calls at which a schedule may stop an actor."""
SEARCH_CALLS = 60
"""Most calls that an actor goes on in search of such a call."""


@dataclass(slots=True)
class Driver:
    """Events on a world, each with plain numbers for what it is about."""

    world: World
    paused: dict[Actor, int] = field(default_factory=dict)
    """Actors that stand still, each with the events for which it still does."""

    def _who(self, who: int) -> Actor:
        living = self.world.living or [self.world.start_supervisor("s0")]
        able = [actor for actor in living if actor not in self.paused] or living
        return able[who % len(able)]

    def passes(self) -> None:
        """Count an event: those that stand still do so for one less."""
        self.paused = {actor: left - 1 for actor, left in self.paused.items() if left > 1}

    def _until(self, actor: Actor, point: int, skipped: int = 0) -> bool:
        """Let an actor go on until it stands before a call of this kind, the first or a later one."""
        for _ in range(SEARCH_CALLS):
            if actor.pending is not None and actor.pending.op == POINTS[point % len(POINTS)]:
                skipped -= 1
                if skipped < 0:
                    return True
            self.world.advance(actor, 1)
        return False

    def restart(self, who: int, point: int, skipped: int, events: int) -> None:
        """A child of a supervisor is killed; its successor stands still before a call of a kind."""
        actor = self._who(who)
        parent = self.world.parent(actor)
        if parent is None or not parent.alive:
            return
        self.world.kill(actor)
        for _ in range(4):
            self.world.advance(parent, 30)
        successor = self.world.children(parent).get(actor.name.rpartition("-")[0])
        if successor is not None and successor.alive:
            self._until(successor, point, skipped)
            self.paused[successor] = events

    def zombie(self, who: int, point: int, events: int) -> None:
        """An actor stands still before a call of a kind; its supervisor believes that it is lost."""
        actor = self._who(who)
        self.pause(who, point, events)
        self.world.suspect(actor)

    def aim(self, who: int, point: int, how: int, error: int) -> None:
        """The next call of a kind goes wrong for an actor."""
        actor = self._who(who)
        if self._until(actor, point):
            self.world.advance(actor, 1, Fault(FAULTS[how % len(FAULTS)], ERRNOS[error % len(ERRNOS)]))

    def pause(self, who: int, point: int, events: int) -> None:
        """An actor stands still before a call of a kind, while the others go on."""
        actor = self._who(who)
        self._until(actor, point)
        self.paused[actor] = events

    def go(self, who: int, calls: int) -> None:
        """One actor goes on for some calls."""
        self.world.advance(self._who(who), calls)

    def all_go(self, who: int, calls: int) -> None:
        """Every actor goes on, one after another."""
        for actor in self.world.living:
            if actor not in self.paused:
                self.world.advance(actor, calls)

    def fault(self, who: int, calls: int, how: int, error: int) -> None:
        """One actor goes on; the last of its calls goes wrong."""
        actor = self._who(who)
        self.world.advance(actor, calls, Fault(FAULTS[how % len(FAULTS)], ERRNOS[error % len(ERRNOS)]))

    def kill(self, who: int) -> None:
        self.world.kill(self._who(who))

    def suspect(self, who: int) -> None:
        """Its supervisor believes that an actor is lost; it goes on."""
        self.world.suspect(self._who(who))

    def drain(self, who: int) -> None:
        actor = self._who(who)
        if actor.role == "worker":
            self.world.drain(actor)

    def part(self, who: int) -> None:
        self.world.want_part(self._who(who))

    def supervisor(self, host: int, calls: int, how: int) -> None:
        """Another supervisor is started; one of its first calls may go wrong."""
        if sum(actor.role == "supervisor" for actor in self.world.living) < MOST_SUPERVISORS:
            fault = Fault(FAULTS[how]) if how < len(FAULTS) else None
            self.world.advance(self.world.start_supervisor(("s0", "s1")[host % 2]), calls, fault)

    def supervise(self, who: int, slices: int) -> None:
        """One supervisor goes on, sleeps included: another one's lease may grow old meanwhile."""
        found = [actor for actor in self.world.living if actor.role == "supervisor"]
        actor = found[who % len(found)] if found else self.world.start_supervisor("s1")
        for _ in range(slices):
            self.world.advance(actor, 12)

    def freeze(self, client: int, seconds: int, flags: int) -> None:
        """A host's caches stay as they are."""
        clients = [*self.world.clients.values()]
        frozen = clients[client % len(clients)]
        self.world.freeze(frozen, FREEZE_S[seconds % len(FREEZE_S)], bool(flags & 1), bool(flags & 2))

    def stall(self, seconds: int) -> None:
        self.world.stall(STALL_S[seconds % len(STALL_S)])

    def clock(self, client: int, off: int) -> None:
        """The clock on a host's wall is set."""
        clients = [*self.world.clients.values()]
        self.world.set_clock(clients[client % len(clients)], OFF_S[off % len(OFF_S)])

    def power(self, names: int) -> None:
        self.world.lose_power(bool(names % 2))


@dataclass(frozen=True, slots=True)
class Style:
    """How an adversary likes to disturb: the weight of each event."""

    name: str
    weights: dict[str, int]
    events: int = 40


CALM = {"restart": 4, "go": 20, "all_go": 30, "drain": 1, "part": 2, "clock": 1, "pause": 8}
_OTHERS = {"supervisor": 2, "supervise": 6, "stall": 2, "kill": 2, "aim": 4}
STYLES = (
    Style("faults", CALM | {"fault": 6, "aim": 18, "kill": 3, "supervisor": 2}),
    Style("zombies", CALM | _OTHERS | {"suspect": 3, "zombie": 10}),
    Style("old caches", CALM | _OTHERS | {"freeze": 6, "suspect": 2, "zombie": 6}),
    Style("power", CALM | {"power": 3, "aim": 4, "kill": 2}),
    Style("parts", CALM | {"part": 16, "aim": 8, "zombie": 5, "drain": 4, "kill": 2}),
)


def shape_of(random_: random.Random, extra: bool) -> Shape:
    return Shape(
        extra=extra,
        staleness=random_.choice((0, 1, 1)),
        on_stale=random_.choice(("wait", "wait", "drop")),
        columns=random_.random() < 0.2,
        partial=random_.random() < 0.5,
        workers=random_.choice((1, 2, 2)),
        watchers=random_.choice((1, 15)),
        whole_seconds=random_.random() < 0.3,
        keep=random_.choice((1, 2)),
    )


def play(seed: int, states: set[int] | None = None) -> None:
    """Play the schedule of a seed. Raises Violation."""
    random_ = random.Random(seed)
    style = STYLES[seed % len(STYLES)]
    names, weights = [*style.weights], [*style.weights.values()]
    with opened(shape_of(random_, extra=seed % 7 == 3)) as world:
        driver = Driver(world)
        events: dict[str, Callable[[], None]] = _random_events(driver, random_)
        if random_.random() < 0.3:
            driver.fault(0, random_.randrange(1, 20), random_.randrange(99), random_.randrange(99))
        for name in random_.choices(names, weights, k=random_.randrange(style.events)):
            driver.passes()
            events[name]()
        world.finish(driver.paused)
        if states is not None:
            states |= world.states


def _random_events(driver: Driver, random_: random.Random) -> dict[str, Callable[[], None]]:
    def some(event: Callable[..., None], *most: int) -> Callable[[], None]:
        return lambda: event(*(random_.randrange(m) for m in most))

    def calls(event: Callable[..., None], most: int, *rest: int) -> Callable[[], None]:
        return lambda: event(random_.randrange(99), 1 + random_.randrange(most), *(random_.randrange(m) for m in rest))

    return {
        "go": calls(driver.go, 30), "all_go": calls(driver.all_go, 12), "fault": calls(driver.fault, 14, 99, 99),
        "kill": some(driver.kill, 99), "suspect": some(driver.suspect, 99), "drain": some(driver.drain, 99),
        "part": some(driver.part, 99), "supervisor": calls(driver.supervisor, 20, 12), "supervise": calls(driver.supervise, 150),
        "freeze": some(driver.freeze, 99, 99, 4), "stall": some(driver.stall, 99), "clock": some(driver.clock, 99, 99),
        "aim": some(driver.aim, 99, 6, len(FAULTS), 99), "restart": some(driver.restart, 99, len(POINTS), 3, 12), "pause": some(driver.pause, 99, len(POINTS), 12),
        "zombie": some(driver.zombie, 99, 4, 20),
        "power": some(driver.power, 2),
    }  # fmt: skip


NUMBERS = st.integers(0, 98)
SHAPES = st.builds(
    Shape,
    staleness=st.sampled_from((0, 1)),
    on_stale=st.sampled_from(("wait", "drop")),
    columns=st.booleans(),
    partial=st.booleans(),
    extra=st.booleans(),
    workers=st.sampled_from((1, 2)),
    watchers=st.sampled_from((1, 15)),
    whole_seconds=st.booleans(),
    keep=st.sampled_from((1, 2)),
)


class Protocol(RuleBasedStateMachine):
    """The protocol under an adversary that hypothesis leads; at the end nothing fails any more, and all must be done."""

    states: ClassVar[set[int]] = set()
    """All states that were visited."""

    def __init__(self) -> None:
        super().__init__()
        self._open = ExitStack()
        self._broken = True

    @initialize(shape=SHAPES)
    def begin(self, shape: Shape) -> None:
        self._open.enter_context(installed())
        self.driver = Driver(self._open.enter_context(opened(shape)))
        self._broken = False

    def _do(self, event: Callable[..., None], *numbers: int) -> None:
        self._broken = True
        self.driver.passes()
        event(*numbers)
        self._broken = False

    @rule(who=NUMBERS, calls=st.integers(1, 30))
    def go(self, who: int, calls: int) -> None:
        self._do(self.driver.go, who, calls)

    @rule(calls=st.integers(1, 12))
    def all_go(self, calls: int) -> None:
        self._do(self.driver.all_go, 0, calls)

    @rule(
        who=NUMBERS,
        calls=st.integers(1, 14),
        how=st.integers(0, len(FAULTS) - 1),
        error=st.integers(0, len(ERRNOS) - 1),
    )
    def fault(self, who: int, calls: int, how: int, error: int) -> None:
        self._do(self.driver.fault, who, calls, how, error)

    @rule(
        who=NUMBERS, point=st.integers(0, len(POINTS) - 1), how=st.integers(0, len(FAULTS) - 1), error=st.integers(0, 2)
    )
    def aim(self, who: int, point: int, how: int, error: int) -> None:
        self._do(self.driver.aim, who, point, how, error)

    @rule(who=NUMBERS, point=st.integers(0, len(POINTS) - 1), events=st.integers(1, 12))
    def pause(self, who: int, point: int, events: int) -> None:
        self._do(self.driver.pause, who, point, events)

    @rule(who=NUMBERS, point=st.integers(0, 3), events=st.integers(1, 20))
    def zombie(self, who: int, point: int, events: int) -> None:
        self._do(self.driver.zombie, who, point, events)

    @rule(who=NUMBERS)
    def kill(self, who: int) -> None:
        self._do(self.driver.kill, who)

    @rule(who=NUMBERS)
    def suspect(self, who: int) -> None:
        self._do(self.driver.suspect, who)

    @rule(who=NUMBERS, leaves=st.booleans())
    def give_back(self, who: int, leaves: bool) -> None:
        self._do(self.driver.drain if leaves else self.driver.part, who)

    @rule(host=st.integers(0, 1), calls=st.integers(1, 20), how=st.integers(0, 2 * len(FAULTS)))
    def supervisor(self, host: int, calls: int, how: int) -> None:
        self._do(self.driver.supervisor, host, calls, how)

    @rule(who=NUMBERS, point=st.integers(0, len(POINTS) - 1), skipped=st.integers(0, 2), events=st.integers(1, 12))
    def restart(self, who: int, point: int, skipped: int, events: int) -> None:
        self._do(self.driver.restart, who, point, skipped, events)

    @rule(who=NUMBERS, slices=st.integers(1, 150))
    def supervise(self, who: int, slices: int) -> None:
        self._do(self.driver.supervise, who, slices)

    @rule(client=st.integers(0, 3), seconds=st.integers(0, len(FREEZE_S) - 1), flags=st.integers(0, 3))
    def freeze(self, client: int, seconds: int, flags: int) -> None:
        self._do(self.driver.freeze, client, seconds, flags)

    @rule(seconds=st.integers(0, len(STALL_S) - 1), client=st.integers(0, 3), off=st.integers(0, len(OFF_S) - 1))
    def clocks(self, seconds: int, client: int, off: int) -> None:
        self._do(self.driver.stall, seconds)
        self._do(self.driver.clock, client, off)

    @rule(names=st.booleans())
    def power(self, names: bool) -> None:
        self._do(self.driver.power, int(names))

    @invariant()
    def holds(self) -> None:
        if not self._broken:
            self.driver.world.checks.unchanged()

    def teardown(self) -> None:
        with self._open:
            if not self._broken:
                try:
                    self.driver.world.finish(self.driver.paused)
                finally:
                    Protocol.states |= self.driver.world.states
