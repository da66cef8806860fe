"""The local launcher: a run's roles as processes of this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console

from relax_hpc.files.errors import RunError
from relax_hpc.files.permissions import keep_private
from relax_hpc.files.run_dir import RunDir, open_existing
from relax_hpc.launch.create import Debug, create, existing, identity, place, refuse_of_new_run, resume
from relax_hpc.monitor.live_view import in_any_case, live, render
from relax_hpc.monitor.status import Status
from relax_hpc.recipe import load_recipe, site_file
from relax_hpc.recipe.schema import Recipe
from relax_hpc.spool.queue import Queue
from relax_hpc.supervise.fork_server import ForkServer
from relax_hpc.supervise.io_retry import IoRetry
from relax_hpc.supervise.lease import acquire, refuse_if_held
from relax_hpc.supervise.rollout_workers import LocalWorkers, Together, clear_node, sidecars_here
from relax_hpc.supervise.supervisor import Supervisor, outcome_of, sweep
from relax_hpc.supervise.trainer_group import LocalTrainers
from relax_hpc.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Opened:
    """A run that is ready to go on."""

    run: RunDir
    recipe: Recipe
    fork_server: ForkServer
    finished: int = 0
    """Steps the run has made, when there is nothing left to do; else 0."""


def open_or_create(
    target: Path,
    overrides: list[str],
    *,
    fork: str | None = None,
    debug: str | None = None,
    shards_from: Path | None = None,
    site: Path | None = None,
    code: str | None = None,
    redo: str | None = None,
    tell: Callable[[str], None] = lambda doing: None,
) -> Opened:
    """Open the run that `target` (a recipe or a run directory) means, or make it. Raises RunError or RecipeError.

    code, redo: for a run that goes on, see `resume`. tell: called with each thing that is done to a run being made.
    """
    if debug is not None and debug not in get_args(Debug):
        raise RunError(f"--debug {debug}: use one of {list(get_args(Debug))}")
    if (debug == "train-only") != (shards_from is not None):
        raise RunError("--debug train-only and --from RUN go together: it trains on the shards of that run")
    if target.is_dir():
        run = open_existing(target)
        if fork is not None:
            refuse_of_new_run(code, redo)
            return _fork(run, fork, overrides, tell)
        return _go_on(run, overrides, code, redo)
    if fork is not None:
        raise RunError(f"--fork starts from a checkpoint of a run, and '{target}' is no run directory")
    if not target.exists():
        raise RunError(f"no recipe and no run at '{target}' (seen from {Path.cwd()})")
    recipe = load_recipe(target, overrides, site_file(site))
    if debug is not None and recipe.supervised:
        raise RunError(
            f"--debug {debug} takes a run's two sides apart; algorithm.name = 'sft' has one only: leave it out"
        )
    found = existing(recipe)
    if found is not None:
        return _go_on(found, [], code, redo)
    refuse_of_new_run(code, redo)
    source = open_existing(shards_from) if shards_from else None
    fork_server = ForkServer(place(recipe))
    run = create(recipe, fork_server, cast(Debug | None, debug), source.root if source else None, tell=tell)
    return Opened(run, load_recipe(run.recipe), fork_server)


def run_here(opened: Opened, console: Console) -> dict[str, Any]:
    """Supervise the run until it ends; return its outcome."""
    run, recipe, fork_server = opened.run, opened.recipe, opened.fork_server
    keep_private(recipe.run.group_access)
    io = IoRetry(run, recipe.supervision.io_wait_s, lambda kind, **about: None)
    lease = io(lambda: acquire(run))
    try:
        queue, telemetry = Queue(run), Telemetry(run, "supervisor", lease.number)
        io(lambda: _clear(run, queue))
        wanted = (
            recipe.rollout.workers if recipe.generates and io(lambda: identity(run))["debug"] != "train-only" else 0
        )
        names, tag, say = [f"rollout-{i}" for i in range(wanted)], f"{lease.number:06d}", telemetry.metrics
        workers = io(lambda: LocalWorkers(run, recipe, fork_server, names, tag, queue.give_back, say))
        together = Together(workers, *io(lambda: sidecars_here(run, recipe, fork_server, say)))
        trainers = io(lambda: LocalTrainers(run, recipe, fork_server))
        with fork_server, live(run, console) as look:
            supervisor = Supervisor(run, recipe, lease, trainers, together, telemetry, look)
            outcome = supervisor.supervise()
    finally:
        io(lease.release)
    clear_node(run, recipe)
    in_any_case(lambda: console.print(render(Status.of(run))))
    return outcome


def _clear(run: RunDir, queue: Queue) -> None:
    """Clear away what a dead supervisor left; the lease is ours now."""
    run.stop.unlink(missing_ok=True)
    sweep(run)
    for claim_dir in queue.workers():
        queue.give_back(claim_dir, lost=False)  # its worker fell with the supervisor: no fault of its requests


def _go_on(run: RunDir, overrides: list[str], code: str | None, redo: str | None) -> Opened:
    refuse_if_held(run)
    fork_server = ForkServer(run)
    recipe = resume(run, overrides, fork_server, code, redo)
    done = run.checkpoint_steps()
    outcome = outcome_of(run)
    finished = (
        done[-1]
        if done and done[-1] >= recipe.run.steps and outcome is not None and outcome["outcome"] == "done"
        else 0
    )
    return Opened(run, recipe, fork_server, finished)


def _fork(old: RunDir, name: str, overrides: list[str], tell: Callable[[str], None]) -> Opened:
    recipe = load_recipe(old.recipe, [*overrides, f"run.name={name}"])
    if recipe.supervised != load_recipe(old.recipe).supervised:
        raise RunError(
            f"--fork goes on where '{old.root}' is, but supervised fine-tuning and reinforcement do not count prompts alike: "
            f"`relax-hpc export {old.root} DIR`, and begin a new run with --set model.path=DIR"
        )
    new = place(recipe)
    if new.root.exists():
        raise RunError(f"'{new.root}' exists: choose another name for --fork")
    fork_server = ForkServer(new)
    return Opened(create(recipe, fork_server, fork_of=old, tell=tell), load_recipe(new.recipe), fork_server)
