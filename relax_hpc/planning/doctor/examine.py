"""Runs all checks of a recipe or a run, area by area; makes nothing that stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir, open_existing
from relax_hpc.planning.doctor import files, python, room, slurm
from relax_hpc.planning.doctor.checks import Check, failed, note, worst
from relax_hpc.planning.doctor.nodes import on_nodes
from relax_hpc.recipe import Recipe, change_on_resume, load_recipe, site_file
from relax_hpc.slurm.plan import make_plan
from relax_hpc.telemetry import read_metrics

AREAS = ("files", "python", "slurm")
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
    """Yield the checks as they are made; `say` is told of each area. Raises RunError when nothing can be written."""
    looks: dict[str, tuple[str, Callable[[Path], Iterable[Check]]]] = {
        "files": ("the file system", lambda folder: _files(recipe, run, folder, local_root_ok)),
        "python": ("Python's libraries", lambda folder: python.environment(recipe)),
        "slurm": ("the cluster", lambda folder: _slurm(recipe, run, folder)),
        "nodes": (
            f"nodes: a job, {2 * timeout_s:.0f} s at most",
            lambda folder: _nodes(recipe, folder, timeout_s, "python" in areas),
        ),
    }
    with files.scratch(recipe.run.root.absolute()) as folder:
        for area, (what, look) in looks.items():
            if area in areas:
                say(what)
                yield from (replace(check, area=area) for check in look(folder))


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
    yield from files.access(recipe.run.root, run.root if run else None)


def _slurm(recipe: Recipe, run: RunDir | None, folder: Path) -> Iterator[Check]:
    if recipe.slurm is None:
        yield note("[slurm]", "the recipe has no such table: it runs on this machine, and Slurm is not looked at")
        return
    plan, programs = make_plan(recipe), slurm.programs()
    yield from programs
    if worst(programs) != "failed":
        yield from slurm.cluster_checks(plan, slurm.look(), checkpoint_s(run))
        yield from slurm.try_scripts(plan, folder)


def _nodes(recipe: Recipe, folder: Path, timeout_s: float, libraries: bool) -> Iterator[Check]:
    if recipe.slurm is None:
        expected = "one that says where nodes are"
        yield failed("[slurm]", "the recipe has no such table", expected, "--set slurm.partition=NAME")
        return
    try:
        yield from on_nodes(make_plan(recipe), folder, timeout_s, libraries=libraries)
    except FileNotFoundError as error:
        missing = f"'{error.filename}' is not there"
        yield failed("srun", missing, "Slurm's client commands", "call this on a login node")
