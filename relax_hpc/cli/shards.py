"""`relax-hpc shards …`: what was generated, and what became of it, from the files of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from relax_hpc.cli.errors import friendly
from relax_hpc.cli.options import RunPath, option
from relax_hpc.files.errors import Damaged, RunError

if TYPE_CHECKING:
    from relax_hpc.monitor.analysis import RunView

app = typer.Typer(
    name="shards",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Look at what a run generated. Works on a run that is going on, too.

    A [bold]shard[/bold] is one HDF5 file: all answers to one [bold]request[/bold], which is a handful of prompts with several
    answers (a [bold]group[/bold]) each. Every group that was generated is kept, with what became of it:

    [green]trained[/green]  in the loss · [yellow]filtered[/yellow]  a filter kept it out · [red]failed[/red]  could not be
    generated or scored · [magenta]dropped[/magenta]  too old · [blue]unused[/blue]  not taken by a step (yet) ·
    [cyan]evaluation[/cyan]  held out
    """,
)

STATUS_HELP = "Only this status: trained, filtered, failed, dropped, unused or evaluation."


@app.command("ls")
def ls(
    run: RunPath,
    last: Annotated[int, typer.Option("--last", "-n", help="Show this many, the last.", min=1)] = 30,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Show all of them.")] = False,
    status: Annotated[Optional[str], option(help=STATUS_HELP)] = None,
    step: Annotated[Optional[int], option(help="Only what this step took.")] = None,
) -> None:
    """List shards: one line a request, by its batch (an evaluation's: by its version).

    AGE is in versions: how far the weights had moved on when the request's oldest token was trained on.

    [dim]relax-hpc shards ls runs/countdown --status dropped[/dim]
    """
    from relax_hpc.cli.tables import shard_tables

    with friendly():
        view, status = _open(run), _status(status)
        statuses = view.statuses(broken=[])  # they are named with the rows
        paths = sorted((p for p in view.shard_paths() if _matches(statuses.of(p), status, step)), key=_place)
        # Only a shard itself knows of failed groups: for them all have to be opened.
        opened = paths if everything or status == "failed" else paths[-last:]
        broken: list[RunError] = []
        rows = [r for r in view.request_rows(opened, broken) if status != "failed" or r["failed_groups"]]
        shown = rows if everything else rows[-last:]
        hidden = len(paths) - len(opened) + len(rows) - len(shown)
        shard_tables.show_requests(shown, hidden, broken)


@app.command("show")
def show(
    run: RunPath,
    request: Annotated[
        str, typer.Argument(help="A request's id as `ls` prints it, or REQUEST/SAMPLE.", show_default=False)
    ],
    group: Annotated[Optional[int], option("--group", "-g", help="Only this group.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Do not shorten texts.")] = False,
    media: Annotated[
        Optional[Path], option(help="Write the groups' pictures, frames of videos and sounds to this HTML file.")
    ] = None,
) -> None:
    """Print one request: its prompts, every answer with its reward, and why groups failed or were filtered.

    [dim]relax-hpc shards show runs/countdown r000012-003 --group 2 --full[/dim]
    """
    from relax_hpc.cli.tables import shard_tables
    from relax_hpc.spool.shard import Shard

    with friendly():
        view = _open(run)
        request_id, _, sample = request.removeprefix("quarantine/").partition("/")
        path = _find(view, request_id)
        with Shard(path) as shard:
            shard_tables.show_request(
                view, shard, view.statuses().of(path), group, int(sample) if sample.isdigit() else None, full
            )
            groups = range(len(shard.groups)) if group is None else [group]
        if media is not None:
            from relax_hpc.monitor.analysis.pictures import page

            media.write_text(page(view, request_id, groups), encoding="utf-8")
            typer.echo(f"{media} shows groups {[*groups]}")


@app.command("stats")
def stats(run: RunPath) -> None:
    """Count everything: groups, samples, tokens and bytes by status, with rewards, lengths and ages.

    Reads every shard's small columns; damaged shards are left out and named.
    """
    from relax_hpc.cli.tables import shard_tables
    from relax_hpc.monitor.analysis.counts import count

    with friendly():
        view = _open(run)
        shard_tables.show_stats(count(view))


@app.command("validate")
def validate(run: RunPath) -> None:
    """Read every shard whole, compare all checksums, and whose it is. Exit code 1, and a list, if any is damaged or another's."""
    from rich.console import Console
    from rich.progress import track

    from relax_hpc.spool.shard import Shard

    with friendly():
        view, size = _open(run), 0
        own = view.run.read_id()
        broken: list[RunError] = []
        paths = view.shard_paths()
        for path in track(paths, "validating", console=Console(stderr=True), transient=True, disable=not paths):
            try:
                with Shard(path) as shard:
                    shard.check_owner(path.name.partition(".")[0], own)
                    shard.validate()
                    size += shard.bytes
            except RunError as error:
                if path.exists():  # else retention removed it meanwhile
                    broken.append(error)
    _name(broken)
    typer.echo(f"{len(paths) - len(broken)} of {len(paths)} shards are whole ({size / 1e6:.1f} MB read)")
    if broken:
        raise typer.Exit(1)


@app.command("export")
def export(
    run: RunPath,
    output: Annotated[
        Path,
        typer.Argument(
            help="The Parquet file to write; one that exists is replaced.", show_default=False, readable=False
        ),
    ],
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Token ids, loss mask, logprobs and versions too, a list a row.")
    ] = False,
    text: Annotated[bool, typer.Option("--text/--no-text", help="Prompts, answers and completions as text.")] = True,
    status: Annotated[Optional[str], option(help=STATUS_HELP)] = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave damaged shards and ledger entries out, and name them.")
    ] = False,
) -> None:
    """Write all samples as one Parquet file, a row each, for pandas, polars, DuckDB or Spark.

    Streams: memory does not grow with the run.

    [dim]relax-hpc shards export runs/countdown countdown.parquet[/dim]
    """
    from relax_hpc.monitor.analysis.export import export_parquet

    with friendly():
        view, status, broken = _open(run), _status(status), list[RunError]()
        try:
            skipped = broken if skip_damaged else None
            rows = export_parquet(
                view, output, text=text, tokens=tokens, statuses=[status] if status else None, broken=skipped
            )
        except Damaged as error:
            raise RunError(f"{error}; to leave damaged files out, say --skip-damaged") from error
        _name(broken)
        left_out = f", {len(broken)} damaged files left out" if broken else ""
        typer.echo(f"{output}: {rows} samples, {output.stat().st_size / 1e6:.1f} MB{left_out}")


def _name(broken: list[RunError]) -> None:
    for damage in broken:
        typer.secho("damaged: ", fg="red", bold=True, nl=False)
        typer.echo(str(damage))


def _place(path: Path) -> tuple[int, str]:
    """Sort by batch (an evaluation: by version), then name; file times would be another machine's, or a copy's."""
    number = path.stem[1:7]
    return int(number) if number.isdecimal() else -1, path.name


def _open(run: Path) -> RunView:
    from relax_hpc.monitor.analysis import RunView

    return RunView(run)


def _status(status: str | None) -> str | None:
    from relax_hpc.monitor.analysis import STATUSES

    if status is not None and status not in STATUSES:
        raise RunError(f"--status {status!r}: use one of {list(STATUSES)}")
    return status


def _matches(of: Any, status: str | None, step: int | None) -> bool:
    """True if a request may hold such groups: a taken one may hold filtered ones, any may hold failed ones."""
    if step is not None and of.step != step:
        return False
    if status == "filtered":
        return bool(of.filtered)
    return status in (None, "failed", of.status)


def _find(view: RunView, request: str) -> Path:
    """Return the shard called `request`. Raises RunError naming its state, and some that there are."""
    from relax_hpc.spool.queue import RequestQueue

    paths = view.shard_paths()
    for path in paths:
        if path.stem == request:
            return path
    state = RequestQueue(view.run).states().get(request)
    raise RunError(
        f"no shard of request '{request}' in '{view.run.root}'{f': it is {state}' if state else ''}; there are {len(paths)} shards, "
        f"the last: {[p.stem for p in paths[-5:]]} (`relax-hpc shards ls`)"
    )
