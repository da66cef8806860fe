"""The rollout side of a run on Slurm, as the leader's supervisor sees it.

base     the nodes that the recipe asks for: node agents in a step of this job, or in a rollout job that is sent again
elastic  further one-node jobs: as many as the desired size asks for
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.slurm.client import ALIVE, look
from relax_hpc.slurm.elastic import Elastic
from relax_hpc.slurm.job_registry import JobRegistry
from relax_hpc.slurm.node_agent import BASE
from relax_hpc.slurm.node_agents import NodeAgents
from relax_hpc.slurm.srun import ROLLOUT_COMPONENT, with_options
from relax_hpc.slurm.submission.refusals import Refusals
from relax_hpc.slurm.submission.sbatch import exclude, submit_script
from relax_hpc.slurm.trainer_steps import Step, node_of_task
from relax_hpc.supervise.io_retry import IoRetry
from relax_hpc.supervise.processes import RestartPolicy, next_attempt
from relax_hpc.telemetry import Telemetry

LOOK_S = 0.5
BY_HAND_S = 60.0
"""How long a person who sends both scripts by hand has for the second one."""


class Base(Protocol):
    """The rollout nodes that the recipe asks for."""

    failure: str
    suspect: str

    def look_after(self, node_agents: NodeAgents) -> None:
        """Look after the node agents; called often, so it must be quick."""

    def gave_up(self, host: str, reason: str) -> None:
        """Note that workers were lost too often on a node."""

    def keep_jobs(self) -> None:
        """Look after the jobs; called now and then in a thread, since Slurm may take its time to answer."""

    def ask_to_stop(self) -> None: ...

    def end(self, grace_s: float) -> None: ...


class RolloutJobs:
    """All rollout nodes of a run, base and elastic."""

    def __init__(
        self, node_agents: NodeAgents, base: Base, elastic: Elastic, jobs: JobRegistry, ask_every_s: float, io: IoRetry
    ) -> None:
        """ask_every_s: seconds between two questions to Slurm about `jobs`, which `base` and `elastic` read; io: for
        the thread that asks.
        """
        self._node_agents, self._base, self._elastic, self._jobs = node_agents, base, elastic, jobs
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
        self._node_agents.look()
        self._base.look_after(self._node_agents)
        for heartbeat in self._node_agents.failed():
            self._failed(heartbeat)
        self.failure, self.suspect = self.failure or self._base.failure, self.suspect or self._base.suspect
        if (self._keeping is None or self._keeping.done()) and time.monotonic() - self._kept_at > self._ask_every_s:
            if self._keeping is not None and (error := self._keeping.exception()) is not None:
                logging.getLogger("rollout_jobs").error("the jobs could not be looked after: %s", error)
            self._keeping, self._kept_at = self._slurm.submit(self._io, self._keep_jobs), time.monotonic()

    def _failed(self, heartbeat: dict[str, Any]) -> None:
        """Note that a node agent gave up: fatal where a person must mend something, else its node is the suspect."""
        if heartbeat["fatal"]:
            self.failure, self.fatal = self.failure or f"{heartbeat['host']}: {heartbeat['failure']}", True
        else:
            self._base.gave_up(heartbeat["host"], heartbeat["failure"])

    def _keep_jobs(self) -> None:
        self._jobs.look()
        self._base.keep_jobs()
        for job in self._elastic.keep():
            self._node_agents.job_ended(job)

    def look_for_silence(self) -> None: ...

    def ask_to_stop(self) -> None:
        self._asked = True
        self._base.ask_to_stop()

    def end(self, grace_s: float) -> None:
        self.ask_to_stop()
        self._io.end()
        self._slurm.shutdown(wait=False, cancel_futures=True)
        self._base.end(grace_s)
        self._node_agents.look()


class BaseSteps:
    """Rollout nodes of this job, in one srun of node agents. A lost node agent costs one further srun on its node."""

    def __init__(
        self,
        run: RunDir,
        recipe: Recipe,
        python: list[str],
        telemetry: Telemetry,
        group: str = BASE,
        nodes: int | None = None,
        leader: str | None = None,
    ) -> None:
        """python: `srun … python`, all words before the module; nodes: the recipe's by default.

        leader: our own job where it leads the run: its node agents have no reason to leave before it asks them to.
        """
        self._run, self._recipe, self._python, self._telemetry = run, recipe, python, telemetry
        self._group, self._leader = group, leader
        self._steps: dict[int, Step] = {}
        """Node of the group -> the step that its node agent runs in."""
        self._noted = set[int]()
        """Nodes whose loss is recorded and whose next step is not started yet: the file system refused its log."""
        self._left_at: dict[Step, float] = {}
        """Step -> when its first node agent was seen to have left."""
        self._left = set[int]()
        """Nodes whose node agent left in order.

        One that was restarted on its node makes the step of all nodes end with an exit code of failure.
        """
        self._restart_policy = {i: RestartPolicy(recipe.supervision) for i in range(nodes or recipe.rollout.nodes)}
        self.failure = self.suspect = ""

    def gave_up(self, host: str, reason: str) -> None:
        """End this job, since only a job on other nodes can help; its successor avoids the node."""
        self.failure, self.suspect = self.failure or f"{host}: {reason}", host

    def look_after(self, node_agents: NodeAgents) -> None:
        if not self._steps:
            step = self._start([], None)
            self._steps = dict.fromkeys(self._restart_policy, step)
        for index in self._steps:
            self._look_after_node(index, node_agents)

    @property
    def left(self) -> bool:
        """True when all node agents ended in order: the run is over, or they gave up."""
        return bool(self._steps) and self._left == self._steps.keys()

    def _look_after_node(self, index: int, node_agents: NodeAgents) -> None:
        step, restart_policy = self._steps[index], self._restart_policy[index]
        name, heartbeat = node_agents.of(step.id, index) or ("", None)
        if heartbeat is None and step.running and time.monotonic() - step.started_at > self._recipe.supervision.start_s:
            self._never_began(index, step)
            return
        left = step.code == 0 or node_agents.left(name)
        if left and not self._must_stay(step):
            self._left.add(index)
            return
        silent = heartbeat is not None and name not in node_agents.alive()
        if (step.running and not silent) or time.monotonic() < restart_policy.not_before:
            return
        host, limit_s = heartbeat["host"] if heartbeat else "", self._recipe.supervision.node_agent_silent_s
        reason = f"no heartbeat for {limit_s:.0f} s" if step.running else step.words()
        reason = "its node agent left, and the run goes on" if left else reason
        who = f"rollout node {index}" + (f" ({host})" if host else "")
        if index not in self._noted:
            self._telemetry.metrics("lost", role=who, reason=reason)
            # Only this node's share: the run may go on well without it.
            if not restart_policy.failed(reason, step.started_at if heartbeat and heartbeat.get("requests") else None):
                self.failure, self.suspect = restart_policy.exhausted(who, reason, "", step.log), host
                return
            self._noted.add(index)
        self._steps[index] = self._start(
            ["--overlap", "--nodes=1", "--ntasks=1", *([f"--nodelist={host}"] if host else [])], index
        )
        self._noted.discard(index)

    def _must_stay(self, step: Step) -> bool:
        """Return True if the run goes on although node agents of a step have left.

        A trainer that was told to end with them needs some time to say so; longer than that, and the run goes on.
        """
        left_s = time.monotonic() - self._left_at.setdefault(step, time.monotonic())
        return self._leader is not None and left_s > self._recipe.supervision.node_agent_silent_s

    def _start(self, options: list[str], index: int | None) -> Step:
        step = Step(self._run, "srun-node-agents")
        command = node_agent_command(self._run, self._recipe, self._group, step.id)
        if index is not None:
            command += ["--index", str(index)]
        attempt = next_attempt(self._run, "srun-node-agents")
        which = "%t" if index is None else str(index)
        step.start(
            with_options(options, self._python),
            command,
            f"node-agent-{self._group}-{which}.{attempt:04d}.log",
            f"srun-node-agents.{attempt:04d}.log",
        )
        return step

    def _never_began(self, index: int, step: Step) -> None:
        """Fail the run's rollout side: srun waits for a node that does not answer, and a second srun there would wait
        too.
        """
        host = node_of_task(ROLLOUT_COMPONENT, index)
        self.failure, self.suspect = (
            f"rollout node {index}{f' ({host})' if host else ''}: its node agent has not begun {time.monotonic() - step.started_at:.0f} s after srun was "
            f"to start it (supervision.start_s = {self._recipe.supervision.start_s:.0f}); srun said: {step.words() or 'nothing'}; its "
            f"log: {step.log}",
            host,
        )

    def keep_jobs(self) -> None:
        """Notice that the other component of a heterogeneous job ended: Slurm lets this one train on without it."""
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
            step.end(2 * grace_s)  # node agents first wait for their workers


def node_agent_command(run: RunDir, recipe: Recipe, group: str, step: str) -> list[str]:
    """Arguments after `python` that start the node agent of a node."""
    per_node = recipe.rollout.workers // recipe.rollout.nodes
    return [
        "-P", "-m", "relax_hpc.slurm.node_agent", str(run.root), "--group", group, "--step", step, "--workers", str(per_node),
    ]  # fmt: skip


class NoBase:
    """No rollout nodes: nothing is generated in this run."""

    failure = suspect = ""

    def look_after(self, node_agents: NodeAgents) -> None: ...

    def gave_up(self, host: str, reason: str) -> None: ...

    def keep_jobs(self) -> None: ...

    def ask_to_stop(self) -> None: ...

    def end(self, grace_s: float) -> None: ...


class BaseJobs:
    """Rollout nodes in a job of their own, which outlives this one and is sent again when it is gone."""

    def __init__(self, run: RunDir, recipe: Recipe, telemetry: Telemetry, jobs: JobRegistry) -> None:
        self._run, self._telemetry, self._jobs = run, telemetry, jobs
        self._restart_policy = RestartPolicy(recipe.supervision)
        self._refusals = Refusals(telemetry, "rollout job")
        self._began = time.monotonic()
        self._newest = self._worked = ""
        """The newest job, and the last job that did any work: the trainer may go on with the requests of other jobs."""
        self._lost = ""
        """The last job counted as lost: each counts once, however often sbatch is tried after it."""
        self._generating = False
        self._gone: list[str] = []
        self.failure = self.suspect = ""

    def gave_up(self, host: str, reason: str) -> None:
        """Record the node as one to avoid: the rollout job ends by itself, and the next one avoids the node."""
        exclude(self._run, host, reason)

    def look_after(self, node_agents: NodeAgents) -> None:
        for job in self._gone:
            node_agents.job_ended(job)
        if node_agents.worked(self._newest):
            self._worked = self._newest
        self._generating = bool(node_agents.alive())

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
        if not self.failure and time.monotonic() >= self._restart_policy.not_before and self._refusals.due:
            self._send()

    def _count_loss(self, last: str, jobs: int) -> None:
        self._telemetry.metrics("lost", role="rollout job", reason=last)
        if not self._restart_policy.failed(last, jobs if self._worked == self._lost else None):
            log = self._run.logs / "slurm"
            self.failure = self._restart_policy.exhausted("the rollout job", last, f"see {log}", log)

    def _send(self) -> None:
        try:
            self._newest = submit_script(self._run, "rollout")
        except RunError as error:  # sbatch may not work on compute nodes; existing node agents go on
            self._refusals.note(error)
            # Refusals end nothing while anybody generates; if nobody does, the trainer's nodes would idle to their time limit.
            if self._refusals.count > self._restart_policy.limits.max_restarts and not self._generating:
                self.failure = f"there is no rollout job, and Slurm refused one {self._refusals.count} times: {error}"
            return
        self._refusals.forget()
        self._telemetry.metrics("restart", role="rollout job", job=self._newest)

    def ask_to_stop(self) -> None:
        """Do nothing: the node agents see the run's outcome, or wait for the next leader."""

    def end(self, grace_s: float) -> None: ...
