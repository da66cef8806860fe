"""The rollout side of a run on Slurm, as the leader's supervisor sees it.

base     the nodes that the recipe asks for: node agents in a step of this job, or in a rollout job that is sent again
elastic  further one-node jobs: as many as the desired size asks for
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.slurm.client import ALIVE, look
from relax_hpc.slurm.elastic import Elastic
from relax_hpc.slurm.job_registry import JobRegistry
from relax_hpc.slurm.node_agent import BASE
from relax_hpc.slurm.rollout_nodes import RolloutNodes
from relax_hpc.slurm.srun import ROLLOUT_COMPONENT, with_options
from relax_hpc.slurm.steps import Step, node_of_task
from relax_hpc.slurm.submission.refusals import Refusals
from relax_hpc.slurm.submission.sbatch import exclude
from relax_hpc.supervise.io_retry import IoRetry
from relax_hpc.supervise.restarts import RestartPolicy
from relax_hpc.telemetry import Telemetry

LOOK_S = 0.5
BY_HAND_S = 60.0
"""How long a person who sends both scripts by hand has for the second one."""


class RolloutJobs:
    """All rollout nodes of a run, base and elastic."""

    def __init__(
        self,
        nodes: RolloutNodes,
        base: BaseSteps | BaseJobs,
        elastic: Elastic,
        jobs: JobRegistry,
        ask_every_s: float,
        io: IoRetry,
    ) -> None:
        """base: the nodes that the recipe asks for. ask_every_s: seconds between two questions to Slurm about `jobs`, which
        `base` and `elastic` read in a thread, since Slurm may take its time to answer; io: for that thread.
        """
        self._nodes, self._base, self._elastic, self._jobs = nodes, base, elastic, jobs
        self._ask_every_s, self._io = ask_every_s, io
        self._slurm = ThreadPoolExecutor(1, thread_name_prefix="slurm")
        self._keeping: Future[None] | None = None
        self._looked_at = self._kept_at = float("-inf")
        self._asked = False
        self.failure, self.suspect, self.fatal = "", "", False

    def look_after(self) -> None:
        if self._asked or time.monotonic() - self._looked_at < LOOK_S:
            return
        self._nodes.look()
        self._base.look_after(self._nodes)
        self._looked_at = time.monotonic()
        for heartbeat in self._nodes.failed():
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
            self._nodes.job_ended(job)

    def ask_to_stop(self) -> None:
        self._asked = True
        self._base.ask_to_stop()

    def end(self, grace_s: float) -> None:
        self.ask_to_stop()
        self._io.end()
        self._slurm.shutdown(wait=False, cancel_futures=True)
        self._base.end(grace_s)
        self._nodes.look()


@dataclass(slots=True)
class Node:
    """A node of this job's, over all steps that its node agents ran in."""

    restarts: RestartPolicy
    step: Step | None = None
    """The step of its node agent; None where the next one is to be started."""
    host: str = ""
    left: bool = False
    """True once its node agent left in order."""


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
        self._group, self._leader, self._limits = group, leader, recipe.supervision
        self.nodes = [Node(RestartPolicy(recipe.supervision)) for _ in range(nodes or recipe.rollout.nodes)]
        self._left_at: dict[Step, float] = {}
        """Step -> when its first node agent was seen to have left."""
        self._started = False
        self.failure = self.suspect = ""

    def gave_up(self, host: str, reason: str) -> None:
        """End this job, since only a job on other nodes can help; its successor avoids the node."""
        self.failure, self.suspect = self.failure or f"{host}: {reason}", host

    def look_after(self, nodes: RolloutNodes) -> None:
        if not self._started:
            step = self._start([], "%t")
            self._started = True
            for node in self.nodes:
                node.step = step
        for index, node in enumerate(self.nodes):
            if node.step is not None:
                self._look_after_node(index, node, node.step, nodes)
            if node.step is None and node.restarts.due and not self.failure:
                where = [f"--nodelist={node.host}"] if node.host else []
                node.step = self._start(["--overlap", "--nodes=1", "--ntasks=1", *where], str(index))

    @property
    def left(self) -> bool:
        """True when all node agents ended in order: the run is over, or they gave up.

        Where one was restarted on its node, the step of all nodes ends with an exit code of failure.
        """
        return all(node.left for node in self.nodes)

    def _look_after_node(self, index: int, node: Node, step: Step, nodes: RolloutNodes) -> None:
        name, heartbeat = nodes.of(step.id, index)
        if not heartbeat and step.running and time.monotonic() - step.started_at > self._limits.start_s:
            self._never_began(index, step)
            return
        left = step.code == 0 or nodes.left(name)
        if left and not self._must_stay(step):
            node.left = True
            return
        if step.running and not left and (not heartbeat or name in nodes.alive()):
            return
        node.host = str(heartbeat.get("host", node.host))
        reason = f"no heartbeat for {self._limits.node_agent_silent_s:.0f} s" if step.running else step.error()
        reason = "its node agent left, and the run goes on" if left else reason
        who = f"rollout node {index}" + (f" ({node.host})" if node.host else "")
        self._telemetry.metrics("lost", role=who, reason=reason)
        # Only this node's share: the run may go on well without it.
        if node.restarts.failed(step.started_at if heartbeat.get("requests") else None):
            node.step = None
        else:
            self.failure, self.suspect = node.restarts.exhausted(who, reason, "", step.srun_log), node.host

    def _must_stay(self, step: Step) -> bool:
        """Return True if the run goes on although node agents of a step have left.

        A trainer that was told to end with them needs some time to say so; longer than that, and the run goes on.
        """
        left_s = time.monotonic() - self._left_at.setdefault(step, time.monotonic())
        return self._leader is not None and left_s > self._limits.node_agent_silent_s

    def _start(self, options: list[str], which: str) -> Step:
        """Start node agents by an srun with further options. which: the node's index; "%t" for those of all nodes."""
        srun, workers = with_options(options, self._python), self._recipe.rollout.workers // self._recipe.rollout.nodes
        output = f"node-agent-{self._group}-{which}"
        step = Step(self._run, self._limits, "node-agents", ["srun-node-agents"], srun, output)
        step.start(
            "relax_hpc.slurm.node_agent", str(self._run.root), "--group", self._group, "--step", step.id,
            "--workers", str(workers), *([] if which == "%t" else ["--index", which]),
        )  # fmt: skip
        return step

    def _never_began(self, index: int, step: Step) -> None:
        """Fail the run's rollout side: srun waits for a node that does not answer, and a second srun there would wait
        too.
        """
        host = node_of_task(ROLLOUT_COMPONENT, index)
        self.failure, self.suspect = (
            f"rollout node {index}{f' ({host})' if host else ''}: its node agent has not begun {time.monotonic() - step.started_at:.0f} s after srun was "
            f"to start it (supervision.start_s = {self._limits.start_s:.0f}); srun said: {step.error() or 'nothing'}; its "
            f"log: {step.srun_log}",
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

    def _steps(self) -> set[Step]:
        return {node.step for node in self.nodes if node.step is not None}

    def ask_to_stop(self) -> None:
        for step in self._steps():
            step.ask_to_stop()

    def end(self, grace_s: float) -> None:
        for step in self._steps():
            step.stop(2 * grace_s)  # node agents first wait for their workers


class BaseJobs:
    """Rollout nodes in a job of their own, which outlives this one and is sent again when it is gone."""

    def __init__(self, run: RunDir, recipe: Recipe, telemetry: Telemetry, jobs: JobRegistry) -> None:
        self._run, self._telemetry, self._jobs = run, telemetry, jobs
        self._restarts = RestartPolicy(recipe.supervision)
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

    def look_after(self, nodes: RolloutNodes) -> None:
        for job in self._gone:
            nodes.job_ended(job)
        if nodes.worked(self._newest):
            self._worked = self._newest
        self._generating = bool(nodes.alive())

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
        if not self.failure and self._restarts.due and self._refusals.due:
            self._send()

    def _count_loss(self, last: str, jobs: int) -> None:
        self._telemetry.metrics("lost", role="rollout job", reason=last)
        if not self._restarts.failed(jobs if self._worked == self._lost else None):
            log = self._run.logs / "slurm"
            self.failure = self._restarts.exhausted("the rollout job", last, f"see {log}", log)

    def _send(self) -> None:
        if job := self._refusals.send(self._run, "rollout"):
            self._newest = job
            self._telemetry.metrics("restart", role="rollout job", job=job)
        # sbatch may not work on compute nodes; existing node agents go on. Refusals end nothing while anybody generates;
        # if nobody does, the trainer's nodes would idle to their time limit.
        elif self._refusals.count > self._restarts.limits.max_restarts and not self._generating:
            refused = f"Slurm refused one {self._refusals.count} times: {self._refusals.reason}"
            self.failure = f"there is no rollout job, and {refused}"

    def ask_to_stop(self) -> None:
        """Do nothing: the node agents see the run's outcome, or wait for the next leader."""

    def end(self, grace_s: float) -> None: ...
