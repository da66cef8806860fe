"""The status of a run from its files alone, for the live view and for `relax-hpc status` from anywhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe import load_recipe
from relax_hpc.recipe.schema import Recipe
from relax_hpc.slurm.overview import Overview
from relax_hpc.supervise.lease import holder
from relax_hpc.supervise.supervisor import ENDED, is_final, outcome_of
from relax_hpc.telemetry import iter_metrics, read_heartbeat

RECENT = 20
"""Steps and requests over which rates are averaged."""
LOOKED_AT = 8
"""Workers whose files one look reads, in turn, so that a look costs no more with many workers."""
HOLDER_EVERY_S = 5.0
"""How often to look who holds a run. In a Slurm job on another machine that asks Slurm, every `slurm.ask_every_s`."""


@dataclass(slots=True)
class Status:
    """A run at one moment; `refresh` reads only what was added since, and only some of many workers at a time."""

    run: RunDir
    recipe: Recipe
    rows: dict[str, dict[str, int]] = field(default_factory=dict)
    """How many rows of the sources are left out, by key."""
    heartbeats: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    evals: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Version -> its scores, as the trainer's metrics have them."""
    given_up: dict[int, str] = field(default_factory=dict)
    """Version -> why its evaluation was given up."""
    failures: dict[int, dict[str, int]] = field(default_factory=dict)
    """Step -> reason -> how many of its groups failed for it."""
    latest: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Kind -> the trainer's last record of it, such as `lineage` (a version was made again with other bits) and
    `engine_differs` (engine and trainer compute different logprobs with equal weights).
    """
    requests: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    columns: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Scorer or critic -> the requests for which it lately made columns."""
    restarts: int = 0
    outcome: dict[str, Any] | None = None
    holder: dict[str, Any] | None = None
    slurm: Overview | None = None
    """Jobs and rollout nodes; None where they are not asked for."""
    _offsets: dict[str, int] = field(default_factory=dict)
    _holder_at: float = float("-inf")

    @classmethod
    def of(cls, run: RunDir, *, jobs: bool = False) -> Status:
        """The status of `run`. `jobs`: with the run's Slurm jobs, for which Slurm is asked now and then."""
        recipe = load_recipe(run.recipe)
        status = cls(run, recipe, read_json(run.rows) or {})
        if jobs and recipe.slurm is not None:
            status.slurm = Overview(run, ask_every_s=recipe.slurm.ask_every_s)
        status.refresh()
        return status

    def refresh(self) -> None:
        """Read heartbeats and new lines of metrics."""
        for record in self._new("trainer-0"):
            self.latest[record["kind"]] = record
            if record["kind"] == "step":
                self.steps = [*self.steps, record][-RECENT:]
                # by step, so that a replayed step counts once
                self.failures.pop(record["step"], None)
                if found := record.get("failures"):
                    self.failures[record["step"]] = found
            elif record["kind"] == "eval":
                self.evals[record["version"]] = record
            elif record["kind"] == "eval_failed":
                self.given_up[record["version"]] = record["reason"]
        workers = self._in_turn()
        for name in workers:
            self.requests.setdefault(name, [])
            for record in self._new(name):
                self.requests[name] = [*self.requests[name], record][-RECENT:]
        for name in ("supervisor", *self._names("node-agent-*")):
            for record in self._new(name):
                self.restarts += record["kind"] == "lost"
        for name in self._sidecars():
            for record in self._new(name):
                if record["kind"] == "column":
                    self.columns[name] = [*self.columns.get(name, []), record][-RECENT:]
        for name in (*self._trainers(), *self._sidecars(), *workers):
            heartbeat = read_heartbeat(self.run, name)
            if heartbeat is not None:
                self.heartbeats[name] = heartbeat
        before, self.outcome = self.outcome, outcome_of(self.run)
        now = time.monotonic()
        if now - self._holder_at > self._holder_every_s or self.outcome != before:
            self.holder, self._holder_at = holder(self.run, glance=True), now
        if self.slurm is not None:
            self.slurm.refresh()

    @property
    def _holder_every_s(self) -> float:
        slurm = self.recipe.slurm
        return HOLDER_EVERY_S if slurm is None or not (self.holder or {}).get("job") else slurm.ask_every_s

    def failed_groups(self) -> Counter[str]:
        """Reason -> groups that failed for it, over all steps."""
        return sum((Counter(found) for found in self.failures.values()), Counter())

    def roles(self) -> list[str]:
        return [*self._trainers(), *self._sidecars(), *self.workers()]

    def _trainers(self) -> list[str]:
        return [f"trainer-{i}" for i in range(self.recipe.trainer.processes)]

    def _sidecars(self) -> list[str]:
        """Names of scorers and critic."""
        roles = {"scorer": self.recipe.scorer, "critic": self.recipe.critic}
        return [f"{role}-{i}" for role, config in roles.items() if config for i in range(config.processes)]

    def workers(self) -> list[str]:
        """Names of the recipe's workers, and of those that joined."""
        base = [f"rollout-{i}" for i in range(self.recipe.rollout.workers if self.recipe.generates else 0)]
        return [*base, *(name for name in self._names("rollout-*") if name not in base)]

    def _in_turn(self) -> list[str]:
        """The workers to look at now: first those never looked at, then those not looked at for the longest time."""
        there = self.workers()
        again = [name for name in self.requests if name in there][:LOOKED_AT]
        for name in again:
            self.requests[name] = self.requests.pop(name)  # to the end of the line
        return [*again, *(name for name in there if name not in self.requests)]

    def _names(self, pattern: str) -> list[str]:
        return sorted(path.stem for path in self.run.metrics.glob(f"{pattern}.jsonl"))

    @property
    def state(self) -> str:
        """The state in a word or two: running, how it ended, what it waits for, or that nobody will go on with it."""
        if self.holder is not None:
            return "running"
        ended = str(self.outcome["outcome"]) if self.outcome else None
        if is_final(self.outcome) or self.slurm is None:
            return ended or "interrupted"
        # Otherwise a queued successor goes on with the run, even one that failed.
        return self.slurm.waits_for(ended) or ended or "interrupted"

    @property
    def over(self) -> bool:
        """True when nothing happens any more by itself."""
        return self.state in (*ENDED, "interrupted", "preempted")

    @property
    def step(self) -> int:
        return int(self.heartbeats.get("trainer-0", {}).get("step", 0))

    @property
    def train_rate(self) -> float:
        """Samples a second that the trainer consumed over the recent steps."""
        seconds = sum(s["step_s"] for s in self.steps)
        return sum(s["samples"] for s in self.steps) / seconds if seconds else 0.0

    @property
    def rollout_rate(self) -> float:
        """Samples a second that all workers made over the recent requests."""
        return sum(self.worker_rate(name) for name in self.requests)

    def worker_rate(self, name: str) -> float:
        requests = [o for o in self.requests.get(name, []) if o["kind"] == "request"]
        if len(requests) < 2 or time.time() - requests[-1]["time"] > 60:
            return 0.0
        seconds = requests[-1]["time"] - requests[0]["time"]
        return float(sum(o["samples"] for o in requests[1:]) / seconds) if seconds > 0 else 0.0

    def column_rate(self, name: str) -> float:
        """Tokens a second that a scorer lately scored, over all its models, or that a critic valued."""
        lines = self.columns.get(name, [])
        return float(sum(c["tokens"] * len(c["columns"]) for c in lines) / max(sum(c["score_s"] for c in lines), 1e-9))

    def waiting(self) -> tuple[float, float]:
        """Shares of time that the trainer and the workers waited lately."""
        trainer = sum(s["wait_s"] for s in self.steps) / max(sum(s["step_s"] for s in self.steps), 1e-9)
        requests = [o for name in self.requests for o in self.requests[name] if o["kind"] == "request"]
        busy = sum(o["generate_s"] + o["score_s"] + o["publish_s"] for o in requests)
        waited = sum(o["wait_s"] for o in requests)
        return min(trainer, 1.0), waited / max(busy + waited, 1e-9)

    def _new(self, name: str) -> Iterator[dict[str, Any]]:
        """New records one by one: the metrics of a long run are larger than what is kept of them.

        A record counts as read once it is given out, so that a call that fails behind it loses and repeats none.
        """
        for record, behind in iter_metrics(self.run.metrics / f"{name}.jsonl", self._offsets.get(name, 0)):
            self._offsets[name] = behind
            yield record
