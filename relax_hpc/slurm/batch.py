"""Entry point of a run's Slurm jobs: the leader (a supervisor that starts groups as steps), or a job of rollout nodes.

leader:  is the run over? ► lease ► queue the successor ► supervise ► outcome ► cancel or requeue
rollout: srun one node agent a node, until the run is over or the job's time is
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rich.console import Console
from tenacity import Retrying, retry_if_exception_type, sleep_using_event, stop_when_event_set, wait_fixed

from relax_hpc.files.errors import RunError
from relax_hpc.files.permissions import keep_private
from relax_hpc.files.run_dir import RunDir, open_existing
from relax_hpc.monitor.live_view import live
from relax_hpc.recipe import load_recipe
from relax_hpc.recipe.schema import Recipe
from relax_hpc.slurm.chain import Chain
from relax_hpc.slurm.client import end_of_job, own_job
from relax_hpc.slurm.elastic import Elastic
from relax_hpc.slurm.job_registry import JobRegistry
from relax_hpc.slurm.node_agent import BASE
from relax_hpc.slurm.plan import Plan, make_plan
from relax_hpc.slurm.rollout_jobs import LOOK_S, BaseJobs, BaseSteps, RolloutJobs
from relax_hpc.slurm.rollout_nodes import RolloutNodes
from relax_hpc.slurm.srun import rollout_step, sidecar_step, step_command, trainer_step
from relax_hpc.slurm.steps import RoleStep, sidecar_steps, trainer_steps
from relax_hpc.slurm.submission.sbatch import exclude, record_own
from relax_hpc.slurm.submission.unstartable import Vigil
from relax_hpc.supervise.io_retry import IoRetry, at_first
from relax_hpc.supervise.lease import RENEW_S, Lease, acquire
from relax_hpc.supervise.restarts import GRACE_S, Workers
from relax_hpc.supervise.supervisor import Supervisor, sweep
from relax_hpc.telemetry import Telemetry

SWEEP_S = 300.0
"""Least age of an unfinished file to remove: a younger one may be that of a living worker."""
SUCCESSOR_RETRY_LOOKS = 6
"""Wait between a refusal of the successor and the next attempt, in units of slurm.ask_every_s: 3 minutes by default."""
EXIT_CODES = {"failed": 1, "preempted": 75}
"""Exit code of a leader by its outcome, 0 for the others.

75 is EX_TEMPFAIL of sysexits.h, "try again later": this job is over and the run is not, so sacct must not show the job
as completed.
"""
HELD_S = 90.0
"""How long a job waits for a lease when Slurm knows nothing of its holder."""


def lead(run: RunDir) -> int:
    """Lead the run until it, or this job, is over; return the exit code."""
    asked = Asked(
        signal.SIGTERM, signal.SIGUSR2
    )  # set before and kept after the supervisor: what follows it must not be cut short either
    recipe, job = at_first(run)(lambda: load_recipe(run.recipe)), _own_job()
    keep_private(recipe.run.group_access)
    assert recipe.slurm is not None
    io, queue_io = (IoRetry(run, recipe.supervision.io_wait_s) for _ in range(2))
    io(lambda: record_own(run, job, "leader"))
    chain = Chain(run, recipe.slurm, job)
    console = Console()
    reason = io(chain.begin)
    if reason is not None:
        console.print(f"nothing to do: {reason}", soft_wrap=True, markup=False)
        return 0
    lease = wait_for_lease(run, io, asked)
    if lease is None:
        console.print("asked to end before the run could be taken over", soft_wrap=True)
        io(lambda: chain.end({"outcome": "preempted"}, warned=not chain.is_ending()))
        return EXIT_CODES["preempted"]
    io(chain.lead)
    ended, retry_s = threading.Event(), SUCCESSOR_RETRY_LOOKS * recipe.slurm.ask_every_s
    with ThreadPoolExecutor(2) as background:  # sbatch may take minutes to answer, and the lease is to be renewed
        queued, ending = background.submit(queue_until_taken, chain, queue_io, retry_s, ended), list[Future[bool]]()
        try:
            with renewing(lease):
                signalled = lambda: ending.append(background.submit(chain.is_ending))
                outcome = supervise(run, recipe, lease, console, asked, signalled)
        finally:
            ended.set()
            queue_io.end()
            io(lease.release)
    queued.result()
    console.print(f"{outcome['outcome']} at step {outcome['step']} {outcome['reason']}", soft_wrap=True, markup=False)
    io(lambda: chain.end(outcome, warned=not (ending and ending[0].result())))
    return EXIT_CODES.get(outcome["outcome"], 0)


class Asked:
    """A flag that is True once this process was asked to end; the signals do nothing else from here on.

    It is no threading.Event: a handler that sets one while its own thread waits for it may wait for itself.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        self._seen = False
        for number in numbers:
            signal.signal(number, self._note)

    def __call__(self) -> bool:
        return self._seen

    def _note(self, number: int, frame: Any) -> None:
        self._seen = True


def queue_until_taken(chain: Chain, io: IoRetry, retry_s: float, ended: threading.Event) -> None:
    """Queue the successor; where Slurm refuses it, as by a limit on jobs, try again every `retry_s` until it takes one or `ended` is set."""
    retrying = Retrying(
        retry=retry_if_exception_type(RunError),
        wait=wait_fixed(retry_s),
        sleep=sleep_using_event(ended),
        stop=stop_when_event_set(ended),
        retry_error_callback=lambda state: None,  # the refusal is written down; one more try comes at the job's end
    )
    retrying(io, chain.queue_successor)


def supervise(
    run: RunDir,
    recipe: Recipe,
    lease: Lease,
    console: Console,
    asked: Callable[[], bool],
    signalled: Callable[[], None],
) -> dict[str, Any]:
    """Supervise the run and return its outcome.

    `asked`: returns True if this job was asked to end already; `signalled`: called when it is.
    """
    telemetry = Telemetry(run, "supervisor", lease.number)
    io = IoRetry(run, recipe.supervision.io_wait_s, telemetry.metrics)
    trainers, workers = io(lambda: groups(run, recipe, telemetry))
    io(lambda: sweep(run, older_than_s=SWEEP_S))
    with live(run, console) as look:
        supervisor = Supervisor(
            run, recipe, lease, trainers, workers, telemetry, look,
            interrupted="preempted", signalled=signalled, asked=asked,
        )  # fmt: skip
        return supervisor.supervise()


def groups(run: RunDir, recipe: Recipe, telemetry: Telemetry) -> tuple[RoleStep, list[Workers]]:
    """Make the trainer step and all that works beside it; start nothing."""
    plan = make_plan(recipe)
    python = step_command(plan)
    trainers = trainer_steps(run, recipe, [*trainer_step(plan), *python], end_of_job(_own_job()))
    beside: list[Workers] = [rollout_jobs(run, recipe, plan, telemetry)] if plan.generates else []
    for name in plan.sidecars:
        beside += sidecar_steps(run, recipe, name, [*sidecar_step(plan, name), *python], telemetry.metrics)
    return trainers, beside


def rollout_jobs(run: RunDir, recipe: Recipe, plan: Plan, telemetry: Telemetry) -> RolloutJobs:
    """Make the rollout nodes, base and elastic."""
    jobs, io = JobRegistry(run), IoRetry(run, recipe.supervision.io_wait_s, telemetry.metrics)
    base: BaseJobs | BaseSteps
    if plan.slurm.shape == "split":
        base = BaseJobs(run, recipe, telemetry, jobs)
    else:
        python = [*rollout_step(plan), *step_command(plan)]
        base = BaseSteps(run, recipe, python, telemetry, leader=_own_job())
    nodes, elastic = RolloutNodes(run, recipe, telemetry), Elastic(run, recipe, telemetry, jobs)
    return RolloutJobs(nodes, base, elastic, jobs, plan.slurm.ask_every_s, io)


@contextlib.contextmanager
def renewing(lease: Lease) -> Iterator[None]:
    """Renew the lease in a thread: Slurm may answer late, and steps take their time to end."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEW_S):
            with contextlib.suppress(OSError):  # the next renewal may succeed
                if not lease.renew():
                    return

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def wait_for_lease(run: RunDir, io: IoRetry, asked: Callable[[], bool]) -> Lease | None:
    """Take the lease, waiting for it where its holder died a moment ago. None when this job was asked to end before.

    Raises RunError when the lease is still held after HELD_S.
    """
    deadline = time.monotonic() + HELD_S
    while not asked():
        try:
            return io(lambda: acquire(run, asked))
        except RunError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
    return None


def roll_out(run: RunDir, elastic: bool) -> int:
    """Keep the node agents of this job's nodes until they leave, or this job's time is up."""
    asked = Asked(signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
    recipe, job = at_first(run)(lambda: load_recipe(run.recipe)), _own_job()
    keep_private(recipe.run.group_access)
    plan, telemetry = make_plan(recipe), Telemetry(run, f"node-agent-job-{job}", attempt=0)
    python = [*rollout_step(plan, elastic=elastic), *step_command(plan)]
    base = BaseSteps(run, recipe, python, telemetry, f"job{job}" if elastic else BASE, 1 if elastic else None)
    io = IoRetry(run, recipe.supervision.io_wait_s, telemetry.metrics)
    io(lambda: record_own(run, job, "elastic" if elastic else "rollout"))
    nodes = io(lambda: RolloutNodes(run, recipe, telemetry))
    log = f"node-agent-{f'job{job}' if elastic else BASE}"
    print(
        f"rollout nodes of '{run.root}': their node agents log to {run.logs}/{log}-*.log, workers to rollout-*.log there",
        flush=True,
    )
    vigil, in_vain = Vigil(run, recipe), ""
    while not (base.left or base.failure or in_vain or asked()):
        time.sleep(LOOK_S)
        io(lambda: base.look_after(nodes.read()))
        in_vain = io(vigil.in_vain)
    if not (base.failure or in_vain):
        print("asked to leave, by Slurm or the leader" if asked() else "its node agents have left", flush=True)
    base.ask_to_stop()
    base.end(GRACE_S)
    if in_vain:
        print(f"error: these nodes wait for a leader that cannot start: {in_vain}", file=sys.stderr)
    if base.failure:
        print(f"error: {base.failure}", file=sys.stderr)
        if base.suspect:
            io(lambda: exclude(run, base.suspect, base.failure))
    return 1 if base.failure or in_vain else 0


def _own_job() -> str:
    job = own_job()
    if job is None:
        raise RunError("this is a part of a Slurm job: send the run with `relax-hpc submit`")
    return job


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m relax_hpc.slurm.batch", description="What runs inside Slurm jobs.")
    parser.add_argument("part", choices=("leader", "rollout"))
    parser.add_argument("run", help="the run directory")
    parser.add_argument("--elastic", action="store_true", help="rollout: beyond what the recipe asks for")
    arguments = parser.parse_args()
    try:
        run = RunDir(arguments.run)
        at_first(run)(lambda: open_existing(run.root))
        code = lead(run) if arguments.part == "leader" else roll_out(run, arguments.elastic)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
