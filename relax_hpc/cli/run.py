"""`relax-hpc run`: begin a run, or go on with one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from relax_hpc.cli.errors import fail, friendly, warn

if TYPE_CHECKING:
    from relax_hpc.files.run_dir import RunDir
    from relax_hpc.recipe.schema import Recipe

Sets = Annotated[
    list[str],
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override a recipe key, such as run.steps=500. Repeatable."),
]
Code = Annotated[
    Optional[str],
    typer.Option(
        metavar="new",
        help="Of a run that goes on: take your files (rewards, filters, …) as they are now; else it goes on with its own copies. Failed groups that no step has taken yet are scored again.",
        show_default=False,
    ),
]
Redo = Annotated[
    Optional[str],
    typer.Option(
        metavar="score|generate",
        help="Of a run that goes on: failed groups that no step has taken yet are scored, or generated, again.",
        show_default=False,
    ),
]
Site = Annotated[
    Optional[Path],
    typer.Option(
        "--site",
        metavar="FILE",
        help="Site profile laid under the recipe. [dim]default: $RELAX_HPC_SITE, ~/.config/relax_hpc/site.toml[/dim]",
        show_default=False,
        readable=False,
    ),
]


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


def run(
    target: Annotated[
        Path, typer.Argument(help="A recipe (TOML) or a run's directory.", show_default=False, readable=False)
    ],
    sets: Sets = [],  # noqa: B006
    site: Site = None,
    fork: Annotated[
        Optional[str],
        typer.Option(
            help="Start a new run of this name from the newest checkpoint of the run TARGET; any key may be --set.",
            show_default=False,
        ),
    ] = None,
    debug: Annotated[
        Optional[str],
        typer.Option(
            help="'rollout-only': generate with the first weights, train nothing. 'train-only': train on old shards.",
            show_default=False,
        ),
    ] = None,
    shards_from: Annotated[
        Optional[Path],
        typer.Option(
            "--from",
            help="With --debug train-only: the run whose shards are trained on again.",
            show_default=False,
            readable=False,
        ),
    ] = None,
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
        console = Console()
        if opened.finished:
            console.print(
                f"[green]done[/green] already: {opened.finished} steps in [bold]{escape(str(opened.run.root))}[/bold]; --set run.steps=… makes more"
            )
            return
        console.print(f"[bold]{escape(str(opened.run.root))}[/bold]", soft_wrap=True)
        warn_of(opened.run, opened.recipe)
        outcome = run_here(opened, console)
    if outcome["outcome"] == "failed":
        fail(outcome["reason"])
    if outcome["outcome"] == "stopped":
        console.print(
            f"stopped at step {outcome['step']}; go on with [bold]relax-hpc run {escape(str(opened.run.root))}[/bold]",
            soft_wrap=True,
        )
        raise typer.Exit(0)
    shards = f"  ·  relax-hpc shards stats {escape(str(opened.run.root))}" if opened.recipe.generates else ""
    console.print(f"look closer: [bold]relax-hpc report {escape(str(opened.run.root))}[/bold]{shards}", soft_wrap=True)
