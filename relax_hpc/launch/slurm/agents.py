"""The rollout side of a run on Slurm: agents that live in steps of this job or in jobs of their own.

heartbeats/agent-*.json ──► who works, who was lost ──► their claims are open again
wished number of jobs   ──► jobs that are there      ──► sbatch what is missing, drain what is too much
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_hpc.launch.agent import CORE
from relax_hpc.launch.members import Patience, next_attempt
from relax_hpc.launch.slurm.queue_state import ALIVE, job_state
from relax_hpc.launch.slurm.send import jobs, submit_script
from relax_hpc.launch.slurm.trainers import Step
from relax_hpc.recipe.schema import Recipe
from relax_hpc.run_dir import RunDir, RunError
from relax_hpc.spool.queue import Queue
from relax_hpc.telemetry import Telemetry, read_beat

LOOK_S = 0.5
BY_HAND_S = 60.0
"""A person who sends both scripts by hand has so long for the second one."""
JOBS_EVERY_S = 5.0
"""How often Slurm is asked for the rollout jobs."""


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
        self._unowned: dict[str, float] = {}
        """Workplaces that no agent speaks of, and since when."""
        self._at_first = {path.stem: (read_beat(run, path.stem) or {}).get("time") for path in self._paths()}
        """Of agents that were there before us."""

    def look(self) -> None:
        """Read the heartbeats and give back the claims of workers that are gone."""
        now = time.monotonic()
        for path in self._paths():
            beat = read_beat(self._run, path.stem)
            if beat is not None and (path.stem not in self._seen or self._seen[path.stem].beat["time"] != beat["time"]):
                self._seen[path.stem] = Seen(beat, now)
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
            if seen.beat["state"] != "gone" and now - seen.changed < self._limit_s
        ]

    def newest(self, index: int) -> tuple[str, dict[str, Any]] | None:
        """Name and heartbeat of the last agent on node `index` of the core group."""
        of_node = [
            (s.beat["time"], n) for n, s in self._seen.items() if s.beat["group"] == CORE and s.beat["index"] == index
        ]
        if not of_node:
            return None
        _, name = max(of_node)
        return name, self._seen[name].beat

    def failure(self) -> tuple[str, bool]:
        """What an agent of the core group could not go on with, since we look; and whether only a person can mend it."""
        for name, seen in self._seen.items():
            if seen.beat["failure"] and seen.beat["group"] == CORE and seen.beat["time"] != self._at_first.get(name):
                return seen.beat["failure"], seen.beat["fatal"]
        return "", False

    def _paths(self) -> Iterable[Path]:
        return self._run.heartbeats.glob("agent-*.json")

    def _give_back(self, workplace: str, lost: bool, reason: str) -> None:
        given = self._queue.give_back(workplace, lost)
        self._unowned.pop(workplace, None)
        self._telemetry.metrics("lost", role=workplace, reason=reason, orders_given_back=given)


class StepAgents:
    """The rollout nodes of this job: one srun of agents; an agent that is lost costs one further srun on its node."""

    def __init__(self, run: RunDir, recipe: Recipe, python: list[str], telemetry: Telemetry) -> None:
        """python: `srun … python`, with everything that comes before the module."""
        self._run, self._recipe, self._python, self._telemetry = run, recipe, python, telemetry
        self._agents = Agents(run, recipe, telemetry)
        self._steps: dict[int, Step] = {}
        """Node of the group -> the step that its agent lives in."""
        self._patience = {i: Patience(recipe.supervision) for i in range(recipe.rollout.nodes)}
        self._asked, self._looked_at = False, 0.0
        self.failure, self.fatal = "", False

    def look_after(self) -> None:
        if self._asked or time.time() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.time()
        self._agents.look()
        self.failure, self.fatal = self._agents.failure()
        if not self._steps:
            step = self._start([], None)
            self._steps = dict.fromkeys(self._patience, step)
        for index in self._steps:
            self._look_after_node(index)

    def _look_after_node(self, index: int) -> None:
        step, patience, newest = self._steps[index], self._patience[index], self._agents.newest(index)
        name, beat = newest or ("", {"host": "", "step": None})
        silent = beat["step"] == step.id and name not in self._agents.alive()
        if (step.running and not silent) or time.time() < patience.not_before:
            return
        host, limit_s = beat["host"], self._recipe.supervision.agent_silent_s
        reason = f"no heartbeat for {limit_s:.0f} s" if step.running else step.words()
        who = f"rollout node {index}" + (f" ({host})" if host else "")
        self._telemetry.metrics("lost", role=who, reason=reason)
        if not patience.failed(reason, self._progress()):
            self.failure = patience.exhausted(who, reason, "", step.log)
            return
        self._steps[index] = self._start(
            ["--overlap", "--nodes=1", "--ntasks=1", *([f"--nodelist={host}"] if host else [])], index
        )

    def _start(self, options: list[str], index: int | None) -> Step:
        step = Step(self._run, "srun-agents")
        command = agent_command(self._run, self._recipe, CORE, step.id)
        if index is not None:
            command += ["--index", str(index)]
        attempt = next_attempt(self._run, "srun-agents")
        which = "%t" if index is None else str(index)
        step.start(
            _with(options, self._python),
            command,
            f"agent-{CORE}-{which}.{attempt:04d}.log",
            f"srun-agents.{attempt:04d}.log",
        )
        return step

    def _progress(self) -> Any:
        return (read_beat(self._run, "trainer-0") or {}).get("step")

    def look_for_silence(self) -> None: ...

    def ask_to_stop(self) -> None:
        self._asked = True
        for step in set(self._steps.values()):
            step.ask_to_stop()

    def end(self, grace_s: float) -> None:
        self.ask_to_stop()
        for step in set(self._steps.values()):
            step.end(2 * grace_s)  # agents wait for their workers first
        self._agents.look()


def _with(options: list[str], python: list[str]) -> list[str]:
    """`srun … python` with further options for srun, which takes the last of those that are given twice."""
    own = next(i for i, word in enumerate(python[1:], 1) if not word.startswith("-"))
    return [*python[:own], *options, *python[own:]]


def agent_command(run: RunDir, recipe: Recipe, group: str, step: str) -> list[str]:
    """What comes after `python` to start the agent of a node."""
    per_node = recipe.rollout.workers // recipe.rollout.nodes
    return [
        "-P", "-m", "relax_hpc.launch.agent", str(run.root), "--group", group, "--step", step, "--workers", str(per_node),
    ]  # fmt: skip


class JobAgents:
    """Rollout nodes in jobs of their own: they outlive this job, and are sent again when they are gone."""

    def __init__(self, run: RunDir, recipe: Recipe, telemetry: Telemetry) -> None:
        self._run, self._recipe, self._telemetry = run, recipe, telemetry
        self._agents = Agents(run, recipe, telemetry)
        self._patience = Patience(recipe.supervision)
        self._looked_at = self._jobs_looked_at = 0.0
        self._began = time.time()
        self.failure, self.fatal = "", False

    def look_after(self) -> None:
        if time.time() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.time()
        self._agents.look()
        self.failure, self.fatal = self._agents.failure()
        if time.time() - self._jobs_looked_at > JOBS_EVERY_S and time.time() > self._patience.not_before:
            self._jobs_looked_at = time.time()
            self._keep_core()

    def _keep_core(self) -> None:
        """Send the rollout job again when it is gone; it lives or waits on its own otherwise."""
        ids = [job["id"] for job in jobs(self._run) if job["kind"] == "rollout"]
        states = job_state(ids)
        if any(state is None or state in ALIVE for state in states.values()):
            return
        if not ids and time.time() - self._began < BY_HAND_S:
            return
        if ids:
            last = f"job {ids[-1]} {states.get(ids[-1], 'is gone')}"
            self._telemetry.metrics("lost", role="rollout job", reason=last)
            if not self._patience.failed(last, (read_beat(self._run, "trainer-0") or {}).get("step")):
                self.failure = self._patience.exhausted("the rollout job", last, "", self._run.logs / "slurm")
                return
        try:
            job = submit_script(self._run, "rollout")
            self._telemetry.metrics("restart", role="rollout job", job=job)
        except RunError as error:  # sbatch may not work on compute nodes; agents that are there go on
            self._telemetry.metrics("refused", role="rollout job", reason=str(error))

    def look_for_silence(self) -> None: ...

    def ask_to_stop(self) -> None:
        """Nothing: agents see the run's outcome, or wait for the next leader."""

    def end(self, grace_s: float) -> None: ...
