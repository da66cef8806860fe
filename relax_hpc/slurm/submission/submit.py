"""`relax-hpc submit`: a recipe, or an existing run, becomes jobs.

recipe ► plan ► run directory ► RUN/slurm/*.sbatch ► leader ► its successors (afterany) ► rollout job (split)
All that can be known to be wrong is said before the run is made; what sbatch refuses leaves no job behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.files.errors import RunError
from relax_hpc.files.permissions import keep_private
from relax_hpc.files.publish import replace
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch.create import create, find, finished, place
from relax_hpc.launch.resume import refuse_of_new_run, resume
from relax_hpc.recipe import Recipe, change_on_resume, load_recipe
from relax_hpc.recipe.describe import toml
from relax_hpc.slurm.client import cancel, look
from relax_hpc.slurm.plan import KINDS, Kind, Plan, make_plan
from relax_hpc.slurm.submission.sbatch import forget_end, jobs, script, submit_script, write_scripts
from relax_hpc.slurm.submission.scripts import render
from relax_hpc.slurm.submission.unstartable import hopeless
from relax_hpc.supervise.fork_server import ForkServer
from relax_hpc.supervise.lease import refuse_if_held

if TYPE_CHECKING:
    from relax_hpc.slurm.submission.run_job import RunJob

LOCAL_ROOTS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that each node has for itself."""


def submit(
    target: Path,
    sets: Sequence[str] = (),
    *,
    site: Path | None = None,
    local_root_ok: bool = False,
    code: str | None = None,
    redo: str | None = None,
) -> list[RunJob]:
    """Send the run that `target` (a recipe or a run directory) means; return its jobs, the leader first.

    code, redo: for a run that goes on, see `resume`. Raises RunError or RecipeError.
    """
    recipe, run, changes = _open(target, sets, site)
    plan = make_plan(recipe)
    if not local_root_ok:
        refuse_local_root(plan)
    refuse_missing_environment(plan)
    if run is None:
        refuse_of_new_run(code, redo)
        with ForkServer(place(recipe)) as fork_server:
            return _send(create(recipe, fork_server), plan)
    _refuse_busy(run, recipe)
    keep_private(recipe.run.group_access)
    with _undone_if_refused(run.outcome, run.recipe, run.changes, *(script(run, kind) for kind in KINDS)):
        with ForkServer(run) as fork_server:
            resume(run, changes, fork_server, code, redo)
        return _send(run, plan)


def _send(run: RunDir, plan: Plan) -> list[RunJob]:
    """Write the scripts and send them; when one is refused, cancel the others."""
    from relax_hpc.slurm.submission.run_job import RunJob

    write_scripts(run, plan)
    forget_end(run)
    sent: list[str] = []
    try:
        for kind in _kinds(plan):
            after = sent[-1] if sent and kind == "leader" else None
            begun = sent[0] if kind == "rollout" and plan.slurm.rollout_after_leader else None
            sent.append(submit_script(run, kind, after=after, begun=begun))
        # Jobs that Slurm took and will never start: the others would burn nodes waiting for them.
        if why := hopeless(sent):
            told = "; ".join(
                f"job {job} ({kind}): {why[job]}" for job, kind in zip(sent, _kinds(plan), strict=True) if job in why
            )
            raise RunError(
                f"Slurm took the jobs of '{run.root}' but cannot ever start all of them: {told}. All were cancelled; the run is there: "
                f"`relax-hpc submit {run.root} --set KEY=VALUE` sends it again"
            )
    except RunError:
        cancel(sent)
        raise
    return [RunJob(run.slurm, job) for job in sent]


@contextlib.contextmanager
def _undone_if_refused(*paths: Path) -> Iterator[None]:
    """Restore these files when a RunError comes: Slurm says what it refuses only when a job is sent."""
    before = {path: path.read_bytes() if path.exists() else None for path in paths}
    try:
        yield
    except RunError:
        for path, content in before.items():
            if content is not None:
                replace(path, content)
            else:
                path.unlink(missing_ok=True)
        raise


def preview(target: Path, sets: Sequence[str] = (), *, site: Path | None = None) -> dict[Kind, str]:
    """The scripts that `submit` would send, by kind of job; nothing is made."""
    plan = make_plan(_open(target, sets, site)[0])
    return {kind: render(plan, kind) for kind in plan.jobs}


def refuse_local_root(plan: Plan) -> None:
    """Raise RunError when the run would lie where compute nodes do not see it."""
    real = plan.root.resolve()
    local = next((root for root in LOCAL_ROOTS if real.is_relative_to(root)), None)
    if local is not None:
        raise RunError(
            f"run.root = '{plan.root}' lies in {local}, which each machine has for itself: nodes would not see the run. "
            "Choose a directory on the shared file system with --set run.root=DIR, or give --local-root-ok if it is shared here"
        )


def refuse_missing_environment(plan: Plan) -> None:
    """Raise RunError when the environment that nodes shall unpack is not there."""
    packed = plan.slurm.stage_environment
    if packed is not None and not packed.is_file():
        raise RunError(
            f"slurm.stage_environment = '{packed}' is no file: make it with `tar -cf {packed} -C ENVIRONMENT .`, or leave it out"
        )


def _open(target: Path, sets: Sequence[str], site: Path | None) -> tuple[Recipe, RunDir | None, list[str]]:
    """The recipe that shall be in force; the run where it exists already, and the changes that it goes on with."""
    recipe, run = find(target, sets, site)
    if run is None:
        return recipe, None, []
    changes = list(sets)
    if not target.is_dir():
        table = make_plan(recipe).slurm.model_dump(mode="json", exclude_none=True)
        changes = [f"slurm={toml(table)}"]
    return change_on_resume(load_recipe(run.recipe), changes), run, changes


def _kinds(plan: Plan) -> list[Kind]:
    """The kinds of jobs to send, leaders first: each leader's successor waits for the one before it."""
    ahead = plan.slurm.queue_ahead if plan.slurm.restart == "chain" else 0
    leaders: list[Kind] = ["leader"] * (1 + min(ahead, plan.slurm.max_jobs - 1))
    return [*leaders, *(kind for kind in plan.jobs if kind != "leader")]


def _refuse_busy(run: RunDir, recipe: Recipe) -> None:
    """Raise RunError for a run that is finished, at work, or queued."""
    refuse_if_held(run)
    if done := finished(run, recipe):
        raise RunError(f"'{run.root}' is done: {done} steps; --set run.steps=… makes more")
    alive = [
        f"{job} ({seen.state})" for job, seen in look(about["id"] for about in jobs(run)).items() if seen and seen.alive
    ]
    if alive:
        ids = " ".join(text.split()[0] for text in alive)
        raise RunError(f"'{run.root}' has jobs already: {', '.join(alive)}; `scancel {ids}` ends them")
