"""Rows of files. No file is held whole: JSONL is read by an index of line offsets, Parquet by row groups."""

from __future__ import annotations

import functools
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from relax_hpc.files.errors import RunError

ROW_GROUPS_CACHED = 4
_BLOCK_BYTES = 1 << 20


class Rows(Protocol):
    """Rows of a file as dictionaries. Columns with media are apart, since their bytes may be many."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def media(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str: ...


class JsonLines:
    """A .jsonl file with one object a line; blank lines do not count. Memory: 8 bytes a row."""

    def __init__(self, path: Path, media: frozenset[str] = frozenset(), kept: str = "") -> None:
        self.path, self._media = path, media
        self._offsets, at = array("q"), 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    self._offsets.append(at)
                at += len(line)
        self._offsets.append(at)
        self._handle = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            os.close(self._handle)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        begin, end = self._offsets[index], self._offsets[index + 1]
        try:
            row = json.loads(os.pread(self._handle, end - begin, begin))
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
            raise RunError(f"{self.where(index)}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise RunError(f"{self.where(index)}: expected a JSON object, found {type(row).__name__}")
        return row

    def media(self, index: int) -> dict[str, Any]:
        """The row's columns with media."""
        row = self[index]
        return {name: row[name] for name in self._media if name in row}

    def where(self, index: int) -> str:
        """FILE:LINE, counted from 1 with the blank lines."""
        line, left = 1, self._offsets[index]
        with self.path.open("rb") as file:
            while left and (block := file.read(min(left, _BLOCK_BYTES))):
                line, left = line + block.count(b"\n"), left - len(block)
        return f"{self.path}:{line}"


class ParquetRows:
    """A .parquet file, decoded by row groups; the last few used stay in memory. Columns of bytes are left out, but for
    those with media and for `kept`."""

    def __init__(self, path: Path, media: frozenset[str] = frozenset(), kept: str = "") -> None:
        import pyarrow
        from pyarrow import parquet

        self.path = path
        try:
            self._file = parquet.ParquetFile(path)
        except pyarrow.ArrowException as error:
            raise RunError(f"{path}: not a Parquet file: {error}") from error
        fields = self._file.schema_arrow
        self._columns = [f.name for f in fields if f.name == kept or (f.name not in media and not _holds_bytes(f.type))]
        self._media = [f.name for f in fields if f.name in media]
        self._starts = [0]
        for group in range(self._file.num_row_groups):
            self._starts.append(self._starts[-1] + self._file.metadata.row_group(group).num_rows)
        self._group = functools.lru_cache(maxsize=ROW_GROUPS_CACHED)(functools.partial(self._read, self._columns))
        self._media_group = functools.lru_cache(maxsize=1)(functools.partial(self._read, self._media))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._row(self._group, index)

    def media(self, index: int) -> dict[str, Any]:
        """The row's columns with media. Row groups should be small: a whole one is read for a row."""
        return self._row(self._media_group, index)

    def where(self, index: int) -> str:
        """FILE row INDEX, counted from 0."""
        return f"{self.path} row {index}"

    def _row(self, read: Callable[[int], Any], index: int) -> dict[str, Any]:
        group = bisect_right(self._starts, index) - 1
        row: dict[str, Any] = read(group).slice(index - self._starts[group], 1).to_pylist()[0]
        return row

    def _read(self, columns: Sequence[str], group: int) -> Any:
        return self._file.read_row_group(group, columns=list(columns))


def _holds_bytes(kind: Any) -> bool:
    """True for a type of bytes, and for a list or struct that has such."""
    import pyarrow

    if pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind) or pyarrow.types.is_fixed_size_binary(kind):
        return True
    return any(_holds_bytes(kind.field(i).type) for i in range(kind.num_fields))
