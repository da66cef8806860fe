"""Tables in narrow terminals."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from relax_hpc.cli.tables import show_table


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_no_column_vanishes_however_narrow_the_terminal(width: int) -> None:
    table = Table(title="many")
    names = [f"column-{k:02d}" for k in range(15)]
    for name in names:
        table.add_column(name, justify="right")
    for row in range(7):
        table.add_row(*(f"r{row}c{k}" for k in range(15)))
    out = io.StringIO()
    show_table(table, Console(file=out, width=width))
    text = out.getvalue()
    assert all(name in text for name in names)
    assert all(f"r{row}c{k} " in text for row in range(7) for k in range(15)) and "many" in text
    assert max(map(len, text.splitlines())) <= width
