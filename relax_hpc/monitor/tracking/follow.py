"""The follower: a process beside a run that copies its metrics into sinks and sends messages about it.

metrics/*.jsonl ──new lines, in order of time──► points ──► sinks
                                             └──► alerts ──► messages

The lines are the truth and the run waits for nobody here: a follower that dies is started again a few times, and makes its
sinks anew from the first line. A sink that fails is left; what was sent is written down, so that nothing is sent twice.
"""

from __future__ import annotations

import heapq
import logging
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.tracking.alerts import Alert, Alerts
from relax_hpc.monitor.tracking.messages import Messenger, addresses, targets
from relax_hpc.monitor.tracking.points import Points
from relax_hpc.monitor.tracking.sinks import Sink, make_sink
from relax_hpc.recipe import load_recipe
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.tracking import Notify
from relax_hpc.telemetry import iter_metrics

LOOK_S = 5.0
"""Seconds between two looks for new lines: each costs a stat for each role's file, on a shared file system."""
NICE = 10


class Lines:
    """New lines of all metrics files, merged by their times."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._offsets: dict[str, int] = {}

    def new(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (role, line) for each line added since the last call."""
        with os.scandir(self._run.metrics) as entries:
            grown = [
                entry.name.removesuffix(".jsonl")
                for entry in entries
                if entry.name.endswith(".jsonl") and entry.stat().st_size > self._offsets.get(entry.name[:-6], 0)
            ]
        roles = sorted(role for role in grown if not role.endswith(".trained"))
        yield from heapq.merge(*map(self._of, roles), key=lambda pair: float(pair[1].get("time", 0.0)))

    def _of(self, role: str) -> Iterator[tuple[str, dict[str, Any]]]:
        for line, behind in iter_metrics(self._run.metrics / f"{role}.jsonl", self._offsets.get(role, 0)):
            self._offsets[role] = behind
            yield role, line


class Follower:
    """Copies new metrics into the sinks and sends alerts, each time that it looks."""

    def __init__(self, run: RunDir, recipe: Recipe, since: float | None = None) -> None:
        """since: Unix time at which our supervisor began, from which on alerts are sent; None: no alerts."""
        self.log = logging.getLogger("tracking")
        self.lines, self.points = Lines(run), Points()
        self.sinks: dict[str, Sink] = {}
        for config in recipe.tracking:
            try:
                self.sinks[config.name] = make_sink(config, run, recipe)
            except Exception:  # any error of a library; the other sinks go on
                self.log.exception("%s does not begin", config.name)
        self.alerts, self.messenger = Alerts(recipe.notify or Notify()), None
        if recipe.notify is not None and since is not None:
            try:
                urls = addresses(recipe.notify, recipe.run.root)
                self.messenger = Messenger(run, recipe.run.name, targets(urls), since)
            except RunError as error:
                self.log.error("nobody is told anything: %s", error)

    def look(self) -> None:
        """Copy what is new, and send alerts about it."""
        for role, line in self.lines.new():
            self._tell(self.alerts.of(role, line))
            for point in self.points.of(line):
                self._all("add", point)
        self._all("flush")
        self._tell(self.alerts.stalled())
        if self.messenger is not None:
            self.messenger.send()

    def _tell(self, alerts: Iterator[Alert]) -> None:
        if self.messenger is not None:
            for alert in alerts:
                self.messenger.put(alert)

    def close(self) -> list[str]:
        """Close the sinks; return for each what a person does with it."""
        if self.messenger is not None:
            self.messenger.close()
        self._all("close")
        return [sink.where for sink in self.sinks.values()]

    def _all(self, what: str, *arguments: Any) -> None:
        for name, sink in list(self.sinks.items()):
            try:
                getattr(sink, what)(*arguments)
            except Exception:
                self.log.exception("%s failed and is left until the follower starts again", name)
                del self.sinks[name]


def follow(run: RunDir, supervisor: int, since: float) -> None:
    """Follow the run until the supervisor says to stop or is gone; then copy what is left and close the sinks."""
    ending = False

    def end(number: int, frame: Any) -> None:
        nonlocal ending
        ending = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the supervisor decides
    os.nice(NICE)
    follower = Follower(run, load_recipe(run.recipe), since)
    while not ending and os.getppid() == supervisor:
        follower.look()
        waited = time.monotonic()
        while not ending and time.monotonic() - waited < LOOK_S and os.getppid() == supervisor:
            time.sleep(0.1)
    follower.look()
    follower.close()
