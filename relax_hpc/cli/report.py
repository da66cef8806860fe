"""`relax-hpc report`: one HTML page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from relax_hpc.cli.errors import friendly


def report(
    run: Annotated[
        Path, typer.Argument(help="The run's directory; the run may be going on.", show_default=False, readable=False)
    ],
    output: Annotated[
        Optional[Path],
        typer.Option(
            "--output", "-o", help="The page to write. [default: RUN/report.html]", show_default=False, readable=False
        ),
    ] = None,
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
