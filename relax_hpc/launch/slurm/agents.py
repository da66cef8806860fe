"""The agents of a run as its leader sees them, wherever they live: by their heartbeats alone.

heartbeats/agent-*.json ──► who works, who was lost ──► their claims are open again
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_hpc.launch.agent import CORE
from relax_hpc.launch.slurm.overview import is_agent
from relax_hpc.recipe.schema import Recipe
from relax_hpc.run_dir import RunDir
from relax_hpc.spool.queue import Queue
from relax_hpc.telemetry import Telemetry, read_beat

BLIND_S = 3.0
"""When two looks are so far apart, what was not seen in between counts for nothing."""


@dataclass(slots=True)
class Seen:
    """An agent's heartbeat, and when it last changed by our own clock."""

    beat: dict[str, Any]
    changed: float


class Agents:
    """All agents of a run, by their heartbeats; gives back what the dead had claimed."""

    def __init__(self, run: RunDir, recipe: Recipe, telemetry: Telemetry) -> None:
        self._run, self._limit_s, self._telemetry = run, recipe.supervision.agent_silent_s, telemetry
        self._queue = Queue(run)
        self._seen: dict[str, Seen] = {}
        self._looked_at = time.monotonic()
        self._ended_jobs: set[str] = set()
        self._failed: set[str] = set()
        self._unowned: dict[str, float] = {}
        """Workplaces that no agent speaks of, and since when."""
        self._at_first = {path.stem: (read_beat(run, path.stem) or {}).get("time") for path in self._paths()}
        """Of agents that were there before us."""

    def read(self) -> Agents:
        """Read the heartbeats; itself."""
        began = time.monotonic()
        for path in self._paths():
            if path.stem in self._seen and self._is_over(self._seen[path.stem].beat):
                continue  # its name is never used again: what lies there of jobs long gone is not read each time
            beat = read_beat(self._run, path.stem)
            if (
                beat is not None
                and is_agent(beat)
                and (path.stem not in self._seen or self._seen[path.stem].beat["time"] != beat["time"])
            ):
                self._seen[path.stem] = Seen(beat, time.monotonic())
        now = time.monotonic()
        blind_s = now - self._looked_at
        if blind_s > BLIND_S:  # we stood still, or the file system did: that is not their silence
            for seen in self._seen.values():
                seen.changed = max(seen.changed, began)
            self._unowned = dict.fromkeys(self._unowned, now)
        self._looked_at = now
        return self

    def look(self) -> None:
        """Read the heartbeats, and give back the claims of workers that are gone: for who holds the lease."""
        self.read()
        now = time.monotonic()
        owner = {w: name for name, seen in self._seen.items() for w in seen.beat["workplaces"]}
        left = {w: lost for seen in self._seen.values() for w, lost in seen.beat["left"].items()}
        alive = self.alive()
        for workplace in self._queue.workers():
            if workplace in left:
                self._give_back(workplace, left[workplace], "its worker ended")
            elif workplace not in owner:
                # Just made, and its agent has not said so yet; or of an agent whose heartbeat was replaced.
                if now - self._unowned.setdefault(workplace, now) > self._limit_s:
                    self._give_back(workplace, False, "no agent speaks of it")
            elif owner[workplace] not in alive:
                self._give_back(workplace, False, f"{owner[workplace]} fell silent")  # not a fault of its orders

    def alive(self) -> list[str]:
        """The agents that were heard of lately."""
        now = time.monotonic()
        return [
            name
            for name, seen in self._seen.items()
            if not self._is_over(seen.beat) and now - seen.changed < self._limit_s
        ]

    def _is_over(self, beat: dict[str, Any]) -> bool:
        return beat["state"] == "gone" or beat.get("job") in self._ended_jobs

    def job_ended(self, job: str) -> None:
        """Slurm says that a job is gone: its agents need not fall silent first."""
        self._ended_jobs.add(job)

    def worked(self, job: str) -> bool:
        """Whether a worker of this job published an order."""
        return any(seen.beat.get("orders") and seen.beat.get("job") == job for seen in self._seen.values())

    def left(self, name: str) -> bool:
        """Whether an agent said that it leaves as its last word: it ended in order, and is not silent."""
        return name in self._seen and self._seen[name].beat["state"] == "gone"

    def of(self, step: str, index: int) -> tuple[str, dict[str, Any]] | None:
        """Name and heartbeat of the agent of a step on its node `index`; None before its first."""
        found = ((n, s.beat) for n, s in self._seen.items() if s.beat.get("step") == step and s.beat["index"] == index)
        return next(found, None)

    def failed(self) -> list[dict[str, Any]]:
        """Heartbeats of agents of the core group that could not go on, each once, since we look."""
        found = []
        for name, seen in self._seen.items():
            new = seen.beat["time"] != self._at_first.get(name) and name not in self._failed
            if seen.beat["failure"] and seen.beat["group"] == CORE and new:
                self._failed.add(name)
                found.append(seen.beat)
        return found

    def _paths(self) -> Iterable[Path]:
        return self._run.heartbeats.glob("agent-*.json")

    def _give_back(self, workplace: str, lost: bool, reason: str) -> None:
        given = self._queue.give_back(workplace, lost)
        self._unowned.pop(workplace, None)
        self._telemetry.metrics("lost" if lost else "left", role=workplace, reason=reason, orders_given_back=given)
