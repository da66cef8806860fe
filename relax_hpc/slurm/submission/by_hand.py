"""Batch scripts to send by hand: they make the run themselves, so nothing else has to exist before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import replace
from relax_hpc.recipe import load_recipe, site_file
from relax_hpc.slurm.plan import Kind, make_plan
from relax_hpc.slurm.submission.scripts import ByHand, render, shown_from


def by_hand(recipe: Path, sets: Sequence[str] = (), *, seeds: int = 0, site: Path | None = None) -> dict[str, str]:
    """Script name -> text for a recipe over the profile at `site`, to be sent from the working directory."""
    plan = shown_from(make_plan(load_recipe(recipe, sets, site)), Path.cwd())
    if seeds and plan.generates and plan.slurm.shape != "single":
        raise RunError(
            f"--seeds {seeds}: an array's tasks are whole runs, and slurm.shape = '{plan.slurm.shape}' makes one of several "
            "jobs; use --set slurm.shape=single"
        )
    said = ByHand(recipe, tuple(sets), seeds, site)
    if seeds:
        return {f"{plan.name}-seeds.sbatch": render(plan, "leader", said)}
    kinds: tuple[Kind, ...] = (*plan.jobs, "elastic") if plan.generates else plan.jobs
    return {f"{plan.name}-{kind}.sbatch": render(plan, kind, said) for kind in kinds}


def write_by_hand(
    recipe: Path, sets: Sequence[str], folder: Path, *, seeds: int = 0, site: Path | None = None
) -> list[Path]:
    """Write the scripts into `folder`, replacing those that are there."""
    texts = by_hand(recipe, sets, seeds=seeds, site=site_file(site))
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        replace(folder / name, text.encode())
    return [folder / name for name in texts]
