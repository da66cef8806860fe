"""The rollout nodes of a run as the leader sees them: by the heartbeats of their node agents alone, wherever they run.

heartbeats/node-agent-*.json ──► who works, who was lost ──► their claims are open again
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from relax_hpc.files.publish import names
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.slurm.node_agent import BASE
from relax_hpc.slurm.overview import is_node_agent
from relax_hpc.spool.queue import RequestQueue
from relax_hpc.supervise.heartbeat_monitor import HeartbeatMonitor
from relax_hpc.telemetry import Telemetry, read_heartbeat


class RolloutNodes:
    """Reads the heartbeats of all node agents of a run; gives back what dead workers had claimed."""

    def __init__(self, run: RunDir, recipe: Recipe, telemetry: Telemetry) -> None:
        self._run, self._limit_s, self._telemetry = run, recipe.supervision.node_agent_silent_s, telemetry
        self._queue = RequestQueue(run)
        self._heard: dict[str, dict[str, Any]] = {}
        """Node agent -> its last heartbeat."""
        self._silent_s: dict[str, float] = {}
        """Node agent that is not over -> seconds since its heartbeat was seen to change."""
        self._monitor, self._owners = HeartbeatMonitor(), HeartbeatMonitor()
        self._ended_jobs: set[str] = set()
        self._failed: set[str] = set()
        self._at_first = {path.stem: (read_heartbeat(run, path.stem) or {}).get("time") for path in self._paths()}
        """Node agent -> time in the heartbeat that was there before we began to look."""

    def read(self) -> RolloutNodes:
        """Read the heartbeats and return self."""
        for path in self._paths():
            if path.stem in self._heard and self._is_over(self._heard[path.stem]):
                continue  # its name is never used again: files of jobs long gone are not read each time
            heartbeat = read_heartbeat(self._run, path.stem)
            if heartbeat is not None and is_node_agent(heartbeat):
                self._heard[path.stem] = heartbeat
        self._silent_s = self._monitor.look(
            {name: heartbeat["time"] for name, heartbeat in self._heard.items() if not self._is_over(heartbeat)}
        )
        return self

    def look(self) -> None:
        """Read the heartbeats, and give back the claims of workers that are gone.

        Only the holder of the lease may call this.
        """
        alive = self.read().alive()
        owner = {w: name for name, heartbeat in self._heard.items() for w in heartbeat["claim_dirs"]}
        left = {w: lost for heartbeat in self._heard.values() for w, lost in heartbeat["left"].items()}
        for claim_dir, unchanged_s in self._owners.look({w: owner.get(w) for w in self._queue.workers()}).items():
            if claim_dir in left:
                self._give_back(claim_dir, left[claim_dir], "its worker ended")
            elif claim_dir not in owner:
                # Just made and not yet listed by its node agent, or left by one whose heartbeat was replaced.
                if unchanged_s > self._limit_s:
                    self._give_back(claim_dir, False, "no node agent speaks of it")
            elif owner[claim_dir] not in alive:
                self._give_back(claim_dir, False, f"{owner[claim_dir]} fell silent")  # not a fault of its requests

    def alive(self) -> list[str]:
        """Names of the node agents whose heartbeat changed lately."""
        return [
            name
            for name, silent_s in self._silent_s.items()
            if silent_s < self._limit_s and not self._is_over(self._heard[name])
        ]

    def _is_over(self, heartbeat: dict[str, Any]) -> bool:
        return heartbeat["state"] == "gone" or heartbeat.get("job") in self._ended_jobs

    def job_ended(self, job: str) -> None:
        """Note that Slurm says a job is gone: its node agents need not fall silent first."""
        self._ended_jobs.add(job)

    def worked(self, job: str) -> bool:
        """Return True if a worker of this job published a request."""
        return any(heartbeat.get("requests") and heartbeat.get("job") == job for heartbeat in self._heard.values())

    def left(self, name: str) -> bool:
        """Return True if the node agent's last heartbeat says that it left in order; it is not silent then."""
        return name in self._heard and self._heard[name]["state"] == "gone"

    def of(self, step: str, index: int) -> tuple[str, dict[str, Any]]:
        """(name, heartbeat) of the node agent of a step on its node `index`; both empty before its first heartbeat."""
        found = ((n, h) for n, h in self._heard.items() if h.get("step") == step and h["index"] == index)
        return next(found, ("", {}))

    def failed(self) -> list[dict[str, Any]]:
        """Heartbeats of base node agents that could not go on: each once, and only those newer than our first look."""
        found = []
        for name, heartbeat in self._heard.items():
            new = heartbeat["time"] != self._at_first.get(name) and name not in self._failed
            if heartbeat["failure"] and heartbeat["group"] == BASE and new:
                self._failed.add(name)
                found.append(heartbeat)
        return found

    def _paths(self) -> Iterable[Path]:
        # Not by Path.glob: to it a folder that cannot be listed now is empty, and all node agents would be silent.
        folder = self._run.heartbeats
        return [folder / name for name in fnmatch.filter(names(folder), "node-agent-*.json")]

    def _give_back(self, claim_dir: str, lost: bool, reason: str) -> None:
        given = self._queue.give_back(claim_dir, lost)
        self._telemetry.metrics("lost" if lost else "left", role=claim_dir, reason=reason, requests_given_back=given)
