"""Runs all checks of a recipe or a run, area by area; makes nothing that stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir, open_existing
from relax_hpc.planning.doctor import files, python, room, slurm
from relax_hpc.planning.doctor.checks import Check, failed, note, worst
from relax_hpc.planning.doctor.nodes import on_nodes
from relax_hpc.recipe import Recipe, change_on_resume, load_recipe, site_file
from relax_hpc.slurm.plan import make_plan
from relax_hpc.telemetry import read_metrics

Area = Literal["files", "python", "slurm", "nodes"]
AREAS: tuple[Area, ...] = ("files", "python", "slurm")
"""Areas to check by default; nodes are checked only on demand, since that takes a job."""


def target(path: Path, sets: Sequence[str] = (), site: Path | None = None) -> tuple[Recipe, RunDir | None]:
    """The recipe that `path` (a recipe or a run directory) means, and the run. Raises RunError or RecipeError."""
    if path.is_dir():
        run = open_existing(path)
        return change_on_resume(load_recipe(run.recipe), sets), run
    if not path.exists():
        raise RunError(f"no recipe and no run at '{path}' (seen from {Path.cwd()})")
    return load_recipe(path, sets, site_file(site)), None


def examine(
    recipe: Recipe,
    run: RunDir | None = None,
    *,
    areas: Sequence[str] = AREAS,
    timeout_s: float = 120.0,
    local_root_ok: bool = False,
    say: Callable[[str], None] = lambda what: None,
) -> Iterator[Check]:
    """Yield the checks as they are made.

    `say` is told what is being looked at. Raises RunError when nothing can be written.
    """
    with files.scratch(recipe.run.root.absolute()) as folder:
        if "files" in areas:
            say("the file system")
            yield from _files(recipe, run, folder, local_root_ok)
            yield from files.access(recipe.run.root, run.root if run else None)
        if "python" in areas:
            say("Python's libraries")
            yield from python.environment(recipe)
        if "slurm" in areas:
            say("the cluster")
            yield from _slurm(recipe, run, folder)
        if "nodes" in areas:
            say(f"nodes: a job, {2 * timeout_s:.0f} s at most")
            yield from _nodes(recipe, folder, timeout_s, "python" in areas)


def checkpoint_s(run: RunDir | None) -> float | None:
    """Seconds of the longest checkpoint of this run; None before the first."""
    if run is None:
        return None
    records, _ = read_metrics(run.metrics / "trainer-0.jsonl")
    return max((float(r["seconds"]) for r in records if r["kind"] == "checkpoint" and r.get("seconds")), default=None)


def _files(recipe: Recipe, run: RunDir | None, folder: Path, local_root_ok: bool) -> Iterator[Check]:
    own = folder / "semantics"
    own.mkdir()
    yield from files.semantics(own, trainer_processes=recipe.trainer.processes)
    if recipe.slurm is not None:
        yield slurm.root_is_shared(make_plan(recipe), local_root_ok)
    yield from room.room(recipe)
    inputs = room.inputs(recipe)
    yield from inputs
    if worst(inputs) == "ok":
        yield from room.rows(recipe, run)


def _slurm(recipe: Recipe, run: RunDir | None, folder: Path) -> Iterator[Check]:
    if recipe.slurm is None:
        yield note(
            slurm.AREA, "[slurm]", "the recipe has no such table: it runs on this machine, and Slurm is not looked at"
        )
        return
    plan, programs = make_plan(recipe), slurm.programs()
    yield from programs
    if any(check.verdict == "failed" for check in programs):
        return
    yield from slurm.cluster_checks(plan, slurm.look(), checkpoint_s(run))
    yield from slurm.try_scripts(plan, folder)


def _nodes(recipe: Recipe, folder: Path, timeout_s: float, libraries: bool) -> Iterator[Check]:
    if recipe.slurm is None:
        yield failed("nodes", "[slurm]", "the recipe has no such table", "one that says where nodes are", "--set slurm.partition=NAME")  # fmt: skip
        return
    try:
        yield from on_nodes(make_plan(recipe), folder, timeout_s, libraries=libraries)
    except FileNotFoundError as error:
        yield failed(
            "nodes", "srun", f"'{error.filename}' is not there", "Slurm's client commands", "call this on a login node"
        )
