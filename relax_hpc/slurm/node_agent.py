"""The node agent of a rollout node: keeps the node's workers alive, and lists them in its heartbeat.

    srun (one task a node) ► node agent ► workers 1 … k of this node
                                └► heartbeats/node-agent-….json: who works, who was lost
                                      └► the supervisor gives claims back

It outlives the trainer: when the run's leader is lost it waits for the successor, and it leaves when the run is over.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from relax_hpc.files.errors import RunError
from relax_hpc.files.permissions import keep_private
from relax_hpc.files.publish import is_there, read_json, replace, to_json
from relax_hpc.files.run_dir import RunDir, open_existing
from relax_hpc.recipe import load_recipe
from relax_hpc.roles.common import gpus
from relax_hpc.slurm.chain import Chain
from relax_hpc.slurm.client import WAITING, job_state, own_job
from relax_hpc.slurm.submission.sbatch import end_jobs, jobs
from relax_hpc.supervise.fork_server import ForkServer
from relax_hpc.supervise.io_retry import IoRetry, at_first
from relax_hpc.supervise.lease import Holder
from relax_hpc.supervise.restarts import GRACE_S, Together
from relax_hpc.supervise.rollout_workers import clear_node, workers_here
from relax_hpc.supervise.supervisor import ENDED, outcome_of
from relax_hpc.telemetry import Telemetry, set_up_logging

POLL_S = 0.05
ASK_S = 10.0
"""How often Slurm is asked about a leader that is gone."""
LOOK_S = 1.0
"""How often the run's state is looked at."""
LEADER_WAIT_S = 3600.0
"""Seconds without a leader after which a node agent leaves."""
BASE = "base"
"""Name of the group of nodes that the recipe asks for; further groups come and go."""


class NodeAgent:
    """Keeps one node's workers alive until the run, or the node's time, is over."""

    def __init__(self, run: RunDir, about: dict[str, Any], names: list[str]) -> None:
        self.run, self.about, self.recipe = run, about, load_recipe(run.recipe)
        keep_private(self.recipe.run.group_access)
        self.telemetry = Telemetry(run, f"node-agent-{about['step']}-{about['index']}", attempt=0)
        tag, say = uuid.uuid4().hex[:8], self.telemetry.metrics
        self.workers = workers_here(run, self.recipe, ForkServer(run), names, tag, self.gone, say)
        self.together = Together(self.workers)
        self._unfit = gpus.check_node(self.recipe, len(names))
        """Why this node cannot have these workers; empty where it can."""
        self._place = run.slurm / "places" / f"{about['group']}-{about['index']}.json"
        """Names the node agent that was started last for this node of the group."""
        self._state, self._looked_at, self._asked_at = "starting", float("-inf"), float("-inf")
        self._slurm = ThreadPoolExecutor(1, thread_name_prefix="slurm")
        """Thread that asks Slurm about a lost leader: Slurm may answer late, and a node agent that waits for it falls
        silent.
        """
        self._asking: Future[bool] | None = None
        assert self.recipe.slurm is not None
        limit_s = self.recipe.supervision.leader_silent_s
        self._ask_after_s = limit_s if self.recipe.slurm.restart == "chain" else min(limit_s, ASK_S)
        self._silent_s, self._ended_leader = 0.0, ""
        self._requests = 0
        self._said: dict[str, Any] = {}
        self.left: dict[str, bool] = {}
        """Claim directory no longer in use -> True if its worker died; kept until the supervisor took it over."""
        self.leaving = self.replaced = False
        self.leader = Holder(run)

    def gone(self, claim_dir: str, lost: bool) -> list[str]:
        self.left[claim_dir] = lost
        return []

    def work(self) -> None:
        """Keep the workers until the run is over, or this node's time is."""
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
            signal.signal(number, self._leave)
        io = IoRetry(self.run, self.recipe.supervision.io_wait_s, self.telemetry.metrics)
        io(self._take_place)
        while not self.leaving and not self.failure[0]:
            io(self._tick)
            time.sleep(POLL_S)
        self.together.ask_to_stop()
        deadline = time.monotonic() + GRACE_S
        while any(worker.group.running for worker in self.workers) and time.monotonic() < deadline:
            self.say()  # a node agent that is leaving is not silent
            time.sleep(POLL_S)
        self.say()
        self.together.end(grace_s=0)
        if not self.replaced:  # else another node agent on this node may be using it
            io(lambda: clear_node(self.run, self.recipe))
        self.say(ended=True)

    @property
    def failure(self) -> tuple[str, bool]:
        """Why this node's workers cannot go on, empty while they can; and True if a person must do something first."""
        failed = self.together.failed
        return (failed.failure, failed.fatal) if failed else (self._unfit, bool(self._unfit))

    def _tick(self) -> None:
        """Look after the workers, and every LOOK_S at the run.

        Safe to call again where the file system failed in the middle.
        """
        if time.monotonic() - self._looked_at < LOOK_S:
            self.together.look_after()
            self.say()
            return
        self.left = {w: lost for w, lost in self.left.items() if is_there(self.run.claimed_requests / w)}
        self._state = self.state()
        if self.over() or self._is_replaced():
            self.leaving = True  # never set back: a signal may have set it meanwhile
        self._looked_at = time.monotonic()

    def _take_place(self) -> None:
        self._place.parent.mkdir(exist_ok=True)
        replace(self._place, to_json({"step": self.about["step"]}), durable=False)

    def _is_replaced(self) -> bool:
        """Return True if we were thought lost, as on a node that was cut off, and another node agent took our place."""
        self.replaced = (read_json(self._place) or self.about)["step"] != self.about["step"]
        if self.replaced:
            self.telemetry.log.warning("another node agent took this one's place: it was not heard of for too long")
        return self.replaced

    def over(self) -> bool:
        """Return True if there is nothing left to wait for.

        A leader that is lost is ended on the way, so that its successor can begin.
        """
        outcome = outcome_of(self.run)
        if outcome is not None and outcome["outcome"] in ENDED:
            return True
        self._silent_s = self.leader.silent_for()
        if self._asking is not None and self._asking.done():
            asking, self._asking = self._asking, None
            if asking.result():
                return True
        if self._asking is None and self._silent_s > self._ask_after_s and time.monotonic() > self._asked_at + ASK_S:
            self._asked_at = time.monotonic()
            self._asking = self._slurm.submit(self._ask, self.leader.job)
        return self._silent_s > LEADER_WAIT_S

    def _ask(self, leader: str | None) -> bool:
        """End the job of a lost leader where a successor waits for its end.

        Return True if a person cancelled the last leader and no successor will find that out.
        """
        assert self.recipe.slurm is not None
        limit_s = self.recipe.supervision.leader_silent_s
        if leader and leader != self._ended_leader and self._silent_s > limit_s and self._is_followed(leader):
            # The lease may have been renewed while Slurm took its time. Where there is no scancel, as in some containers, Slurm's time-out ends the job.
            why = f"its lease was silent for {self._silent_s:.0f} s"
            if self._silent_s > limit_s and end_jobs(self.run, [leader], why):
                self._ended_leader = leader
        if self.recipe.slurm.restart == "chain":
            return False
        chain = Chain(self.run, self.recipe.slurm, "")
        last = chain.last()
        return last is not None and chain.cancelled_by_a_person(last)

    def _is_followed(self, leader: str) -> bool:
        """Return True if a successor waits for the leader's end; else Slurm's own time-out must end, or requeue, its
        job.
        """
        waiting = [job["id"] for job in jobs(self.run) if job["kind"] == "leader" and job["id"] != leader]
        return any(state in WAITING for state in job_state(waiting).values())

    def state(self) -> str:
        """The state of the worker that is furthest on: "starting", "syncing" (it takes the weights) or "active"."""
        heartbeats = [heartbeat for worker in self.workers for heartbeat in worker.group.heartbeats()]
        self._requests = max(self._requests, sum(heartbeat.get("requests", 0) for heartbeat in heartbeats))
        states = {heartbeat.get("state", "starting") for heartbeat in heartbeats}
        return "active" if states - {"starting", "syncing"} else "syncing" if "syncing" in states else "starting"

    def say(self, ended: bool = False) -> None:
        """Write the heartbeat; at once when something changed."""
        in_use = {worker.claim_dir: worker.group.name for worker in self.workers if worker.claim_dir}
        state, (failure, fatal) = "gone" if ended else "draining" if self.leaving else self._state, self.failure
        about: dict[str, Any] = {"claim_dirs": in_use, "left": dict(self.left), "failure": failure, "fatal": fatal}
        self.telemetry.heartbeat(state, at_once=about != self._said, requests=self._requests, **self.about, **about)
        self._said = about

    def _leave(self, number: int, frame: Any) -> None:
        self.leaving = True


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m relax_hpc.slurm.node_agent", description="The workers of one node."
    )
    parser.add_argument("run", help="the run directory")
    parser.add_argument("--group", required=True, help="name of the group of nodes, such as base or job-1234")
    parser.add_argument("--step", required=True, help="what the node agents of one srun have in common, and no others")
    parser.add_argument("--index", type=int, help="which node of the group; that of the Slurm task by default")
    parser.add_argument("--workers", type=int, required=True, help="workers on this node")
    arguments = parser.parse_args()
    index = int(os.environ["SLURM_PROCID"]) if arguments.index is None else arguments.index
    set_up_logging(f"node-agent-{arguments.group}-{index}")
    about = {"group": arguments.group, "step": arguments.step, "index": index, "job": own_job()}
    first = index * arguments.workers
    prefix = "rollout" if arguments.group == BASE else f"rollout-{arguments.group}"
    names = [f"{prefix}-{first + i}" for i in range(arguments.workers)]
    try:
        run = RunDir(arguments.run)
        at_first(run)(lambda: NodeAgent(open_existing(run.root), about, names)).work()
    except RunError as error:
        logging.getLogger("agent").error("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
