"""Prompts in files, one a row. No file is held whole: JSONL is read by an index of line offsets, Parquet by row groups."""

from __future__ import annotations

import functools
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from relax_hpc.data.items import Item
from relax_hpc.data.render import ContentError, message_of
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.tables.source import FilePrompts

ROW_GROUPS_CACHED = 4
_BLOCK_BYTES = 1 << 20
_MISSING = object()


class Rows(Protocol):
    """Rows of a file as dictionaries."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def where(self, index: int) -> str: ...


class JsonLines:
    """A .jsonl file with one object a line; blank lines do not count. Memory: 8 bytes a row."""

    def __init__(self, path: Path) -> None:
        self.path = path
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

    def where(self, index: int) -> str:
        """FILE:LINE, counted from 1 with the blank lines."""
        line, left = 1, self._offsets[index]
        with self.path.open("rb") as file:
            while left and (block := file.read(min(left, _BLOCK_BYTES))):
                line, left = line + block.count(b"\n"), left - len(block)
        return f"{self.path}:{line}"


class ParquetRows:
    """A .parquet file, decoded by row groups; the last few used stay in memory. Columns of bytes are left out."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        self.path = path
        try:
            self._file = parquet.ParquetFile(path)
        except pyarrow.ArrowException as error:
            raise RunError(f"{path}: not a Parquet file: {error}") from error
        is_bytes = (pyarrow.types.is_binary, pyarrow.types.is_large_binary)
        self._columns = [f.name for f in self._file.schema_arrow if not any(test(f.type) for test in is_bytes)]
        self._starts = [0]
        for group in range(self._file.num_row_groups):
            self._starts.append(self._starts[-1] + self._file.metadata.row_group(group).num_rows)
        self._group = functools.lru_cache(maxsize=ROW_GROUPS_CACHED)(self._read)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        group = bisect_right(self._starts, index) - 1
        row: dict[str, Any] = self._group(group).slice(index - self._starts[group], 1).to_pylist()[0]
        return row

    def where(self, index: int) -> str:
        """FILE row INDEX, counted from 0."""
        return f"{self.path} row {index}"

    def _read(self, group: int) -> Any:
        return self._file.read_row_group(group, columns=self._columns)


FORMATS: dict[str, Callable[[Path], Rows]] = {".jsonl": JsonLines, ".parquet": ParquetRows}


class FileItems:
    """Items of a [[source]] with `prompts = FILE`: columns mapped to prompt and answer, all others are metadata."""

    def __init__(self, source: FilePrompts) -> None:
        path = source.prompts
        if path.suffix not in FORMATS:
            raise RunError(f"source.prompts = '{path}': expected a file that ends in {' or '.join(FORMATS)}")
        if not path.is_file():
            raise RunError(f"source.prompts = '{path}': there is no such file (seen from {Path.cwd()})")
        self._source = source
        self._rows = FORMATS[path.suffix](path)
        if not len(self._rows):
            raise RunError(f"source.prompts = '{path}': the file has no rows")

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, index: int) -> str:
        return self._rows.where(index)

    def __getitem__(self, index: int) -> Item:
        row, source = self._rows[index], self._source
        content = self._column(row, "prompt_key", source.prompt_key, index)
        content, answer = (
            (content, self._column(row, "answer_key", source.answer_key, index))
            if source.answer_key
            else self._split(content, index)
        )
        used = {source.prompt_key, source.answer_key}
        metadata = json.loads(json.dumps({k: v for k, v in row.items() if k not in used}, default=str))
        return Item(content, answer if answer is None else str(answer), metadata)

    def _split(self, content: Any, index: int) -> tuple[Any, Any]:
        """Split a conversation that ends with an assistant's message into (messages before, that text); otherwise the
        answer is None."""
        last = content[-1] if isinstance(content, list) and len(content) > 1 else None
        if not isinstance(last, dict) or last.get("role") != "assistant":
            return content, None
        try:
            return content[:-1], message_of(last)["content"]
        except ContentError as error:
            raise RunError(f"{self.where(index)}: {error}") from None

    def _column(self, row: dict[str, Any], key: str, name: str, index: int) -> Any:
        value = row.get(name, _MISSING)
        if value is _MISSING:
            value = _nested(row, name.split("."))
        if key == "answer_key" and self._source.missing_answer == "drop" and value in (_MISSING, None):
            return None
        hint = (
            '; an empty answer_key says that there is none, missing_answer = "drop" leaves such rows out'
            if key == "answer_key"
            else ""
        )
        if value is _MISSING:
            raise RunError(f"{self.where(index)}: no column '{name}' ({key}); it has {sorted(row)}{hint}")
        if value is None:
            raise RunError(f"{self.where(index)}: column '{name}' ({key}) is null{hint}")
        return value


def _nested(row: Any, path: Iterable[str]) -> Any:
    for name in path:
        if not isinstance(row, dict) or name not in row:
            return _MISSING
        row = row[name]
    return row
