"""`relax-hpc submit`, `render`: a run as Slurm jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_hpc.cli.errors import friendly
from relax_hpc.cli.options import Code, LocalRootOk, RecipeFile, Redo, Sets, Site, Target
from relax_hpc.cli.run import warn_of


def submit(
    target: Target,
    sets: Sets = [],  # noqa: B006
    site: Site = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch scripts; make and send nothing.")] = False,
    local_root_ok: LocalRootOk = False,
    code: Code = None,
    redo: Redo = None,
) -> None:
    """Send a run to the Slurm cluster, as its recipe's [bold]\\[slurm][/bold] table says.

    Makes the run's directory, writes the batch scripts to RUN/slurm and sends them. The same command goes on with a run that has no jobs any more. [bold]relax-hpc status RUN[/bold] watches it, [bold]relax-hpc stop RUN[/bold] ends it with a checkpoint.

    [dim]relax-hpc submit recipe.toml --set slurm.partition=gpu --set slurm.time=04:00:00[/dim]
    [dim]relax-hpc submit recipe.toml --dry-run[/dim]
    [dim]relax-hpc submit /lustre/me/runs/gsm --set run.steps=600[/dim]
    """
    with friendly():
        from relax_hpc.recipe import load_recipe
        from relax_hpc.slurm.plan import make_plan, unset_cpus
        from relax_hpc.slurm.submission import submit as slurm

        if dry_run:
            for kind, text in slurm.preview(target, sets, site=site).items():
                typer.echo(f"##### {kind}.sbatch\n{text}")
            return
        jobs = slurm.submit(target, sets, site=site, local_root_ok=local_root_ok, code=code, redo=redo)
        run = jobs[0].run
        recipe = load_recipe(run.recipe)
        for job in jobs:
            how, _, other = job.dependency.partition(":")
            waits = f", when {other} has {'ended' if how == 'afterany' else 'begun'}" if other else ""
            typer.echo(f"{job.job_id}  {job.name}, {job.kind}{waits}")
        warn_of(run, recipe, unset_cpus(make_plan(recipe)))
        typer.echo(f"sent {run.root}; watch it with: relax-hpc status {run.root}")


def render(
    recipe: RecipeFile,
    sets: Sets = [],  # noqa: B006
    site: Site = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where the scripts go.", readable=False)
    ] = Path("slurm"),
    seeds: Annotated[
        int,
        typer.Option(help="A job array of this many runs that differ in run.seed; needs slurm.shape 'single'.", min=0),
    ] = 0,
) -> None:
    """Write batch scripts to look at, change and send by hand with sbatch; each makes the run where it is missing.

    Nothing but the scripts is made. They are for the directory that this command is called from.

    [dim]relax-hpc render recipe.toml -o jobs && sbatch jobs/gsm-leader.sbatch[/dim]
    """
    with friendly():
        from relax_hpc.slurm.submission.by_hand import write_by_hand

        for path in write_by_hand(recipe, sets, output, seeds=seeds, site=site):
            typer.echo(path)
