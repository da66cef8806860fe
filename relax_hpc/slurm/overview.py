"""A run's jobs and rollout node agents, for a person: from its files, and from Slurm where it can be asked.

slurm/jobs/*.json + squeue   ──► jobs (state, nodes, why they wait, expected start) ┐
slurm/leaders.jsonl          ──► restarts, what comes next                          ├─► Overview
heartbeats/node-agent-*.json ──► node agents of the rollout nodes                   │
metrics/chain, supervisor    ──► what Slurm refused                                 ┘
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.files.run_dir import RunDir
from relax_hpc.slurm.client import ALIVE, WAITING, Seen, look, reason_in_words
from relax_hpc.slurm.plan import SETUP_FAILED
from relax_hpc.slurm.submission.sbatch import jobs, read_leaders
from relax_hpc.telemetry import read_heartbeat, read_metrics

UNKNOWN = "?"
SENT = ("queued", "restart", "scale")
"""Kinds of metrics by which a leader says that Slurm took a job."""
SHOWN_ENDED, SHOWN_UNKNOWN = 3, 8
"""How many jobs to show of those that have ended, and of those whose state is unknown: only the last ones."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job of the run."""

    id: str
    kind: str
    state: str
    """As squeue spells it; GONE when Slurm has forgotten the job, "?" where it cannot be asked."""
    why: str = ""
    """Why it waits, or why it ended before it began to work, in words."""
    nodes: str = ""
    start: str = ""
    """When Slurm expects it to start, or when it started; empty where Slurm does not say."""

    @property
    def alive(self) -> bool:
        return self.state in ALIVE

    @property
    def waits(self) -> bool:
        return self.state in WAITING


@dataclass(slots=True)
class Overview:
    """The Slurm side of a run at one moment."""

    run: RunDir
    jobs: list[JobRow] = field(default_factory=list)
    node_agents: dict[str, dict[str, Any]] = field(default_factory=dict)
    led: list[str] = field(default_factory=list)
    """Jobs that led the run since a person last sent it, the newest last."""
    refused: dict[str, str] = field(default_factory=dict)
    """Role ("successor", "rollout job", "elastic job") -> why Slurm refused its job when it was last sent."""
    ask_every_s: float = 30.0
    """Seconds between two questions to Slurm: its controller serves thousands of users, and a live view is open for
    hours.
    """
    _asked_at: float | None = None
    _offsets: dict[str, int] = field(default_factory=dict)

    def refresh(self) -> None:
        """Read the files; ask Slurm again when its last answer is old."""
        self.node_agents = {
            path.stem: heartbeat
            for path in sorted(self.run.heartbeats.glob("node-agent-*.json"))
            if (heartbeat := self._gone(path.stem) or read_heartbeat(self.run, path.stem)) is not None
            and is_node_agent(heartbeat)
        }
        self.led = [leader["job"] for leader in read_leaders(self.run)]
        for name in ("chain", "supervisor"):
            self._note_refused(name)
        if self._asked_at is None or time.monotonic() - self._asked_at > self.ask_every_s:
            # Rollout jobs are not requeued: once over, they are not asked for again.
            over = [job for job in self.jobs if job.kind != "leader" and not job.alive and job.state != UNKNOWN]
            self.jobs = job_rows(self.run, over)
            self._asked_at = time.monotonic()

    def _gone(self, agent: str) -> dict[str, Any] | None:
        """The final heartbeat of a node agent that has left; None for one that has not."""
        heartbeat = self.node_agents.get(agent)
        return heartbeat if heartbeat is not None and heartbeat["state"] == "gone" else None

    def _note_refused(self, name: str) -> None:
        records, self._offsets[name] = read_metrics(self.run.metrics / f"{name}.jsonl", self._offsets.get(name, 0))
        for record in records:
            if record["kind"] == "refused":
                self.refused[record["role"]] = record["reason"]
            elif record["kind"] in SENT:
                self.refused.pop(record.get("role", ""), None)

    @property
    def restarts(self) -> int:
        """How often the run went on in another job, or again in the same one."""
        return max(0, len(self.led) - 1)

    @property
    def successor(self) -> JobRow | None:
        """The leader that begins when the one at work ends."""
        first = self.led[-1:] or [job.id for job in self.leaders[:1]]
        return next((job for job in self.leaders if job.waits and job.id not in first), None)

    @property
    def leaders(self) -> list[JobRow]:
        """Leader jobs in the queue or at work, and those of which that is unknown since Slurm could not be asked."""
        return [job for job in self.jobs if job.kind == "leader" and (job.alive or job.state == UNKNOWN)]

    def waits_for(self, ended: str | None) -> str | None:
        """The state in words of a run whose lease nobody holds; None when no job will go on with it.

        `ended`: its last outcome.
        """
        known = [job for job in self.leaders if job.alive]
        if any(not job.waits for job in known):
            return "starting"
        if known:
            return "waiting for a successor" if self.led or ended else "pending"
        if not self.leaders:
            return None
        if ended == "preempted":
            return "waiting for a successor"
        return None if self.led else "pending"

    def shown(self) -> list[JobRow]:
        """Jobs worth a line: the living, the last few that ended, and the last few of unknown state."""
        unknown = [job for job in self.jobs if job.state == UNKNOWN]
        over = [job for job in self.jobs if not job.alive and job.state != UNKNOWN]
        hidden = [*over[:-SHOWN_ENDED], *unknown[:-SHOWN_UNKNOWN]]
        return [job for job in self.jobs if job not in hidden]


def is_node_agent(heartbeat: dict[str, Any]) -> bool:
    """Return True if a heartbeat has all keys of a node agent's; a file without them was put there by another program."""
    return heartbeat.keys() >= {"time", "state", "host", "group", "index", "claim_dirs", "left", "failure"}


def job_rows(run: RunDir, over: Iterable[JobRow] = ()) -> list[JobRow]:
    """All jobs of a run, the oldest first. `over`: rows that are known to be final, for which Slurm is not asked."""
    sent, known = jobs(run), {row.id: row for row in over}
    seen = look(about["id"] for about in sent if about["id"] not in known)
    rows = []
    for about in sent:
        if about["id"] in known:
            rows.append(known[about["id"]])
            continue
        found = seen[about["id"]] or Seen(UNKNOWN, "")
        why = _why(found) if found.alive else _setup_failed(run, about["id"])
        rows.append(JobRow(about["id"], about["kind"], found.state, why, found.nodes, found.start))
    return rows


def _why(seen: Seen) -> str:
    if seen.ended:
        return f"a component of it has ended: {', '.join(seen.ended).lower()}"
    return reason_in_words(seen.reason) if seen.state in WAITING and seen.reason else ""


def _setup_failed(run: RunDir, job: str) -> str:
    """The line of slurm.setup that ended a job's script, in words; empty where none did."""
    try:
        said = (run.slurm / "jobs" / f"{job}{SETUP_FAILED}").read_text(errors="replace").strip()
    except OSError:
        return ""
    return f"slurm.setup failed, {said}"
