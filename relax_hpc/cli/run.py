"""`relax-hpc run`: begin a run, or go on with one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from relax_hpc.cli.errors import fail, friendly, warn
from relax_hpc.cli.options import Code, Redo, Sets, Site, Target, option, path_option

if TYPE_CHECKING:
    from relax_hpc.files.run_dir import RunDir
    from relax_hpc.recipe.schema import Recipe


def warn_of(run: RunDir, recipe: Recipe, *more: str) -> None:
    """Warn of what a person seldom means: edited files that the run does not take, keys, rows that are left out."""
    from relax_hpc.files.publish import read_json
    from relax_hpc.launch.resume import note_of_edited
    from relax_hpc.recipe.tables.source import left_out

    for warning in filter(None, (note_of_edited(run), *more, *recipe.warnings, *left_out(read_json(run.rows) or {}))):
        warn(warning)


def tell(doing: str) -> None:
    """Say what is being done until the run begins."""
    typer.echo(f"preparing: {doing}", err=True)


Fork = Annotated[
    Optional[str],
    option(help="Start a new run of this name from the newest checkpoint of the run TARGET; any key may be --set."),
]
Debug = Annotated[
    Optional[str],
    option(help="'rollout-only': generate with the first weights, train nothing. 'train-only': train on old shards."),
]
ShardsFrom = Annotated[
    Optional[Path], path_option("--from", help="With --debug train-only: the run whose shards are trained on again.")
]


def run(
    target: Target,
    sets: Sets = [],  # noqa: B006
    site: Site = None,
    fork: Fork = None,
    debug: Debug = None,
    shards_from: ShardsFrom = None,
    code: Code = None,
    redo: Redo = None,
) -> None:
    """Begin a run from a recipe, or go on with one, on this machine.

    The run is a directory, ROOT/NAME. The same command goes on with a run that was stopped, killed or has more steps to make; a finished one says so. [bold]Ctrl-C[/bold] once: checkpoint and stop; twice: stop at once (nothing is lost either way).

    [dim]relax-hpc run recipes/quickstart.toml[/dim]
    [dim]relax-hpc run recipes/quickstart.toml --set async.max_staleness=0 --set run.name=on-policy[/dim]
    [dim]relax-hpc run runs/quickstart --set run.steps=600[/dim]
    [dim]relax-hpc run runs/quickstart --code new[/dim]
    [dim]relax-hpc run runs/quickstart --fork slower --set trainer.learning_rate=1e-4[/dim]
    """
    tell("loading libraries")  # before they are: the first second of a newcomer's
    from rich.console import Console
    from rich.markup import escape

    from relax_hpc.launch.create import open_or_create
    from relax_hpc.supervise.local import run_here

    with friendly():
        tell("checking the recipe")
        opened = open_or_create(
            target, sets, fork=fork, debug=debug, shards_from=shards_from, site=site, code=code, redo=redo, tell=tell
        )
        console, root = Console(), escape(str(opened.run.root))
        if opened.finished:
            console.print(
                f"[green]done[/green] already: {opened.finished} steps in [bold]{root}[/bold]; --set run.steps=… makes more"
            )
            return
        console.print(f"[bold]{root}[/bold]", soft_wrap=True)
        warn_of(opened.run, opened.recipe)
        outcome = run_here(opened, console)
    if outcome["outcome"] == "failed":
        fail(outcome["reason"])
    if outcome["outcome"] == "stopped":
        console.print(
            f"stopped at step {outcome['step']}; go on with [bold]relax-hpc run {root}[/bold]", soft_wrap=True
        )
        return
    shards = f"  ·  relax-hpc shards stats {root}" if opened.recipe.generates else ""
    console.print(f"look closer: [bold]relax-hpc report {root}[/bold]{shards}", soft_wrap=True)
