"""Restarts: how often something that was lost is started again and when, and process groups that are kept running so."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from relax_hpc.recipe.tables.run import Supervision
from relax_hpc.supervise.processes import Ended, ProcessGroup

LONGEST_BACKOFF_S = 60.0
GRACE_S = 5.0
"""How long processes may take to leave when asked to; what a worker was generating is generated again."""


@dataclass(slots=True)
class RestartPolicy:
    """How often something was restarted without progress, and when it may be started again."""

    limits: Supervision
    failures: int = 0
    last_progress: Any = None
    not_before: float = 0.0
    """Earliest time of the next start, by time.monotonic()."""
    errors: frozenset[str] = frozenset()
    """The errors, each with its place, with which its processes last failed to begin."""
    again: str = ""
    """The error that kept it from beginning twice in a row at the same place: the next start would meet it too. Empty
    where that is not so.
    """

    @property
    def due(self) -> bool:
        """Return True if it may be started now."""
        return time.monotonic() >= self.not_before

    def failed(self, progress: Any, *heartbeats: Mapping[str, Any]) -> bool:
        """Note a failure and return True if it may be started again; False when the recipe allows no further restart.

        `progress`: a number that grows as the failed process does its work; only a new maximum counts. None: it did
        none. `heartbeats`: the last heartbeat of each of its processes.
        """
        if progress is not None and (self.last_progress is None or progress > self.last_progress):
            self.failures, self.last_progress = 0, progress
        self.failures += 1
        said = {f"{beat.get('error')} ({beat['place']})": beat for beat in heartbeats if beat.get("place")}
        same = sorted(self.errors & said.keys())
        self.again = "; ".join(f"{error} on {said[error].get('host', 'an unknown node')}" for error in same)
        self.errors = frozenset(said)
        if self.again:
            return False
        wait_s = min(self.limits.backoff_s * 2 ** (self.failures - 1), LONGEST_BACKOFF_S)
        self.not_before = time.monotonic() + (wait_s if self.failures > 1 else 0.0)
        return self.failures <= self.limits.max_restarts

    def exhausted(self, name: str, reason: str, error: str, log: Path) -> str:
        """The message for when the restart policy gives up."""
        if self.again:
            return (
                f"{name} cannot begin: twice the same error, {self.again}; mend what it names, then go on with the run; its "
                f"log: {log}"
            )
        return (
            f"{name} was lost {self.failures} times without progress (supervision.max_restarts = "
            f"{self.limits.max_restarts}), last: {reason}; {error}; its log: {log}"
        )


class Workers(Protocol):
    """Companions of the trainer as its supervisor sees them: a rollout worker, the scorers, all jobs of rollouts."""

    failure: str
    """Why the run cannot go on; empty while it can."""
    suspect: str
    """The host on which the failure happened, when it is known and may be the cause; else empty."""
    fatal: bool
    """True if a person must do something first: a start elsewhere would fail the same way."""

    def look_after(self) -> None:
        """Start what is missing and give back what dead workers had claimed; to be called often."""

    def ask_to_stop(self) -> None: ...

    def end(self, grace_s: float) -> None: ...


class KeptGroup:
    """A process group that is started again after each loss, as long as the restart policy allows."""

    may_end = False
    """True if the group may be done, or stop, by itself: that is no loss."""

    def __init__(self, group: ProcessGroup, say: Callable[..., None], *arguments: str) -> None:
        """say: writes an event down; arguments: of each start."""
        self.group, self._say, self._arguments = group, say, arguments
        self.restarts = RestartPolicy(group.limits)
        self.failure, self.suspect, self.fatal, self._asked = "", "", False, False
        self.ended: Ended | None = None
        """How it ended for good."""

    def look_after(self) -> None:
        if self.group.started:
            if self.ended is None and (ended := self.group.poll()) is not None:
                self._ended(ended)
        elif self.restarts.due and not self._asked and not self.failure:
            self._start()

    def _start(self) -> None:
        self.group.start(*self._arguments)
        self._say("restart", role=self.group.name, attempt=self.group.attempt)

    def _ended(self, ended: Ended) -> None:
        group = self.group
        final = ended.outcome == "failed" or self._asked or (self.may_end and ended.outcome is not None)
        if not final:
            group.stop(0)
        # Where the file system refuses one of these, the end is noticed again.
        heartbeats, gone = group.heartbeats(), self._gone(ended.outcome != "stopped")
        if final:  # what is left of it has the time that `end` gives
            self.ended, self.fatal = ended, ended.outcome == "failed"
            self.failure = ended.reason if self.fatal else ""
            return
        self._say("lost", role=group.name, reason=ended.reason, **gone)
        if not self.restarts.failed(self._progress(heartbeats), *heartbeats):
            self.failure = self.restarts.exhausted(group.name, ended.reason, group.error(), group.log())
            self.suspect, self.fatal = ended.host, bool(self.restarts.again)
        group.forget()

    def _gone(self, lost: bool) -> dict[str, Any]:
        """Tidy up after the group, which was lost or left in order; return what the event of a loss tells besides."""
        return {}

    def _progress(self, heartbeats: list[dict[str, Any]]) -> Any:
        """A number that grows with what the group has done; None where it did nothing in this attempt."""
        done = sum(beat.get("requests", 0) + beat.get("learned", 0) for beat in heartbeats)
        return (self.group.attempt, done) if done else None

    def ask_to_stop(self) -> None:
        if not self._asked:
            self._asked = True
            self.group.ask_to_stop()

    def end(self, grace_s: float) -> None:
        self.ask_to_stop()
        self.group.stop(grace_s)


class Together:
    """Several kinds of workers, looked after as one."""

    def __init__(self, parts: Sequence[Workers]) -> None:
        self._parts = parts

    @property
    def failed(self) -> Workers | None:
        """The first part that cannot go on; None while all can."""
        return next((part for part in self._parts if part.failure), None)

    def look_after(self) -> None:
        for part in self._parts:
            part.look_after()

    def ask_to_stop(self) -> None:
        for part in self._parts:
            part.ask_to_stop()

    def end(self, grace_s: float) -> None:
        self.ask_to_stop()
        for part in self._parts:
            part.end(grace_s)
