"""Rows of files. No file is held whole: JSONL is read by an index of line offsets, Parquet by row groups, Arrow where it lies
in the page cache. A folder of a Hugging Face data set is the rows of its files, one after the other.
"""

from __future__ import annotations

import functools
import json
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from relax_hpc.files.errors import RunError

ROW_GROUPS_CACHED = 4
SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}")
"""Matches a file's name as `datasets` writes it: SPLIT-00000-of-00003."""
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
        self._columns, self._media = _columns(self._file.schema_arrow, media, kept)
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
        return _first(read(group), index - self._starts[group])

    def _read(self, columns: Sequence[str], group: int) -> Any:
        return self._file.read_row_group(group, columns=list(columns))


class ArrowRows:
    """An .arrow file as `Dataset.save_to_disk` writes it, mapped into memory. Columns as in ParquetRows."""

    def __init__(self, path: Path, media: frozenset[str] = frozenset(), kept: str = "") -> None:
        import pyarrow

        self.path = path
        try:
            with pyarrow.memory_map(str(path)) as file:
                self._table = pyarrow.ipc.open_stream(file).read_all()
        except pyarrow.ArrowException as error:
            raise RunError(f"{path}: not an Arrow stream, as Dataset.save_to_disk writes it: {error}") from error
        columns, shown = _columns(self._table.schema, media, kept)
        self._columns, self._media = self._table.select(columns), self._table.select(shown)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _first(self._columns, index)

    def media(self, index: int) -> dict[str, Any]:
        """The row's columns with media."""
        return _first(self._media, index)

    def where(self, index: int) -> str:
        """FILE row INDEX, counted from 0."""
        return f"{self.path} row {index}"


class FolderRows:
    """A folder that `Dataset.save_to_disk` wrote, or one of .parquet files: their rows, one file after the other."""

    def __init__(self, path: Path, media: frozenset[str] = frozenset(), kept: str = "") -> None:
        self._files: list[Rows] = [
            (ArrowRows if file.suffix == ".arrow" else ParquetRows)(file, media, kept) for file in files_of(path)
        ]
        self._starts = [0]
        for rows in self._files:
            self._starts.append(self._starts[-1] + len(rows))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows, within = self._at(index)
        return rows[within]

    def media(self, index: int) -> dict[str, Any]:
        """The row's columns with media."""
        rows, within = self._at(index)
        return rows.media(within)

    def where(self, index: int) -> str:
        """FILE row INDEX, counted from 0 in that file."""
        rows, within = self._at(index)
        return rows.where(within)

    def _at(self, index: int) -> tuple[Rows, int]:
        number = bisect_right(self._starts, index) - 1
        return self._files[number], index - self._starts[number]


def files_of(folder: Path) -> list[Path]:
    """List the files of a data set's folder, in order. Raises RunError for several splits, or for none."""
    if (folder / "dataset_dict.json").is_file():
        raise RunError(_several(folder, json.loads((folder / "dataset_dict.json").read_text()).get("splits", [])))
    if (folder / "state.json").is_file():
        files = json.loads((folder / "state.json").read_text())["_data_files"]
        return [folder / file["filename"] for file in files]
    found = sorted(folder.glob("*.parquet")) or sorted((folder / "data").glob("*.parquet"))
    if not found and folder.parent.is_dir():
        found = sorted(file for file in folder.parent.glob("*.parquet") if _split(file) == folder.name)
    splits = sorted({split for file in found if (split := _split(file))})
    if len(splits) > 1:
        raise RunError(_several(found[0].parent, splits))
    if not found:
        raise RunError(f"'{folder}': no folder that Dataset.save_to_disk wrote, and none with .parquet files")
    return found


def _split(file: Path) -> str:
    match = SHARD.fullmatch(file.stem)
    return match[1] if match else ""


def _several(folder: Path, splits: Sequence[str]) -> str:
    return f"'{folder}' has the splits {list(splits)}: name one, such as '{folder / splits[0] if splits else folder}'"


def _first(table: Any, index: int) -> dict[str, Any]:
    row: dict[str, Any] = table.slice(index, 1).to_pylist()[0]
    return row


def _columns(schema: Any, media: frozenset[str], kept: str) -> tuple[list[str], list[str]]:
    """Return (columns of the row, without those of bytes; columns with media)."""
    plain = [f.name for f in schema if f.name == kept or (f.name not in media and not _holds_bytes(f.type))]
    return plain, [f.name for f in schema if f.name in media]


def _holds_bytes(kind: Any) -> bool:
    """True for a type of bytes, and for a list or struct that has such."""
    import pyarrow

    if pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind) or pyarrow.types.is_fixed_size_binary(kind):
        return True
    return any(_holds_bytes(kind.field(i).type) for i in range(kind.num_fields))
