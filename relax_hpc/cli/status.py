"""`relax-hpc status`, `watch`, `logs`, `stop`, `recipe`, `export`: small commands on runs and recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from relax_hpc.cli.errors import friendly
from relax_hpc.cli.options import RecipeFile, RunPath, Sets, Site, option, path_argument, path_option

LOOK_S = 0.1


def status(run: RunPath) -> None:
    """Show what a run is doing, from its files: works while it runs, from another machine too, and after it ended.

    Of a run on a cluster also its jobs, why they wait, when they are expected to start, and its rollout nodes.
    """
    from rich.console import Console

    from relax_hpc.files.run_dir import RunDir, open_existing
    from relax_hpc.launch.making import being_made
    from relax_hpc.monitor.live_view import render
    from relax_hpc.monitor.status import Status

    with friendly():
        if not RunDir(run).exists and (doing := being_made(run.absolute())):
            typer.echo(f"{run} is being made: {doing}; relax-hpc watch {run} goes on looking")
            return
        Console().print(render(Status.of(open_existing(run), jobs=True)))


def watch(run: RunPath) -> None:
    """Show a run live, from any machine that sees its directory, until it ends; Ctrl-C leaves the run alone."""
    import contextlib
    import time

    from rich.console import Console

    from relax_hpc.files.run_dir import RunDir, open_existing
    from relax_hpc.launch.making import being_made
    from relax_hpc.monitor.live_view import live, render
    from relax_hpc.monitor.status import Status

    with friendly():
        console, said = Console(), ""
        while not RunDir(run).exists and (doing := being_made(run.absolute())):
            if doing != said:
                console.print(f"{run} is being made: {doing}", markup=False, soft_wrap=True)
            said = doing
            time.sleep(LOOK_S)
        seen = Status.of(open_existing(run), jobs=True)
        with contextlib.suppress(KeyboardInterrupt), live(seen.run, console, seen) as look:
            while not seen.over:
                look()
                time.sleep(LOOK_S)
        console.print(render(seen))


def logs(
    run: RunPath,
    role: Annotated[
        Optional[str],
        typer.Argument(help="Such as trainer-0, rollout (all of them), slurm; all by default.", show_default=False),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what comes, until the run is over.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", help="How many of the last lines, of all together.", min=0)
    ] = 50,
) -> None:
    """Print the newest logs of a run's roles, and of its Slurm jobs, in order of time.

    [dim]relax-hpc logs runs/gsm trainer-0 -f[/dim]
    """
    import contextlib

    from relax_hpc.files.run_dir import open_existing
    from relax_hpc.monitor import logs as found

    with friendly():
        opened = open_existing(run)
        chosen = found.choose(opened, role)
        width = max((len(name) for name in chosen), default=0) if len(chosen) > 1 else 0

        def show(line: found.Line) -> None:
            typer.echo(f"{line.role:<{width}} | {line.text}" if width else line.text)

        for line in found.last_lines(chosen, lines):
            show(line)
        if follow:
            with contextlib.suppress(KeyboardInterrupt):
                for line in found.follow(opened, role, chosen):
                    show(line)


def stop(run: RunPath) -> None:
    """Ask a run to end its step, checkpoint and stop; one that only waits in a queue leaves it. `relax-hpc run RUN` or `submit RUN` goes on with it later."""
    from relax_hpc.files.run_dir import open_existing
    from relax_hpc.launch.stop import stop as end

    with friendly():
        typer.echo(end(open_existing(run)))


def recipe(
    path: RecipeFile,
    sets: Sets = [],  # noqa: B006
    site: Site = None,
    plain: Annotated[bool, typer.Option("--toml", help="Print TOML that loads back, instead of the table.")] = False,
) -> None:
    """Check a recipe and print every key with its value and where that comes from: a default, the site profile, the file, or --set."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    from relax_hpc.recipe import dump_recipe, load_recipe, site_file, sources

    with friendly():
        profile = site_file(site)
        loaded = load_recipe(path, sets, profile)
        if plain:
            typer.echo(dump_recipe(loaded), nl=False)
            return
        columns = (Column(name, overflow="fold") for name in ("key", "value", "from"))
        table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="dim")
        colors = {"default": "dim", "site": "cyan", "file": "green", "--set": "yellow"}
        for row in sources(loaded, path, sets, profile):
            table.add_row(Text(row.key), Text(row.value), f"[{colors[row.where]}]{row.where}[/]")
        Console().print(table)


def export(
    run: RunPath,
    output: Annotated[Path, path_argument(help="The directory to make.")],
    step: Annotated[Optional[int], option(help="Which checkpoint; the newest by default.")] = None,
    dtype: Annotated[
        Optional[str],
        option(help="bfloat16, float16 or float32; by default the model's own, of its config.json."),
    ] = None,
    adapter: Annotated[
        bool, option("--adapter", help="The adapter of a run with \\[trainer.lora] alone, as a directory for PEFT.")
    ] = False,
) -> None:
    """Write a checkpoint as a Hugging Face model directory that `from_pretrained` loads; an adapter's, merged."""
    from relax_hpc.launch.export import export_checkpoint

    with friendly():
        typer.echo(export_checkpoint(run, output, step, dtype, adapter))


def convert(
    source: Annotated[Path, path_argument(help="A Hugging Face model directory, or a Megatron-core checkpoint.")],
    output: Annotated[Path, path_argument(help="The directory to make.")],
    model: Annotated[
        Optional[Path],
        path_option(help="Directory with config.json, when it is not beside the checkpoint."),
    ] = None,
) -> None:
    """Convert a model between Hugging Face and Megatron-core, to the bit. Needs the extra `megatron`."""
    from relax_hpc.trainers import fit
    from relax_hpc.trainers.export import convert as convert_model

    with friendly():
        fit.need_megatron()
        typer.echo(convert_model(source, output, model))
