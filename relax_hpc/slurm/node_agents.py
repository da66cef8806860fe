"""All node agents of a run as the leader sees them: through their heartbeats alone, wherever they run.

heartbeats/node-agent-*.json ──► who works, who was lost ──► their claims are open again
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.slurm.node_agent import BASE
from relax_hpc.slurm.overview import is_node_agent
from relax_hpc.spool.queue import Queue
from relax_hpc.telemetry import Telemetry, read_heartbeat

BLIND_S = 3.0
"""When two looks are further apart than this, the gap counts as nobody's silence."""


@dataclass(slots=True)
class Seen:
    """A node agent's heartbeat, and when it last changed by our own clock."""

    heartbeat: dict[str, Any]
    changed: float


class NodeAgents:
    """Reads the heartbeats of all node agents of a run; gives back what dead workers had claimed."""

    def __init__(self, run: RunDir, recipe: Recipe, telemetry: Telemetry) -> None:
        self._run, self._limit_s, self._telemetry = run, recipe.supervision.node_agent_silent_s, telemetry
        self._queue = Queue(run)
        self._seen: dict[str, Seen] = {}
        self._looked_at = time.monotonic()
        self._ended_jobs: set[str] = set()
        self._failed: set[str] = set()
        self._unowned: dict[str, float] = {}
        """Claim directory that no node agent lists -> since when, by our own clock."""
        self._at_first = {path.stem: (read_heartbeat(run, path.stem) or {}).get("time") for path in self._paths()}
        """Node agent -> time in the heartbeat that was there before we began to look."""

    def read(self) -> NodeAgents:
        """Read the heartbeats and return self."""
        began = time.monotonic()
        for path in self._paths():
            if path.stem in self._seen and self._is_over(self._seen[path.stem].heartbeat):
                continue  # its name is never used again: files of jobs long gone are not read each time
            heartbeat = read_heartbeat(self._run, path.stem)
            if (
                heartbeat is not None
                and is_node_agent(heartbeat)
                and (path.stem not in self._seen or self._seen[path.stem].heartbeat["time"] != heartbeat["time"])
            ):
                self._seen[path.stem] = Seen(heartbeat, time.monotonic())
        now = time.monotonic()
        blind_s = now - self._looked_at
        if blind_s > BLIND_S:  # we stood still, or the file system did: that is not their silence
            for seen in self._seen.values():
                seen.changed = max(seen.changed, began)
            self._unowned = dict.fromkeys(self._unowned, now)
        self._looked_at = now
        return self

    def look(self) -> None:
        """Read the heartbeats, and give back the claims of workers that are gone.

        Only the holder of the lease may call this.
        """
        self.read()
        now = time.monotonic()
        owner = {w: name for name, seen in self._seen.items() for w in seen.heartbeat["claim_dirs"]}
        left = {w: lost for seen in self._seen.values() for w, lost in seen.heartbeat["left"].items()}
        alive = self.alive()
        for claim_dir in self._queue.workers():
            if claim_dir in left:
                self._give_back(claim_dir, left[claim_dir], "its worker ended")
            elif claim_dir not in owner:
                # Just made and not yet listed by its node agent, or left by one whose heartbeat was replaced.
                if now - self._unowned.setdefault(claim_dir, now) > self._limit_s:
                    self._give_back(claim_dir, False, "no node agent speaks of it")
            elif owner[claim_dir] not in alive:
                self._give_back(claim_dir, False, f"{owner[claim_dir]} fell silent")  # not a fault of its requests

    def alive(self) -> list[str]:
        """Names of the node agents whose heartbeat changed lately."""
        now = time.monotonic()
        return [
            name
            for name, seen in self._seen.items()
            if not self._is_over(seen.heartbeat) and now - seen.changed < self._limit_s
        ]

    def _is_over(self, heartbeat: dict[str, Any]) -> bool:
        return heartbeat["state"] == "gone" or heartbeat.get("job") in self._ended_jobs

    def job_ended(self, job: str) -> None:
        """Note that Slurm says a job is gone: its node agents need not fall silent first."""
        self._ended_jobs.add(job)

    def worked(self, job: str) -> bool:
        """Return True if a worker of this job published a request."""
        return any(seen.heartbeat.get("requests") and seen.heartbeat.get("job") == job for seen in self._seen.values())

    def left(self, name: str) -> bool:
        """Return True if the node agent's last heartbeat says that it left in order; it is not silent then."""
        return name in self._seen and self._seen[name].heartbeat["state"] == "gone"

    def of(self, step: str, index: int) -> tuple[str, dict[str, Any]] | None:
        """(name, heartbeat) of the node agent of a step on its node `index`; None before its first heartbeat."""
        found = (
            (n, s.heartbeat)
            for n, s in self._seen.items()
            if s.heartbeat.get("step") == step and s.heartbeat["index"] == index
        )
        return next(found, None)

    def failed(self) -> list[dict[str, Any]]:
        """Heartbeats of base node agents that could not go on: each once, and only those newer than our first look."""
        found = []
        for name, seen in self._seen.items():
            new = seen.heartbeat["time"] != self._at_first.get(name) and name not in self._failed
            if seen.heartbeat["failure"] and seen.heartbeat["group"] == BASE and new:
                self._failed.add(name)
                found.append(seen.heartbeat)
        return found

    def _paths(self) -> Iterable[Path]:
        return self._run.heartbeats.glob("node-agent-*.json")

    def _give_back(self, claim_dir: str, lost: bool, reason: str) -> None:
        given = self._queue.give_back(claim_dir, lost)
        self._unowned.pop(claim_dir, None)
        self._telemetry.metrics("lost" if lost else "left", role=claim_dir, reason=reason, requests_given_back=given)
