"""`relax-hpc doctor`: what would go wrong with a run, before it is sent; and what a file system promises."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from relax_hpc.cli.errors import fail, friendly
from relax_hpc.cli.options import LocalRootOk, Sets, Site, option, path_argument, path_option

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from relax_hpc.planning.doctor.checks import Check

COLORS = {"ok": "green", "note": "dim", "warning": "yellow", "failed": "bold red"}
JUDGED = {"ok": "fine", "note": "care", "warning": "care", "failed": "refused"}
"""Verdicts on what a file system promises."""

Target = Annotated[Optional[Path], path_argument(help="A recipe (TOML) or a run's directory.")]
FileSystem = Annotated[
    Optional[Path],
    path_option(
        "--file-system", metavar="DIR", help="In place of TARGET: measure what the file system of this folder promises, within a minute."
    ),
]  # fmt: skip
Second = Annotated[
    bool,
    typer.Option("--second", help="With --file-system, on another node, first: make the changes that are watched from here."),
]  # fmt: skip
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
    target: Target = None,
    sets: Sets = [],  # noqa: B006
    site: Site = None,
    on_nodes: OnNodes = False,
    timeout: Timeout = 120.0,
    only: Only = [],  # noqa: B006
    local_root_ok: LocalRootOk = False,
    file_system: FileSystem = None,
    second: Second = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Check what a run needs: the file system, Python's libraries, the cluster; nothing is made and nothing is left.

    Each check is ok, a note, a warning or failed, with what was found, what was expected and what mends it. The exit code is 1 when one failed.

    [dim]relax-hpc doctor recipe.toml --set slurm.partition=gpu[/dim]
    [dim]relax-hpc doctor /lustre/me/runs/gsm --on-nodes[/dim]
    [dim]relax-hpc doctor --file-system /lustre/me --second[/dim]
    [dim]relax-hpc doctor --file-system /lustre/me[/dim]
    """
    import json

    from rich.console import Console

    from relax_hpc.planning.doctor.checks import worst

    errors = Console(stderr=True)
    if file_system is not None and not (target or sets or site or on_nodes or only):
        if second:
            _be_second(file_system, errors)
            return
        checks = _measured(file_system, errors)
    elif target is not None and file_system is None and not second:
        checks = _examined(target, sets, site, on_nodes, timeout, only, local_root_ok, errors)
    else:
        fail("give a recipe or a run's directory; or --file-system DIR, with --second or --json and nothing else")
    if as_json:
        typer.echo(json.dumps([check.to_json() for check in checks], indent=1))
    else:
        _print(checks, _judged if file_system is not None else _table)
    if worst(checks) == "failed":
        raise typer.Exit(1)


def _examined(
    target: Path,
    sets: list[str],
    site: Path | None,
    on_nodes: bool,
    timeout: float,
    only: list[str],
    local_root_ok: bool,
    errors: Console,
) -> list[Check]:
    """Check a recipe or a run."""
    from relax_hpc.planning.doctor.examine import AREAS, examine
    from relax_hpc.planning.doctor.examine import target as opened

    known = (*AREAS, "nodes")
    unknown = [area for area in only if area not in known]
    if unknown:
        fail(f"--only {unknown[0]}: use one of {', '.join(known)}")
    areas = (*(only or AREAS), *(("nodes",) if on_nodes else ()))
    with friendly(), _tidy_when_ended(), errors.status("looking") as shown:
        recipe, run = opened(target, sets, site)
        say = lambda what: shown.update(f"looking at {what}")
        return [*examine(recipe, run, areas=areas, timeout_s=timeout, local_root_ok=local_root_ok, say=say)]


def _measured(folder: Path, errors: Console) -> list[Check]:
    """Measure what the file system of a folder promises."""
    from relax_hpc.planning.doctor.file_system import measure

    with friendly(), _tidy_when_ended(), errors.status("measuring") as shown:
        return [*measure(folder, lambda what: shown.update(f"measuring {what}"))]


def _be_second(folder: Path, errors: Console) -> None:
    """Make the changes that another node watches."""
    from relax_hpc.planning.doctor.file_system import STAYS_S
    from relax_hpc.planning.doctor.file_system import second as work

    with friendly(), _tidy_when_ended():
        if not work(folder, errors.print):
            fail(f"nobody looked within {STAYS_S:.0f} s: `relax-hpc doctor --file-system {folder}` on another node")


@contextmanager
def _tidy_when_ended() -> Iterator[None]:
    """Turn TERM into an exception, so that all `finally`s run: jobs and files are to go too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _print(checks: list[Check], shown: Callable[[list[Check]], Table]) -> None:
    from relax_hpc.cli.tables import wide_console

    console, verdicts = wide_console(), [check.verdict for check in checks]
    console.print(shown(checks))
    counts = f"{verdicts.count('failed')} failed, {verdicts.count('warning')} warnings"
    console.print(f"{len(checks)} checks: {counts}", highlight=False)


def _table(checks: list[Check]) -> Table:
    """Lay out the needs of a run: a row each, with what mends it."""
    from rich.table import Column, Table
    from rich.text import Text

    headers = (Column(no_wrap=True), Column("check", overflow="fold"), Column("found", overflow="fold"))
    table = Table(*headers, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for check in checks:
        said = Text(check.found)
        if check.expected:
            said.append(f"\nexpected: {check.expected}", style="dim")
        if check.fix:
            said.append(f"\nfix: {check.fix}")
        table.add_row(Text(check.verdict, style=COLORS[check.verdict]), Text(check.what), said)
    return table


def _judged(checks: list[Check]) -> Table:
    """Lay out the promises of a file system: a row each, with what rests on it and the keys to set."""
    from rich.table import Column, Table
    from rich.text import Text

    headers = (
        Column(no_wrap=True),
        *(Column(name, overflow="fold") for name in ("promise", "measured", "what rests on it", "to do")),
    )
    table = Table(*headers, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for check in checks:
        cells = (check.what, check.found, check.rests, check.fix)
        table.add_row(Text(JUDGED[check.verdict], style=COLORS[check.verdict]), *map(Text, cells))
    return table
