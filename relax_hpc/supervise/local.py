"""The local launcher: a run's roles as processes of this machine."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from relax_hpc.files.permissions import keep_private
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch.create import Opened
from relax_hpc.monitor.live_view import in_any_case, live, render
from relax_hpc.monitor.status import Status
from relax_hpc.spool.queue import RequestQueue
from relax_hpc.supervise.io_retry import IoRetry
from relax_hpc.supervise.lease import acquire
from relax_hpc.supervise.processes import LocalProcesses
from relax_hpc.supervise.rollout_workers import clear_node, sidecars_here, workers_here
from relax_hpc.supervise.supervisor import Supervisor, sweep
from relax_hpc.telemetry import Telemetry


def run_here(opened: Opened, console: Console) -> dict[str, Any]:
    """Supervise the run until it ends; return its outcome."""
    run, recipe, fork_server = opened.run, opened.recipe, opened.fork_server
    keep_private(recipe.run.group_access)
    io = IoRetry(run, recipe.supervision.io_wait_s, lambda kind, **about: None)
    lease = io(lambda: acquire(run))
    try:
        queue, telemetry = RequestQueue(run), Telemetry(run, "supervisor", lease.number)
        io(lambda: _clear(run, queue))
        train_only = io(lambda: read_json(run.identity))["debug"] == "train-only"
        wanted = recipe.rollout.workers if recipe.generates and not train_only else 0
        names, tag, say = [f"rollout-{i}" for i in range(wanted)], f"{lease.number:06d}", telemetry.metrics
        workers = io(lambda: workers_here(run, recipe, fork_server, names, tag, queue.give_back, say))
        sidecars = io(lambda: sidecars_here(run, recipe, fork_server, say))
        ranks = [f"trainer-{i}" for i in range(recipe.trainer.processes)]
        trainers = io(lambda: LocalProcesses(run, recipe.supervision, "trainer", "trainer", ranks, fork_server))
        with fork_server, live(run, console) as look:
            supervisor = Supervisor(run, recipe, lease, trainers, [*workers, *sidecars], telemetry, look)
            outcome = supervisor.supervise()
    finally:
        io(lease.release)
    io(lambda: clear_node(run, recipe))
    in_any_case(lambda: console.print(render(Status.of(run))))
    return outcome


def _clear(run: RunDir, queue: RequestQueue) -> None:
    """Clear away what a dead supervisor left; the lease is ours now."""
    run.stop.unlink(missing_ok=True)
    sweep(run)
    for claim_dir in queue.workers():
        queue.give_back(claim_dir, lost=False)  # its worker fell with the supervisor: no fault of its requests
