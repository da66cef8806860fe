"""`relax-hpc report`, `trace`, `track`: a run's figures, timeline and metrics, for a person or for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from relax_hpc.cli.errors import fail, friendly
from relax_hpc.cli.options import Sets

GoingRun = Annotated[
    Path, typer.Argument(help="The run's directory; the run may be going on.", show_default=False, readable=False)
]
EndedRun = Annotated[
    Path, typer.Argument(help="The run's directory; the run is over.", show_default=False, readable=False)
]


def _output(says: str) -> Any:
    return typer.Option("--output", "-o", help=says, show_default=False, readable=False)


def report(
    run: GoingRun,
    output: Annotated[Optional[Path], _output("The page to write. [default: RUN/report.html]")] = None,
) -> None:
    """Write one HTML page about a run, to open, mail or keep: it needs no network and no other file.

    Reward and held-out score, lengths, ages, throughput and waiting of both sides, failures and restarts, the best and the
    worst samples with their text, the recipe.

    [dim]relax-hpc report runs/countdown -o countdown.html[/dim]
    """
    from relax_hpc.monitor.analysis import RunView
    from relax_hpc.monitor.analysis.report import write

    with friendly("--output FILE writes elsewhere"):
        view = RunView(run)
        page = output if output is not None else view.run.root / "report.html"
        write(view, page)
        typer.echo(str(page))


def trace(
    run: GoingRun,
    output: Annotated[Optional[Path], _output("The file to write. [default: RUN/trace.json]")] = None,
) -> None:
    """Write a run's timeline: a track for each role, to see who waits for whom.

    Steps with their parts, requests being generated, weights from their publication to each worker's first request with them, losses and restarts.
    Open the file in https://ui.perfetto.dev (it stays on your machine) or chrome://tracing.

    [dim]relax-hpc trace runs/countdown -o countdown.json[/dim]
    """
    from relax_hpc.monitor.analysis import RunView
    from relax_hpc.monitor.analysis.trace import write

    with friendly("--output FILE writes elsewhere"):
        view = RunView(run)
        path = output if output is not None else view.run.root / "trace.json"
        count = write(view, path)
        typer.echo(f"{path}: {count} events; open it in https://ui.perfetto.dev or chrome://tracing")


def track(
    run: EndedRun,
    sets: Sets = [],  # noqa: B006
) -> None:
    """Copy the metrics of a run that is over to the tools in its [\\[tracking]] tables, or to those that --set names.

    A run that goes on does so by itself. The copies are made anew each time, so doing it twice changes nothing.

    [dim]relax-hpc track runs/countdown[/dim]
    [dim]relax-hpc track runs/countdown --set 'tracking=[{name = "tensorboard"}]'[/dim]
    """
    from relax_hpc.files.run_dir import open_existing
    from relax_hpc.monitor.tracking.follow import Follower
    from relax_hpc.recipe import load_recipe
    from relax_hpc.supervise.lease import refuse_if_held
    from relax_hpc.telemetry import set_up_logging

    with friendly():
        opened = open_existing(run)
        recipe = load_recipe(opened.recipe, sets)
        if not recipe.tracking:
            fail(f"'{opened.root}' has no [[tracking]]: name a tool with --set 'tracking=[{{name = \"tensorboard\"}}]'")
        refuse_if_held(opened)
        set_up_logging("tracking")
        follower = Follower(opened, recipe)
        follower.look()
        for said in follower.close():
            typer.echo(said)
        if len(follower.sinks) < len(recipe.tracking):
            fail("not all of them could be made: see above")
