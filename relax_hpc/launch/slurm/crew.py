"""The rollout side of a run on Slurm, as the leader's supervisor sees it.

core     the nodes that the recipe asks for: agents in a step of this job, or in a rollout job that is sent again
elastic  further one-node jobs: as many as are wished for
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from relax_hpc.launch.agent import CORE
from relax_hpc.launch.io_errors import IoRetry
from relax_hpc.launch.members import Patience, next_attempt
from relax_hpc.launch.slurm.agents import Agents
from relax_hpc.launch.slurm.elastic import Elastic
from relax_hpc.launch.slurm.job_book import JobBook
from relax_hpc.launch.slurm.queue_state import ALIVE, look
from relax_hpc.launch.slurm.refusals import Refusals
from relax_hpc.launch.slurm.send import exclude, submit_script
from relax_hpc.launch.slurm.steps import ROLLOUT_COMPONENT, with_options
from relax_hpc.launch.slurm.trainers import Step, node_of_task
from relax_hpc.recipe.schema import Recipe
from relax_hpc.run_dir import RunDir, RunError
from relax_hpc.telemetry import Telemetry

LOOK_S = 0.5
BY_HAND_S = 60.0
"""A person who sends both scripts by hand has so long for the second one."""


class Core(Protocol):
    """The rollout nodes that the recipe asks for."""

    failure: str
    suspect: str

    def look_after(self, agents: Agents) -> None:
        """Often, and quickly."""

    def gave_up(self, host: str, reason: str) -> None:
        """Workers were lost too often on a node."""

    def keep_jobs(self) -> None:
        """Now and then, in a thread: Slurm may take its time to answer."""

    def ask_to_stop(self) -> None: ...

    def end(self, grace_s: float) -> None: ...


class Crew:
    """All rollout nodes of a run."""

    def __init__(
        self, agents: Agents, core: Core, elastic: Elastic, jobs: JobBook, ask_every_s: float, io: IoRetry
    ) -> None:
        """ask_every_s: seconds between two questions to Slurm about `jobs`, which `core` and `elastic` look into; io: for the thread that does."""
        self._agents, self._core, self._elastic, self._jobs = agents, core, elastic, jobs
        self._ask_every_s, self._io = ask_every_s, io
        self._slurm = ThreadPoolExecutor(1, thread_name_prefix="slurm")
        self._keeping: Future[None] | None = None
        self._looked_at = self._kept_at = float("-inf")
        self._asked = False
        self.failure, self.suspect, self.fatal = "", "", False

    def look_after(self) -> None:
        if self._asked or time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        self._agents.look()
        self._core.look_after(self._agents)
        for beat in self._agents.failed():
            self._failed(beat)
        self.failure, self.suspect = self.failure or self._core.failure, self.suspect or self._core.suspect
        if (self._keeping is None or self._keeping.done()) and time.monotonic() - self._kept_at > self._ask_every_s:
            if self._keeping is not None and (error := self._keeping.exception()) is not None:
                logging.getLogger("crew").error("the jobs could not be looked after: %s", error)
            self._keeping, self._kept_at = self._slurm.submit(self._io, self._keep_jobs), time.monotonic()

    def _failed(self, beat: dict[str, Any]) -> None:
        """An agent gave up: for good where a person must mend it, else its node is the suspect."""
        if beat["fatal"]:
            self.failure, self.fatal = self.failure or f"{beat['host']}: {beat['failure']}", True
        else:
            self._core.gave_up(beat["host"], beat["failure"])

    def _keep_jobs(self) -> None:
        self._jobs.look()
        self._core.keep_jobs()
        for job in self._elastic.keep():
            self._agents.job_ended(job)

    def look_for_silence(self) -> None: ...

    def ask_to_stop(self) -> None:
        self._asked = True
        self._core.ask_to_stop()

    def end(self, grace_s: float) -> None:
        self.ask_to_stop()
        self._io.end()
        self._slurm.shutdown(wait=False, cancel_futures=True)
        self._core.end(grace_s)
        self._agents.look()


class StepCore:
    """Rollout nodes of this job: one srun of agents; an agent that is lost costs one further srun on its node."""

    def __init__(
        self,
        run: RunDir,
        recipe: Recipe,
        python: list[str],
        telemetry: Telemetry,
        group: str = CORE,
        nodes: int | None = None,
        leader: str | None = None,
    ) -> None:
        """python: `srun … python`, with everything that comes before the module; nodes: those of the recipe by default; leader: our own
        job, where it leads the run: its agents have no reason to leave before it asks them to."""
        self._run, self._recipe, self._python, self._telemetry = run, recipe, python, telemetry
        self._group, self._leader = group, leader
        self._steps: dict[int, Step] = {}
        """Node of the group -> the step that its agent lives in."""
        self._noted = set[int]()
        """Nodes whose loss is written down, and whose next step is not started: the file system refused its log."""
        self._left_at: dict[Step, float] = {}
        """When the first agent of a step was seen to have left."""
        self._left = set[int]()
        """Nodes whose agent left in order. One that is started again on its node leaves the step of all with an exit code of failure."""
        self._patience = {i: Patience(recipe.supervision) for i in range(nodes or recipe.rollout.nodes)}
        self.failure = self.suspect = ""

    def gave_up(self, host: str, reason: str) -> None:
        """Only a job on other nodes can help: this one ends, and its successor avoids the node."""
        self.failure, self.suspect = self.failure or f"{host}: {reason}", host

    def look_after(self, agents: Agents) -> None:
        if not self._steps:
            step = self._start([], None)
            self._steps = dict.fromkeys(self._patience, step)
        for index in self._steps:
            self._look_after_node(index, agents)

    @property
    def left(self) -> bool:
        """Whether all agents ended in order: the run is over, or they gave up."""
        return bool(self._steps) and self._left == self._steps.keys()

    def _look_after_node(self, index: int, agents: Agents) -> None:
        step, patience = self._steps[index], self._patience[index]
        name, beat = agents.of(step.id, index) or ("", None)
        if beat is None and step.running and time.monotonic() - step.started_at > self._recipe.supervision.start_s:
            self._never_began(index, step)
            return
        left = step.code == 0 or agents.left(name)
        if left and not self._must_stay(step):
            self._left.add(index)
            return
        silent = beat is not None and name not in agents.alive()
        if (step.running and not silent) or time.monotonic() < patience.not_before:
            return
        host, limit_s = beat["host"] if beat else "", self._recipe.supervision.agent_silent_s
        reason = f"no heartbeat for {limit_s:.0f} s" if step.running else step.words()
        reason = "its agent left, and the run goes on" if left else reason
        who = f"rollout node {index}" + (f" ({host})" if host else "")
        if index not in self._noted:
            self._telemetry.metrics("lost", role=who, reason=reason)
            # The node's own work: the run may go on well without it.
            if not patience.failed(reason, step.started_at if beat and beat.get("orders") else None):
                self.failure, self.suspect = patience.exhausted(who, reason, "", step.log), host
                return
            self._noted.add(index)
        self._steps[index] = self._start(
            ["--overlap", "--nodes=1", "--ntasks=1", *([f"--nodelist={host}"] if host else [])], index
        )
        self._noted.discard(index)

    def _must_stay(self, step: Step) -> bool:
        """Whether the run goes on although agents of a step have left, for longer than a trainer that was told to end with them may need
        to say so."""
        left_s = time.monotonic() - self._left_at.setdefault(step, time.monotonic())
        return self._leader is not None and left_s > self._recipe.supervision.agent_silent_s

    def _start(self, options: list[str], index: int | None) -> Step:
        step = Step(self._run, "srun-agents")
        command = agent_command(self._run, self._recipe, self._group, step.id)
        if index is not None:
            command += ["--index", str(index)]
        attempt = next_attempt(self._run, "srun-agents")
        which = "%t" if index is None else str(index)
        step.start(
            with_options(options, self._python),
            command,
            f"agent-{self._group}-{which}.{attempt:04d}.log",
            f"srun-agents.{attempt:04d}.log",
        )
        return step

    def _never_began(self, index: int, step: Step) -> None:
        """srun waits for a node that does not answer: another srun there would wait too."""
        host = node_of_task(ROLLOUT_COMPONENT, index)
        self.failure, self.suspect = (
            f"rollout node {index}{f' ({host})' if host else ''}: its agent has not begun {time.monotonic() - step.started_at:.0f} s after srun was "
            f"to start it (supervision.start_s = {self._recipe.supervision.start_s:.0f}); srun said: {step.words() or 'nothing'}; its "
            f"log: {step.log}",
            host,
        )

    def keep_jobs(self) -> None:
        """Notice that the other component of a heterogeneous job ended: Slurm leaves this one to train on without it."""
        if self._leader is None or self._recipe.slurm is None or self._recipe.slurm.shape != "het":
            return
        seen = look([self._leader])[self._leader]
        if seen is not None and seen.ended:
            self.failure = self.failure or (
                f"the rollout component of this job ended ({', '.join(seen.ended)}): this one ends too, what follows begins with both"
            )

    def ask_to_stop(self) -> None:
        for step in set(self._steps.values()):
            step.ask_to_stop()

    def end(self, grace_s: float) -> None:
        for step in set(self._steps.values()):
            step.end(2 * grace_s)  # agents wait for their workers first


def agent_command(run: RunDir, recipe: Recipe, group: str, step: str) -> list[str]:
    """What comes after `python` to start the agent of a node."""
    per_node = recipe.rollout.workers // recipe.rollout.nodes
    return [
        "-P", "-m", "relax_hpc.launch.agent", str(run.root), "--group", group, "--step", step, "--workers", str(per_node),
    ]  # fmt: skip


class NoCore:
    """No rollout nodes: nothing is played in this run."""

    failure = suspect = ""

    def look_after(self, agents: Agents) -> None: ...

    def gave_up(self, host: str, reason: str) -> None: ...

    def keep_jobs(self) -> None: ...

    def ask_to_stop(self) -> None: ...

    def end(self, grace_s: float) -> None: ...


class JobCore:
    """Rollout nodes in a job of their own, which outlives this one and is sent again when it is gone."""

    def __init__(self, run: RunDir, recipe: Recipe, telemetry: Telemetry, jobs: JobBook) -> None:
        self._run, self._telemetry, self._jobs = run, telemetry, jobs
        self._patience = Patience(recipe.supervision)
        self._refusals = Refusals(telemetry, "rollout job")
        self._began = time.monotonic()
        self._newest = self._worked = ""
        """The newest job, and the last one that did any work: the trainer may go on with the orders of others."""
        self._lost = ""
        """The last job that was counted as lost: each counts once, however often sbatch is tried after it."""
        self._playing = False
        self._gone: list[str] = []
        self.failure = self.suspect = ""

    def gave_up(self, host: str, reason: str) -> None:
        """The rollout job ends by itself; the next one avoids the node."""
        exclude(self._run, host, reason)

    def look_after(self, agents: Agents) -> None:
        for job in self._gone:
            agents.job_ended(job)
        if agents.worked(self._newest):
            self._worked = self._newest
        self._playing = bool(agents.alive())

    def keep_jobs(self) -> None:
        states = self._jobs.states("rollout")
        ids = list(states)
        self._newest = ids[-1] if ids else ""
        self._gone = [job for job, state in states.items() if state is not None and state not in ALIVE]
        if len(self._gone) < len(ids):
            self._refusals.forget()
            return
        if not ids and time.monotonic() - self._began < BY_HAND_S:
            return
        if ids and ids[-1] != self._lost:
            self._lost = ids[-1]
            self._count_loss(f"job {self._lost}: {states[self._lost]}", len(ids))
        if not self.failure and time.monotonic() >= self._patience.not_before and self._refusals.due:
            self._send()

    def _count_loss(self, last: str, jobs: int) -> None:
        self._telemetry.metrics("lost", role="rollout job", reason=last)
        if not self._patience.failed(last, jobs if self._worked == self._lost else None):
            log = self._run.logs / "slurm"
            self.failure = self._patience.exhausted("the rollout job", last, f"see {log}", log)

    def _send(self) -> None:
        try:
            self._newest = submit_script(self._run, "rollout")
        except RunError as error:  # sbatch may not work on compute nodes; agents that are there go on
            self._refusals.note(error)
            # Refusals alone end nothing while anybody plays; without, the trainer's nodes would idle to their time limit.
            if self._refusals.count > self._patience.limits.max_restarts and not self._playing:
                self.failure = f"there is no rollout job, and Slurm refused one {self._refusals.count} times: {error}"
            return
        self._refusals.forget()
        self._telemetry.metrics("restart", role="rollout job", job=self._newest)

    def ask_to_stop(self) -> None:
        """Nothing: its agents see the run's outcome, or wait for the next leader."""

    def end(self, grace_s: float) -> None: ...
