"""`relax-hpc doctor`: what would go wrong with a run, before it is sent."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from relax_hpc.cli.errors import fail, friendly
from relax_hpc.cli.options import LocalRootOk, Sets, Site, Target, option

if TYPE_CHECKING:
    from relax_hpc.planning.doctor.checks import Check

COLORS = {"ok": "green", "note": "dim", "warning": "yellow", "failed": "bold red"}


OnNodes = Annotated[
    bool, typer.Option("--on-nodes", help="Look from nodes too: a short job for each group, one task a node.")
]
Timeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", help="With --on-nodes: how long a job may take to start, and a node to answer.", min=1
    ),
]
Only = Annotated[
    list[str], option(metavar="AREA", help="Look at this alone: files, python, slurm or nodes. Repeatable.")
]


def doctor(
    target: Target,
    sets: Sets = [],  # noqa: B006
    site: Site = None,
    on_nodes: OnNodes = False,
    timeout: Timeout = 120.0,
    only: Only = [],  # noqa: B006
    local_root_ok: LocalRootOk = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Check what a run needs: the file system, Python's libraries, the cluster; nothing is made and nothing is left.

    Each check is ok, a note, a warning or failed, with what was found, what was expected and what mends it. The exit code is 1 when one failed.

    [dim]relax-hpc doctor recipe.toml --set slurm.partition=gpu[/dim]
    [dim]relax-hpc doctor /lustre/me/runs/gsm --on-nodes[/dim]
    """
    import json

    from rich.console import Console

    from relax_hpc.planning.doctor.checks import worst
    from relax_hpc.planning.doctor.examine import AREAS, examine
    from relax_hpc.planning.doctor.examine import target as opened

    known = (*AREAS, "nodes")
    unknown = [area for area in only if area not in known]
    if unknown:
        fail(f"--only {unknown[0]}: use one of {', '.join(known)}")
    areas = (*(only or AREAS), *(("nodes",) if on_nodes else ()))
    errors = Console(stderr=True)
    with friendly(), _tidy_when_ended(), errors.status("looking") as shown:
        recipe, run = opened(target, sets, site)
        checks = list(
            examine(
                recipe, run, areas=areas, timeout_s=timeout, local_root_ok=local_root_ok, say=lambda what: shown.update(f"looking at {what}")
            )
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps([check.to_json() for check in checks], indent=1))
    else:
        _print(checks)
    if worst(checks) == "failed":
        raise typer.Exit(1)


@contextmanager
def _tidy_when_ended() -> Iterator[None]:
    """Turn TERM into an exception, so that all `finally`s run: jobs and files are to go too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print(checks: list[Check]) -> None:
    from rich.table import Column, Table
    from rich.text import Text

    from relax_hpc.cli.tables import wide_console

    headers = (Column(no_wrap=True), Column("check", overflow="fold"), Column("found", overflow="fold"))
    table = Table(*headers, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for check in checks:
        said = Text(check.found)
        if check.expected:
            said.append(f"\nexpected: {check.expected}", style="dim")
        if check.fix:
            said.append(f"\nfix: {check.fix}")
        table.add_row(Text(check.verdict, style=COLORS[check.verdict]), Text(check.what), said)
    console, verdicts = wide_console(), [check.verdict for check in checks]
    console.print(table)
    counts = f"{verdicts.count('failed')} failed, {verdicts.count('warning')} warnings"
    console.print(f"{len(checks)} checks: {counts}", highlight=False)
