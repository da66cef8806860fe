"""Trajectories as one Parquet file, written while the shards are read: memory does not grow with the run.

shard ──► Arrow table ──► … ROWS_PER_GROUP rows ──► row group ──► FILE (renamed into place when it is complete)
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.files.errors import RunError
from relax_hpc.monitor.analysis import RunView
from relax_hpc.monitor.analysis.tables import TOKEN_TYPES, arrow_type

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_PER_GROUP = 8192
"""Samples in a row group: enough for column statistics to pay."""
BYTES_PER_GROUP = 64 << 20
"""Bytes at which a row group is closed whatever its rows: the writer holds this much in memory."""


def export_parquet(
    view: RunView,
    output: Path,
    *,
    text: bool = True,
    tokens: bool = False,
    statuses: Sequence[str] | None = None,
    broken: list[RunError] | None = None,
) -> int:
    """Write the run's trajectories to `output`; the number of rows. `statuses`: only samples that ended so.

    Raises RunError for a folder that is not there, and for damaged shards and ledger
    entries, unless `broken` is given, which then collects them.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not output.parent.is_dir():
        raise RunError(f"no folder '{output.parent}' to write '{output.name}' into: make it first")
    names = view.columns(None, text) + (list(TOKEN_TYPES) if tokens else [])
    schema = pa.schema([(n, arrow_type(n)) for n in names], {"relax_hpc.run": str(view.run.root)})
    temporary = output.with_name(f".{output.name}.{uuid.uuid4().hex}")
    rows = 0
    try:
        with pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
            for table in _row_groups(view.tables(names, broken), schema, statuses):
                writer.write_table(table)
                rows += table.num_rows
        os.replace(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    return rows


def _row_groups(tables: Iterator[pa.Table], schema: pa.Schema, statuses: Sequence[str] | None) -> Iterator[pa.Table]:
    """Tables of a shard each, gathered into row groups."""
    import pyarrow as pa
    import pyarrow.compute as pc

    held: list[pa.Table] = []
    for table in tables:
        if statuses is not None:
            table = table.filter(pc.is_in(table["status"], pa.array(statuses, pa.string())))
        held.append(table)
        if sum(t.num_rows for t in held) >= ROWS_PER_GROUP or sum(t.nbytes for t in held) >= BYTES_PER_GROUP:
            yield pa.concat_tables(held).cast(schema)
            held = []
    if any(t.num_rows for t in held):
        yield pa.concat_tables(held).cast(schema)
