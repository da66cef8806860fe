"""Table of `relax-hpc simulate` on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from relax_hpc.cli.tables import show_table
from relax_hpc.planning.simulation.outcome import Outcome

FEW_FAULTS = 10
"""Faults of the trainer below which a row says little about them."""


def show(outcomes: Sequence[Outcome], best: Outcome, why: str, notes: Sequence[str], console: Console) -> None:
    """Print one row a setup, the recommended one in bold; then why, and where the times are from."""
    faults = any(o.mtbf_h is not None for o in outcomes)
    names = ["workers", "nodes", "stale", "on_stale", *(["MTBF h", "faults"] if faults else []), "step p50 s", "p95 s", "samples/s",
             "trainer waits", "workers idle", "age p50", "max", "dropped", "masked", "effective", "file calls/s"]  # fmt: skip
    columns = (Column(name.replace(" ", "\n"), justify="right", no_wrap=True) for name in names)
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for o in outcomes:
        mtbf = ["-" if o.mtbf_h is None else f"{o.mtbf_h:g}", str(o.trainer_faults + o.node_faults)] if faults else []
        table.add_row(
            str(o.workers), str(o.nodes), str(o.max_staleness), o.on_stale, *mtbf, _short(o.step_p50_s), _short(o.step_p95_s),
            _short(o.samples_s), f"{o.trainer_waits:.0%}", f"{o.workers_idle:.0%}", f"{o.age_p50:g}", str(o.age_max),
            f"{o.dropped:.1%}", f"{o.masked:.1%}", f"{o.effective:.1%}", f"{o.file_calls_s:,.0f}",
            style="bold" if o is best else None,
        )  # fmt: skip
    show_table(table, console)
    console.print(f"[green]recommended:[/green] {escape(why)}", highlight=False, soft_wrap=True)
    few = sum(o.mtbf_h is not None and o.trainer_faults < FEW_FAULTS for o in outcomes)
    if few:
        said = f"the trainer had fewer than {FEW_FAULTS} faults in {few} of {len(outcomes)} rows, which say little about them: more --steps see more"
        console.print(f"[yellow]{said}[/yellow]", highlight=False, soft_wrap=True)
    console.print("[dim]times: " + escape("; ".join(notes)) + "[/dim]", highlight=False, soft_wrap=True)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
