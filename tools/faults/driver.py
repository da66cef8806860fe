"""Drives a real run on a mounted fault file system: one call after another is armed, met and survived.

    arm a point ► somebody makes that call ► it is killed, stopped, refused, or its reply lost ► what died is started again as a
    requeued job would be ► the ledger grows ► the next point

A point that no call meets in time is missed, and said so: it never counts as passed. All changes are noted in the log, whoever
makes them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tools.faults.command import Command
from tools.faults.faultfs import Action, Rule
from tools.faults.schedules import CHANGES, Call, Kind

HIT_S = 40.0
"""How long a point waits to be met."""
AGAIN_S = 5.0
"""How long it waits before what it depends on is brought about once more."""
ZOMBIES = ("trainer", "rollout", "scorer", "critic")
"""Roles that can be stopped while another supervisor takes their run over."""
NOTES = tuple(Rule(op, "", "note", 1.0) for op in CHANGES)


@dataclass(frozen=True)
class Point:
    """One call of one kind of commit, and what becomes of it."""

    kind: Kind
    call: Call
    action: Action
    error: int = 0

    def __str__(self) -> str:
        how = f"{self.action} ({os.strerror(self.error)})" if self.error else self.action
        return f"{self.kind.name}: {self.call}: {how}"

    def rule(self, run: str) -> Rule:
        process = f"relax_hpc {self.kind.role}" if self.kind.role in ZOMBIES else ""
        return Rule(self.call.op, self.call.regex(run), self.action, error=self.error, process=process)


@dataclass
class Driver:
    """Meets points in one run."""

    command: Command
    met: list[Point] = field(default_factory=list)
    missed: list[Point] = field(default_factory=list)
    done: Callable[[], None] = lambda: None
    """Called after each point."""

    def arm(self, points: Sequence[Point]) -> None:
        self.command.disk.rules(*(point.rule(self.command.name) for point in points), *NOTES)

    def counts(self, points: Sequence[Point]) -> list[bool]:
        """Which of the armed points were met."""
        return [hits > 0 for _, hits in self.command.disk.counts()[: len(points)]]

    def begin(self, points: Sequence[Point]) -> None:
        """Start the run with these points armed, and have it make some steps."""
        self.arm(points)
        self.command.start()
        self.command.until(lambda: self.command.steps() > 0, 300)
        self.command.goes_on(3)
        self._count(points)

    def meet(self, points: Sequence[Point]) -> None:
        """Arm points of one kind, bring about what they need, have them met, and see the run survive."""
        start = self.command.disk.log.stat().st_size
        self.arm(points)
        try:
            deadline, again = time.monotonic() + HIT_S, 0.0
            while not all(met := self.counts(points)) and time.monotonic() < deadline:
                if time.monotonic() > again:
                    self._bring_about(points[0].kind.begins)
                    again, deadline = time.monotonic() + AGAIN_S, max(deadline, time.monotonic() + AGAIN_S)
                self.command.until(lambda met=met: self.counts(points) != met, AGAIN_S)  # type: ignore[misc]
            if points[0].action.startswith("stop"):
                self._let_others_go_on(self._stopped(start))
            self._count(points)
        finally:
            self.arm([])
            for pid in self._stopped(start):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        self.command.goes_on()

    def _count(self, points: Sequence[Point]) -> None:
        for point, met in zip(points, self.counts(points), strict=True):
            (self.met if met else self.missed).append(point)
            self.done()

    def _bring_about(self, begins: str) -> None:
        """Have something begin, so that its commits are made."""
        if begins == "":
            return
        if begins in ("end", "again"):
            self.command.stop()
        elif begins == "change":
            self.command.change()
        else:
            self.command.kill(begins)

    def _stopped(self, start: int) -> set[int]:
        return {hit.pid for hit in self.command.disk.hits(start) if hit.action.startswith("stop")}

    def _let_others_go_on(self, stopped: set[int]) -> None:
        """Have another supervisor take the run over while a process of the first stands in the middle of a call."""
        process = self.command.process
        if stopped and process is not None:
            process.kill()
            process.wait()
            self.command.goes_on(2)

    def storm(self, rules: Sequence[Rule], errors: int, limit_s: float) -> int:
        """Let errors come by chance until there were so many; return their number."""
        self.command.disk.rules(*rules, *NOTES)
        count: Callable[[], int] = lambda: sum(hits for _, hits in self.command.disk.counts()[: len(rules)])
        self.command.until(lambda: count() >= errors, limit_s)
        found = count()
        self.arm([])
        self.command.goes_on()
        return found
