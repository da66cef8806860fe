"""Environments of a rollout worker: built-in quick ones live here, all others in processes that may be killed.

Environments ──seats, spread──► Host (process.py) ──calls──► child: reset, step, close ──► Turns, or the error
                                 └── no answer in time, or it died: that seat fails; the others that lived there are brought back in
                                     a new child, by their states, or by the answers that they had, which must lead to the same observations
"""

from __future__ import annotations

import itertools
import multiprocessing.connection
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from relax_hpc.environments.channel import Reply, from_child, to_worker
from relax_hpc.environments.load import IN_PROCESS, is_async, make_environments
from relax_hpc.environments.process import Host, Seat
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Failure, Prompt
from relax_hpc.sandbox.wrap import require

_HEARTBEAT_S = 0.5
"""Seconds between two calls of `progress` while environments are at work."""
Progress = Callable[[], None]


class Environments:
    """The environments of a recipe's sources. Raises RegistryError at construction for one that cannot be used."""

    def __init__(self, recipe: Recipe) -> None:
        self._sources, self._make = recipe.sources, make_environments(recipe.sources)
        limit_s = recipe.rollout.step_time_limit_s
        for source in self._sources:
            require(source.sandbox)
        asked = [(source.sandbox, is_async(source)) for source in self._sources]
        kinds = [kind for i, kind in enumerate(asked) if kind not in asked[:i]]
        self._processes = recipe.rollout.processes
        self._hosts = [Host(self._sources, limit_s, *kind) for kind in kinds for _ in range(self._processes)]
        self._first = [kinds.index(kind) * self._processes for kind in asked]
        """Number of the first host for each source: those in one sandbox share hosts, async ones apart."""
        self._numbers = itertools.count()
        self._settled: list[Seat] = []
        """Seats of built-in environments whose calls have ended, until `advance` tells."""

    def begin(
        self, prompts: Sequence[tuple[int, Prompt]], recorded: Mapping[int, str] = MappingProxyType({})
    ) -> list[Seat]:
        """Make an environment for each (group, prompt), and have it reset: `advance` tells when it is.

        recorded: number of a seat -> its record, made by `record`: it is brought back by its state."""
        seats = [self._seat(group, prompt) for group, prompt in prompts]
        for number, text in recorded.items():
            before = from_child(text.encode())
            seats[number].turns, seats[number].state = before.turns, before.state
            seats[number].answers = [""] * len(before.turns)  # a state takes their place
        for seat in seats:
            if not seat.begun:
                self._call(seat)
        return seats

    def show(self, seat: Seat, *answers: str) -> None:
        """Have an environment shown its model's next answers: it has a turn for each then, or a failure."""
        seat.answers.extend(answers)
        self._call(seat)

    def advance(self, wait_s: float) -> list[Seat]:
        """Wait for up to `wait_s` seconds until calls have ended; returns their seats. At once where none is under way."""
        until = time.monotonic() + wait_s
        while not (ended := self._ended()):
            busy = [host for host in self._hosts if host.busy]
            if not busy or (left_s := until - time.monotonic()) <= 0:
                break
            multiprocessing.connection.wait(
                [h.connection.fileno() for h in busy if h.connection], min(left_s, _HEARTBEAT_S)
            )
        return ended

    def wait(self, progress: Progress) -> None:
        """Wait until all calls have ended. `progress` is called at least twice a second; where it raises, they are given
        up."""
        try:
            while self.busy:
                self.advance(_HEARTBEAT_S)
                progress()
        except BaseException:
            self.abandon()
            raise

    @property
    def busy(self) -> bool:
        """True while a call is under way or queued, or has ended unseen."""
        return bool(self._settled) or any(host.busy for host in self._hosts)

    def leave(self, seats: Sequence[Seat], progress: Progress = lambda: None) -> None:
        """Close the environments that are still there; a seat whose close fails has a failure. Other calls are given up."""
        for host in self._hosts:
            host.queue.clear()
        for seat in seats:
            seat.closes = True
            self._call(seat)
        self.wait(progress)

    def abandon(self) -> None:
        """Give up all calls; a process in the middle of one is ended."""
        self._settled.clear()
        for host in self._hosts:
            host.abandon()

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        for host in self._hosts:
            host.close()

    def _seat(self, group: int, prompt: Prompt) -> Seat:
        if self._sources[prompt.source].environment not in IN_PROCESS:
            return Seat(next(self._numbers), group, prompt)
        environment = self._make[prompt.source]()
        environment.reset(prompt)
        return Seat(next(self._numbers), group, prompt, environment, begun=True)

    def _call(self, seat: Seat) -> None:
        if seat.here is None:
            self._hosts[self._first[seat.prompt.source] + seat.number % self._processes].queue.append(seat)
            return
        seat.turns.extend(seat.here.step(answer) for answer in seat.answers[len(seat.turns) :])
        if seat.closes:
            seat.here.close()
        self._settled.append(seat)

    def _ended(self) -> list[Seat]:
        """Look once after every process."""
        ended, self._settled = self._settled, []
        for host in self._hosts:
            for seat, reply in host.advance() if host.busy else ():
                self._settle(seat, reply)
                ended.append(seat)
        return ended

    def _settle(self, seat: Seat, reply: Reply) -> None:
        what, detail = reply.wrong or ("", "")
        if not what:
            outcome, seat.begun = reply.turns, True
            if len(outcome) < len(seat.answers):  # only those to the answers that it had not seen
                outcome = seat.turns + outcome
            if reply.state is not None:
                seat.state = reply.state
            said = [(turn.done, turn.observation) for turn in seat.turns]
            if [(turn.done, turn.observation) for turn in outcome[: len(said)]] == said:
                seat.turns.extend(outcome[len(said) :])
                return
            what = "says other things to the same answers the second time"
            detail = "its process was lost, and it began anew"
        if seat.failure is None:  # the first is why
            name = self._sources[seat.prompt.source].environment
            seat.failure = Failure.of(seat.prompt, f"environment '{name}' {what}", detail)
        if not seat.begun:  # one prompt that hangs costs one time limit
            for host in self._hosts:
                host.leave_out(seat.group)


def record(seat: Seat) -> str | None:
    """Write down where an environment is, to bring it back in another process; None where only its answers can."""
    if seat.state is None or seat.failure is not None:
        return None
    return to_worker(Reply(seat.number, tuple(seat.turns), seat.state)).decode()
