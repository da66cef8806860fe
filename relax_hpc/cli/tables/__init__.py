"""Tables that lose nothing in a narrow terminal: a table that is too wide is turned on its side."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

PIPE_WIDTH = 200


def wide_console() -> Console:
    """A console whose lines are not cut at 80 characters in a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def show_table(table: Table, console: Console) -> None:
    """Print a table; one too wide for the terminal on its side, with as many rows beside each other as fit."""
    if _width(table, console) <= console.width:
        console.print(table)
        return
    rows = list(range(table.row_count))
    title = table.title
    while rows:
        count = len(rows)
        while count > 1 and _width(_turned(table, rows[:count]), console) > console.width:
            count -= 1
        turned = _turned(table, rows[:count])
        turned.title = title
        console.print(turned)
        rows, title = rows[count:], None


def _width(table: Table, console: Console) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def _turned(table: Table, rows: list[int]) -> Table:
    """Return a table of these rows as columns, each with its first cell as its header."""
    cells = [list(column.cells) for column in table.columns]
    turned = Table(box=table.box, pad_edge=table.pad_edge, title_justify=table.title_justify)
    turned.add_column(table.columns[0].header)
    for row in rows:
        turned.add_column(cells[0][row], justify="right", style=table.rows[row].style or "")
    for column, values in zip(table.columns[1:], cells[1:], strict=True):
        turned.add_row(str(column.header).replace("\n", " "), *(values[row] for row in rows))
    return turned
