"""`relax-hpc trace`: a run's timeline, for a trace viewer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from relax_hpc.cli.errors import friendly


def trace(
    run: Annotated[
        Path, typer.Argument(help="The run's directory; the run may be going on.", show_default=False, readable=False)
    ],
    output: Annotated[
        Optional[Path],
        typer.Option(
            "--output", "-o", help="The file to write. [default: RUN/trace.json]", show_default=False, readable=False
        ),
    ] = None,
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
