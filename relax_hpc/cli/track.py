"""`relax-hpc track`: a run's metrics for other tools, after the fact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from relax_hpc.cli.errors import fail, friendly
from relax_hpc.cli.run import Sets


def track(
    run: Annotated[
        Path, typer.Argument(help="The run's directory; the run is over.", show_default=False, readable=False)
    ],
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
