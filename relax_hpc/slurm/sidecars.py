"""Scorers and critic of a run on Slurm, in steps on the trainer's nodes beside its own.

There is one srun for each scorer, or one for a group of scorers, and one for the critic; each is restarted alone.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.slurm.plan import SidecarName
from relax_hpc.slurm.srun import TRAINER_COMPONENT, with_options
from relax_hpc.slurm.trainer_steps import RANKS_EVERY_S, Step, node_of_task
from relax_hpc.supervise.heartbeat_monitor import HeartbeatMonitor
from relax_hpc.supervise.processes import RestartPolicy, next_attempt, silence_limit
from relax_hpc.supervise.rollout_workers import sidecar_names
from relax_hpc.telemetry import read_heartbeat


@dataclass(slots=True)
class One:
    """One step, a scorer or a group, over all its attempts."""

    name: str
    options: list[str]
    """Options of relax_hpc.roles beside the name and the attempt."""
    processes: list[str]
    """Names of its processes, as in heartbeats."""
    node: int
    """Index of its node among the trainer's."""
    step: Step
    restart_policy: RestartPolicy
    log: str
    """Name of its log, without the attempt's number."""
    attempt: int = 0
    heartbeat_monitor: HeartbeatMonitor = field(default_factory=HeartbeatMonitor)


class SidecarSteps:
    """The sidecar steps of one role, as relax_hpc.supervise.rollout_workers.Workers."""

    def __init__(
        self, run: RunDir, recipe: Recipe, role: SidecarName, python: list[str], say: Callable[..., None]
    ) -> None:
        """python: `srun … python`, with everything that comes before the module."""
        self._run, self._recipe, self._role, self._python, self._say = run, recipe, role, python, say
        self.ones = self._group() if role == "critic" or recipe.scores_together else self._each()
        self.failure, self.suspect, self.fatal = "", "", False
        self._heartbeats_read, self._asked = float("-inf"), False

    def _each(self) -> list[One]:
        names = sidecar_names(self._run, self._recipe, self._role)
        nodes = self._recipe.trainer.nodes
        return [
            One(name, ["--rank", str(i)], [name], i % nodes, self._step(name), self._restart_policy(), name)
            for i, name in enumerate(names)
        ]

    def _group(self) -> list[One]:
        ranks, role = sidecar_names(self._run, self._recipe, self._role), self._role
        options = ["--slurm-task", "--world", str(len(ranks))]
        node = self._recipe.trainer.nodes - 1 if role == "critic" else 0
        return (
            [One(role, options, ranks, node, self._step(role), self._restart_policy(), f"{role}-%t")] if ranks else []
        )

    def _step(self, name: str) -> Step:
        return Step(self._run, f"srun-{name}")

    def _restart_policy(self) -> RestartPolicy:
        return RestartPolicy(self._recipe.supervision)

    def look_after(self) -> None:
        if self._asked:
            return
        for one in self.ones:
            if one.step.process is not None and not one.step.running:
                self._ended(one)
            if one.step.process is None and time.monotonic() >= one.restart_policy.not_before and not self.failure:
                self._start(one)

    def _start(self, one: One) -> None:
        one.attempt, one.heartbeat_monitor = next_attempt(self._run, one.processes[0]), HeartbeatMonitor()
        command = [
            "-P", "-m", "relax_hpc.roles", self._role, str(self._run.root), "--name", one.name, "--attempt", str(one.attempt),
            *one.options,
        ]  # fmt: skip
        host = node_of_task(TRAINER_COMPONENT, one.node)
        where = [f"--nodelist={host}"] if host else []
        number = f"{one.attempt:04d}"
        one.step.start(
            with_options(where, self._python), command, f"{one.log}.{number}.log", f"{one.step.name}.{number}.log"
        )
        self._say("restart", role=one.name, attempt=one.attempt)

    def _ended(self, one: One) -> None:
        heartbeats = {
            name: heartbeat
            for name, heartbeat in zip(one.processes, self._heartbeats(one), strict=True)
            if heartbeat is not None
        }
        one.step.process = None
        for name, heartbeat in heartbeats.items():
            if heartbeat.get("state") == "failed":
                self.failure, self.fatal = f"{name} on {heartbeat['host']}: {heartbeat.get('error', '')}", True
                return
        said = next(
            (heartbeat for heartbeat in heartbeats.values() if heartbeat.get("error")),
            next(iter(heartbeats.values()), {}),
        )
        reason, done = one.step.words() or "its step ended", said.get("requests", 0) + said.get("learned", 0)
        self._say("lost", role=one.name, reason=reason)
        if not one.restart_policy.failed(reason, (one.attempt, done) if done else None, *heartbeats.values()):
            self.fatal = bool(one.restart_policy.again)
            self.suspect = str(said.get("host", ""))
            self.failure = one.restart_policy.exhausted(one.name, reason, str(said.get("error", "")), one.step.log)

    def look_for_silence(self) -> None:
        if time.monotonic() - self._heartbeats_read < RANKS_EVERY_S:
            return
        self._heartbeats_read = time.monotonic()
        for one in self.ones:
            if not one.step.running:
                continue
            heartbeats = self._heartbeats(one)
            silent = one.heartbeat_monitor.look(
                {i: heartbeat["time"] if heartbeat else None for i, heartbeat in enumerate(heartbeats)}
            )
            for i, silent_s in silent.items():
                if silent_s > silence_limit(heartbeats[i], self._recipe.supervision) and one.step.process:
                    name = one.processes[i]
                    self._say("silent", role=name, reason=f"no heartbeat for {silent_s:.0f} s: killed")
                    # srun kills its tasks; the end is noticed like any other
                    one.step.process.send_signal(signal.SIGTERM)
                    break

    def ask_to_stop(self) -> None:
        self._asked = True
        for one in self.ones:
            one.step.ask_to_stop()

    def end(self, grace_s: float) -> None:
        self.ask_to_stop()
        for one in self.ones:
            one.step.end(grace_s)

    def _heartbeats(self, one: One) -> list[dict[str, Any] | None]:
        """Heartbeats of this attempt's processes; None before a process's first."""
        heartbeats = [read_heartbeat(self._run, name) for name in one.processes]
        return [
            heartbeat if heartbeat is not None and heartbeat["attempt"] == one.attempt else None
            for heartbeat in heartbeats
        ]
