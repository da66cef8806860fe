"""Elastic rollout nodes, each a one-node job: the desired size, and the jobs that are sent or drained to reach it.

    relax-hpc scale RUN rollout=N ─┐
    [slurm.autoscale] ─────────────┴► desired-size.json ──► jobs there are ──► sbatch what is missing, drain the rest

The desired size counts all rollout nodes; the base nodes of the recipe are always there.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json, replace, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.slurm import Autoscale
from relax_hpc.slurm.client import ALIVE, WAITING, ask, cancel, number
from relax_hpc.slurm.job_registry import JobRegistry
from relax_hpc.slurm.submission.refusals import Refusals
from relax_hpc.supervise.restarts import RestartPolicy
from relax_hpc.telemetry import Telemetry, read_metrics

SOON_S = 300.0
"""A job that ends within this time after it was sent made no progress."""


@dataclass(frozen=True, slots=True)
class DesiredSize:
    """How many rollout nodes the run shall have, base nodes included."""

    rollout: int
    partition: str | None
    by: str
    time: float


def desired_size(run: RunDir) -> DesiredSize | None:
    """The desired size that was asked for; None when nobody asked."""
    found = read_json(run.slurm / "desired-size.json")
    return None if found is None else DesiredSize(**found)


def set_desired_size(run: RunDir, base: int, rollout: int, partition: str | None, by: str) -> None:
    """Ask for `rollout` nodes in all; asking for the same size twice changes nothing.

    Raises RunError below the recipe's own.
    """
    if rollout < base:
        raise RunError(
            f"rollout={rollout} is less than the {base} rollout nodes that the recipe asks for (rollout.nodes), which are "
            f"protected: {base} or more, or `relax-hpc stop {run.root}`"
        )
    before = desired_size(run)
    if before is None or (before.rollout, before.partition) != (rollout, partition):
        replace(run.slurm / "desired-size.json", to_json(asdict(DesiredSize(rollout, partition, by, time.time()))))


def clear_desired_size(run: RunDir, base: int) -> None:
    """Go back to the base nodes of the recipe: the others drain and leave."""
    set_desired_size(run, base, base, None, "cancel")


class Elastic:
    """The elastic jobs of a run, kept by its leader."""

    def __init__(self, run: RunDir, recipe: Recipe, telemetry: Telemetry, jobs: JobRegistry) -> None:
        assert recipe.slurm is not None
        self._run, self._base, self._telemetry = run, recipe.rollout.nodes, telemetry
        self._scaler = Autoscaler(run, recipe, recipe.slurm.autoscale, telemetry) if recipe.slurm.autoscale else None
        self._jobs = jobs
        self._draining: set[str] = set()
        self._gone: set[str] | None = None
        """Jobs that had ended at our last look; None before the first: what ended before it is no loss of ours."""
        self._restarts = RestartPolicy(recipe.supervision)
        self._refusals = Refusals(telemetry, "elastic job")
        self._first_seen: dict[str, float] = {}
        """Job -> when we first saw it, by our own clock."""

    def keep(self) -> list[str]:
        """Send and drain jobs to reach the desired size; return ids of the jobs that Slurm says are gone."""
        if self._scaler is not None:
            self._scaler.look()
        desired = desired_size(self._run)
        states, now = self._jobs.states("elastic"), time.monotonic()
        self._first_seen = {job: self._first_seen.get(job, now) for job in states}
        alive = [job for job, state in states.items() if state is None or state in ALIVE]
        staying = [job for job in alive if job not in self._draining]
        self._note_lost({job for job in states if job not in alive and job not in self._draining})
        if desired is None:  # jobs that a person sent by hand stay
            return [job for job in states if job not in alive]
        missing = desired.rollout - self._base - len(staying)
        if missing > 0 and self._refusals.due and self._restarts.due:
            self._send(missing, desired.partition)
        if missing < 0:
            # Jobs that wait in the queue leave first, then the youngest.
            last = sorted(staying, key=lambda job: (states[job] in WAITING, number(job)))[missing:]
            self._drain(last, states)
        return [job for job in states if job not in alive]

    def _note_lost(self, gone: set[str]) -> None:
        """Count jobs that ended; those that end soon after they were sent are sent again at growing intervals."""
        new, self._gone = gone - (gone if self._gone is None else self._gone), gone
        for job in sorted(new, key=number):
            self._telemetry.metrics("lost", role=f"elastic job {job}", reason="its job is gone")
            self._restarts.failed(None if time.monotonic() - self._first_seen[job] < SOON_S else number(job))

    def _send(self, count: int, partition: str | None) -> None:
        for _ in range(count):
            job = self._refusals.send(self._run, "elastic", *([f"--partition={partition}"] if partition else []))
            if not job:
                return
            self._telemetry.metrics("scale", role="elastic job", job=job, reason="fewer rollout nodes than desired")

    def _drain(self, leaving: list[str], states: dict[str, str | None]) -> None:
        """Cancel pending jobs; ask running ones to leave: their node agents finish or give back what they generate."""
        cancel([job for job in leaving if states[job] in WAITING])
        for job in leaving:
            if states[job] not in WAITING:
                done = ask(["scancel", "--batch", "--signal=USR2", job])
                if done is None or done.returncode:
                    continue
            self._draining.add(job)
            self._telemetry.metrics("scale", job=job, reason="more rollout nodes than desired: draining")


class Autoscaler:
    """Changes the desired size according to the trainer's metrics."""

    def __init__(self, run: RunDir, recipe: Recipe, policy: Autoscale, telemetry: Telemetry) -> None:
        self._run, self._recipe, self._policy, self._telemetry = run, recipe, policy, telemetry
        self._steps: list[tuple[float, dict[str, Any]]] = []
        """Lines of the trainer's metrics, each with our own clock's time of reading it."""
        self._offset = read_metrics(run.metrics / "trainer-0.jsonl")[1]
        self._changed = time.monotonic()

    def look(self) -> None:
        """Read the metrics of new steps; change the desired size where they call for it and the last change is long
        enough ago.
        """
        records, self._offset = read_metrics(self._run.metrics / "trainer-0.jsonl", self._offset)
        now = time.monotonic()
        since = max(self._changed, now - self._policy.window_s)
        new = [(now, record) for record in records if record["kind"] == "step"]
        self._steps = [(at, step) for at, step in [*self._steps, *new] if at > since]
        if now - self._changed < self._policy.cooldown_s or not self._steps:
            return
        desired = desired_size(self._run)
        nodes = desired.rollout if desired else self._recipe.rollout.nodes
        target, reason = self._decide(nodes)
        target = min(max(target, self._recipe.rollout.nodes), self._policy.max_nodes)
        if target != nodes:
            set_desired_size(self._run, self._recipe.rollout.nodes, target, self._policy.partition, "autoscale")
            self._changed = time.monotonic()
            self._telemetry.metrics("autoscale", before=nodes, after=target, reason=reason)

    def _decide(self, now: int) -> tuple[int, str]:
        steps = [step for _, step in self._steps]
        seconds = sum(s["step_s"] for s in steps)
        waiting = sum(s["wait_s"] for s in steps) / max(seconds, 1e-9)
        # Once a step has taken its requests, those of max_staleness further steps may lie complete.
        full = self._recipe.async_.max_staleness * self._recipe.requests_per_step
        depth = min(s["spool_depth"] for s in steps)
        if waiting > self._policy.grow_when_waiting:
            return now + 1, f"the trainer waited {waiting:.0%} of {seconds:.0f} s for data"
        if full and depth >= full:
            return now - 1, f"the spool was full ({depth} complete requests or more) for {seconds:.0f} s"
        return now, ""
