"""`relax-hpc status`, `stop`, `recipe`, `export`: small commands on runs and recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from relax_hpc.cli.errors import friendly
from relax_hpc.cli.run import Sets, Site

RunPath = Annotated[Path, typer.Argument(help="The run's directory.", show_default=False)]


def status(run: RunPath) -> None:
    """Show what a run is doing, from its files: works while it runs, from another machine too, and after it ended."""
    from rich.console import Console

    from relax_hpc.launch.status import Status
    from relax_hpc.launch.view import render
    from relax_hpc.run_dir import open_existing

    with friendly():
        Console().print(render(Status.of(open_existing(run))))


def stop(run: RunPath) -> None:
    """Ask a run to end its step, checkpoint and stop; `relax-hpc run RUN` goes on with it later."""
    from relax_hpc.launch.lease import holder
    from relax_hpc.run_dir import RunError, open_existing, publish

    with friendly():
        opened = open_existing(run)
        held = holder(opened)
        if held is None:
            raise RunError(f"'{run}' is not running: nothing to stop")
        publish(opened.stop, b"")
        typer.echo(
            f"asked pid {held.get('pid')} on {held.get('host')} to stop; `relax-hpc status {run}` shows when it has"
        )


def recipe(
    path: Annotated[Path, typer.Argument(help="The recipe (TOML).", show_default=False)],
    sets: Sets = [],  # noqa: B006
    site: Site = None,
    plain: Annotated[bool, typer.Option("--toml", help="Print TOML that loads back, instead of the table.")] = False,
) -> None:
    """Check a recipe and print every key with its value and where that comes from: a default, the site profile, the file, or --set."""
    from rich.console import Console
    from rich.table import Table

    from relax_hpc.recipe import dump_recipe, load_recipe, site_file, sources

    with friendly():
        profile = site_file(site)
        loaded = load_recipe(path, sets, profile)
        if plain:
            typer.echo(dump_recipe(loaded), nl=False)
            return
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("key", "value", "from"):
            table.add_column(column, overflow="fold")
        colours = {"default": "dim", "site": "cyan", "file": "green", "--set": "yellow"}
        for row in sources(loaded, path, sets, profile):
            table.add_row(row.key, row.value, f"[{colours[row.where]}]{row.where}[/]")
        Console().print(table)


def export(
    run: RunPath,
    output: Annotated[Path, typer.Argument(help="The directory to make.", show_default=False)],
    step: Annotated[
        Optional[int], typer.Option(help="Which checkpoint; the newest by default.", show_default=False)
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face model directory that `from_pretrained` loads."""
    from relax_hpc.trainers.export import export_checkpoint

    with friendly():
        typer.echo(export_checkpoint(run, output, step))
