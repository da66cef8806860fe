"""Hosts of environments: built-in ones live here, a user's own in processes that may be killed (see child.py).

Environments ──seats, spread──► Host ──one call at a time──► child: reset, step, close ──► Turns, or the error
                                 └── no answer in time, or it died: that seat fails; the others that lived there begin anew in
                                     a new child and are shown the answers that they had, which must lead to the same observations
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relax_hpc.environments.base import Environment, Turn
from relax_hpc.environments.channel import Channel, Wrong, from_child, to_child
from relax_hpc.environments.child import START, Call
from relax_hpc.environments.load import IN_PROCESS, code_folders, make_environments
from relax_hpc.recipe.sandbox import Sandbox
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.source import AnyPrompts
from relax_hpc.records import Failure, Prompt
from relax_hpc.sandbox.wrap import end, require, start

START_S = 120.0
"""Seconds within which a process must have imported the users' code."""
CLOSE_S = 5.0
"""Time limit in seconds of a close: its sample is over, or was given up."""
_HEARTBEAT_S = 0.5
"""Seconds between two calls of `progress` while environments are at work."""
Progress = Callable[[], None]


@dataclass(slots=True, eq=False)
class Seat:
    """The environment of one sample, in whichever process it lives."""

    number: int
    group: int
    prompt: Prompt
    here: Environment | None = None
    """A built-in environment, which lives in this process; None for a user's own."""
    answers: list[str] = field(default_factory=list)
    """All answers of the model that it was shown, or is to be shown next."""
    turns: list[Turn] = field(default_factory=list)
    """Its turn for each answer."""
    failure: Failure | None = None
    begun: bool = False
    """True once it was reset."""
    closes: bool = False
    """True once it is to be closed; nothing else is called any more."""


class Environments:
    """The environments of a recipe's sources. Raises RegistryError at construction for one that cannot be used."""

    def __init__(self, recipe: Recipe) -> None:
        self._sources, self._make = recipe.sources, make_environments(recipe.sources)
        limit_s = recipe.rollout.step_time_limit_s
        kinds: list[Sandbox] = []
        for source in self._sources:
            require(source.sandbox)
            if source.sandbox not in kinds:
                kinds.append(source.sandbox)
        self._processes = recipe.rollout.processes
        self._hosts = [Host(self._sources, limit_s, kind) for kind in kinds for _ in range(self._processes)]
        self._first = [kinds.index(source.sandbox) * self._processes for source in self._sources]
        """Number of the first host for each source: those in one sandbox share hosts."""
        self._numbers = itertools.count()
        self._settled: list[Seat] = []
        """Seats of built-in environments whose calls have ended, until `advance` tells."""

    def begin(self, prompts: Sequence[tuple[int, Prompt]]) -> list[Seat]:
        """Make an environment for each (group, prompt), and have it reset: `advance` tells when it is."""
        seats = [self._seat(group, prompt) for group, prompt in prompts]
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
            if host.busy and (found := host.advance()):
                seat, outcome = found
                self._settle(seat, outcome)
                ended.append(seat)
        return ended

    def _settle(self, seat: Seat, outcome: list[Turn] | Wrong) -> None:
        if isinstance(outcome, list):
            seat.begun = True
            said = [(turn.done, turn.observation) for turn in seat.turns]
            if [(turn.done, turn.observation) for turn in outcome[: len(said)]] == said:
                seat.turns.extend(outcome[len(said) :])
                return
            outcome = (
                "says other things to the same answers the second time",
                "its process was lost, and it began anew",
            )
        if seat.failure is None:  # the first is why
            what, detail = outcome
            name = self._sources[seat.prompt.source].environment
            seat.failure = Failure.of(seat.prompt, f"environment '{name}' {what}", detail)
        if not seat.begun:  # one prompt that hangs costs one time limit
            for host in self._hosts:
                host.leave_out(seat.group)


class Host:
    """The asking side of one child process, which is started when it is needed, and again after it was lost."""

    def __init__(self, sources: Sequence[AnyPrompts], limit_s: float, sandbox: Sandbox) -> None:
        """limit_s: time limit of each reset, step and close."""
        self._sources, self._limit_s, self._sandbox = sources, limit_s, sandbox
        self.queue: deque[Seat] = deque()
        self.connection: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """The folder of a sandboxed process."""
        self._ready, self._until = False, 0.0
        """`_ready`: the child has imported the users' code; `_until`: when it is given up, by time.monotonic()."""
        self._there: set[int] = set()
        """Numbers of the seats whose environments live in the child."""
        self._now: Seat | None = None
        self._doing = ""

    @property
    def busy(self) -> bool:
        """True while a call is under way or queued."""
        return bool(self._now or self.queue)

    def advance(self) -> tuple[Seat, list[Turn] | Wrong] | None:
        """Return a seat that was finished since the last call, with all of its turns or the error, and begin the next
        call; None where nothing was finished."""
        ended = self._look() if self._process is not None else None
        while self._now is None and self.queue and (self._ready or self._process is None):
            seat = self.queue[0]
            if seat.closes and seat.number not in self._there:
                self.queue.popleft()  # it never began, or is gone with its process
            elif self._process is None:
                self._start()
            else:
                self._begin(self.queue.popleft())
        return ended

    def leave_out(self, group: int) -> None:
        """Drop the queued resets of a group."""
        self.queue = deque(seat for seat in self.queue if seat.group != group or seat.begun)

    def abandon(self) -> None:
        """Drop all queued calls; a process in the middle of a call is ended."""
        self.queue.clear()
        if self._now is not None:
            self.close()

    def close(self) -> None:
        """End the process, whatever it is doing, with all that it started."""
        if self._process is not None and self.connection is not None:
            if self._sandbox.kind == "none":  # nobody asks it to end
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            end(self._process)
            self.connection.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self.connection = self._now = self._folder = None
        self._ready = False
        self._there.clear()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self.connection, apart = Channel(ours), self._sandbox.kind != "none"
        if apart:
            self._folder = tempfile.TemporaryDirectory(prefix="relax-environment-", ignore_cleanup_errors=True)
        command = [sys.executable, "-c", START, json.dumps(sys.path), str(0 if apart else os.getpid())]
        with theirs:
            self._process = start(
                self._sandbox, command, folder=Path(self._folder.name if self._folder else os.getcwd()), grace_s=0,
                readable=code_folders(self._sources), stdin=theirs,
            )  # fmt: skip
        with contextlib.suppress(OSError):  # it died at once: the next look finds that
            self.connection.send(to_child(list(self._sources)), START_S)
        self._doing, self._until = "import", time.monotonic() + START_S

    def _begin(self, seat: Seat) -> None:
        assert self.connection is not None
        closes = seat.closes
        new = seat.number not in self._there
        answers = () if closes else tuple(seat.answers if new else seat.answers[len(seat.turns) :])
        self._doing = "close" if closes else "step" if answers else "reset"
        allowed_s = min(CLOSE_S, self._limit_s) if closes else self._limit_s * max(1, len(answers) + new)
        self._until, self._now = time.monotonic() + allowed_s, seat
        self._there.add(seat.number)
        try:
            call = Call(seat.number, seat.prompt if new else None, answers, closes)
            self.connection.send(to_child(call), self._limit_s)
        except OSError:  # it died since: the next look finds that
            return
        if closes:
            self._there.discard(seat.number)

    def _look(self) -> tuple[Seat, list[Turn] | Wrong] | None:
        """Read the child's reply, if there is one. A late or dead child counts as lost."""
        assert self.connection is not None and self._process is not None
        try:
            if (message := self.connection.poll()) is None:
                if self._process.poll() is not None:
                    raise EOFError
                late = (self._now or not self._ready) and time.monotonic() > self._until
                key = " (rollout.step_time_limit_s)" if self._doing in ("reset", "step") else ""
                return self._lost(f"took longer than {self._limit_s:g} s in {self._doing}{key}") if late else None
            answer = from_child(message)
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
            return self._lost(f"died with exit status {end(self._process)} in {self._doing}")
        seat, self._now = self._now, None
        if seat is None or answer is None:
            self._ready = True
            return None
        if answer and isinstance(answer[0], str):
            return seat, (answer[0], str(answer[1]))
        turns = [turn for turn in answer if isinstance(turn, Turn)]
        return seat, seat.turns + turns if len(turns) < len(seat.answers) else turns

    def _lost(self, what: str) -> tuple[Seat, Wrong] | None:
        """Account for a lost process: its current call fails, all other environments in it begin anew."""
        seat = self._now or (self.queue.popleft() if self.queue and not self._ready else None)
        self.close()
        return (seat, (what, "")) if seat is not None else None
