"""The asking side of a process of environments (see child.py): calls go out, replies come back, in time or not at all.

queue of seats ──Call──► child ──Reply──► turns, or the error
  └── no reply in time, or it died: of one call under way, that seat fails; of several, each is tried again alone
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from relax_hpc.environments.base import Environment, Turn
from relax_hpc.environments.channel import Channel, Reply, from_child, to_child
from relax_hpc.environments.child import START, Call
from relax_hpc.environments.load import code_folders
from relax_hpc.recipe.sandbox import Sandbox
from relax_hpc.recipe.tables.source import AnyPrompts
from relax_hpc.records import Failure, Prompt
from relax_hpc.sandbox.wrap import end, start

START_S = 120.0
"""Seconds within which a process must have imported the users' code."""
CLOSE_S = 5.0
"""Time limit in seconds of a close: its sample is over, or was given up."""
GRACE_S = 2.0
"""Seconds within which a process of async environments must have ended a call that took too long."""


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
    state: Any = None
    """Its state after these turns, where it has one: it is brought back by this, not by the answers."""
    failure: Failure | None = None
    begun: bool = False
    """True once it was reset."""
    closes: bool = False
    """True once it is to be closed; nothing else is called any more."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A call that the child has not replied to."""

    seat: Seat
    call: Call
    until: float
    """When it is given up, by time.monotonic()."""


class Host:
    """The asking side of one child process, which is started when it is needed, and again after it was lost."""

    def __init__(self, sources: Sequence[AnyPrompts], limit_s: float, sandbox: Sandbox, at_once: bool) -> None:
        """limit_s: time limit of each reset, step and close; at_once: its environments are async, all calls go out at once."""
        self._sources, self._limit_s, self._sandbox, self._at_once = sources, limit_s, sandbox, at_once
        self.queue: deque[Seat] = deque()
        self.connection: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """The folder of a sandboxed process."""
        self._ready, self._start_until = False, 0.0
        """`_ready`: the child has imported the users' code; `_start_until`: when it is given up else."""
        self._there: set[int] = set()
        """Numbers of the seats whose environments live in the child."""
        self._under_way: dict[int, UnderWay] = {}
        self._suspects: set[int] = set()
        """Numbers of the seats that were under way when a process was lost: each is tried again alone."""

    @property
    def busy(self) -> bool:
        """True while a call is under way or queued."""
        return bool(self._under_way or self.queue)

    def advance(self) -> list[tuple[Seat, Reply]]:
        """Return the seats whose calls ended since the last time, and begin those that can be."""
        ended = self._look() if self._process is not None else []
        while self.queue and (self._process is None or (self._ready and self._can_begin(self.queue[0]))):
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
        if self._under_way:
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
        self._process = self.connection = self._folder = None
        self._ready = False
        self._there.clear()
        self._under_way.clear()

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
            self.connection.send(to_child((list(self._sources), self._at_once)), START_S)
        self._start_until = time.monotonic() + START_S

    def _can_begin(self, seat: Seat) -> bool:
        if not self._at_once or self._suspects & {seat.number, *self._under_way}:
            return not self._under_way
        return seat.number not in self._under_way

    def _begin(self, seat: Seat) -> None:
        assert self.connection is not None
        new, number = seat.number not in self._there, seat.number
        shown = len(seat.turns) if not new or seat.state is not None else 0
        answers = () if seat.closes else tuple(seat.answers[shown:])
        most_s = min(CLOSE_S, self._limit_s) if seat.closes else self._limit_s
        allowed_s = most_s * max(1, len(answers) + new)
        call = Call(number, seat.prompt if new else None, answers, seat.closes, seat.state if new else None, allowed_s)
        call = replace(call, late=self._late(call.doing))
        until = time.monotonic() + allowed_s + (GRACE_S if self._at_once else 0)
        self._under_way[number] = UnderWay(seat, call, until)
        self._there.add(number)
        try:
            self.connection.send(to_child(call), self._limit_s)
        except OSError:  # it died since: the next look finds that
            return
        if seat.closes:
            self._there.discard(number)

    def _late(self, doing: str) -> str:
        key = "" if doing in ("close", "import") else " (rollout.step_time_limit_s)"
        return f"took longer than {self._limit_s:g} s in {doing}{key}"

    def _look(self) -> list[tuple[Seat, Reply]]:
        """Read the child's replies. A late or dead child counts as lost."""
        assert self.connection is not None and self._process is not None
        ended: list[tuple[Seat, Reply]] = []
        try:
            while (message := self.connection.poll()) is not None:
                ended += self._replied(from_child(message))
            if self._process.poll() is not None:
                raise EOFError
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
            return ended + self._lost(f"died with exit status {end(self._process)} in {self._doing()}")
        untils = [one.until for one in self._under_way.values()] or ([] if self._ready else [self._start_until])
        return ended + (self._lost(self._late(self._doing())) if time.monotonic() > min(untils, default=inf) else [])

    def _doing(self) -> str:
        return next((one.call.doing for one in self._under_way.values()), "import")

    def _replied(self, reply: Reply) -> list[tuple[Seat, Reply]]:
        if reply.seat is None and reply.wrong is None:
            self._ready = True
            return []
        if reply.seat is None and len(self._under_way) == 1:  # what cannot be read is the answer to the one call
            [number] = self._under_way
        else:
            number = -1 if reply.seat is None else reply.seat
        if number not in self._under_way:
            raise EOFError  # a reply that nobody waits for: the process is not to be trusted
        self._suspects.discard(number)
        return [(self._under_way.pop(number).seat, reply)]

    def _lost(self, what: str) -> list[tuple[Seat, Reply]]:
        """Account for a lost process: the one call under way fails, all other environments in it begin anew."""
        seats = [one.seat for one in self._under_way.values()]
        if not seats and self.queue and not self._ready:
            seats = [self.queue.popleft()]
        self.close()
        if len(seats) <= 1:
            return [(seat, Reply(seat.number, (what, ""))) for seat in seats]
        self._suspects |= {seat.number for seat in seats}
        self.queue.extendleft(reversed(seats))
        return []
