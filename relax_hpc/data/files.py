"""Prompts in files, one a row: columns mapped to prompt, answer and media."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from relax_hpc.data.items import Item
from relax_hpc.data.render import ContentError, message_of
from relax_hpc.data.rows import FolderRows, JsonLines, ParquetRows, Rows, files_of
from relax_hpc.files.errors import RunError
from relax_hpc.media.values import MediaError, stored
from relax_hpc.recipe.tables.source import FilePrompts

PICTURE_ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".ppm"}
PICTURE_BYTES = (b"\x89PNG", b"\xff\xd8\xff", b"BM", b"II*\0", b"MM\0*", b"P6")
"""Beginnings of pictures' files."""
_MISSING = object()


FORMATS: dict[str, Callable[[Path, frozenset[str], str], Rows]] = {".jsonl": JsonLines, ".parquet": ParquetRows}


class FileItems:
    """Items of a [[source]] with `prompts = FILE`: columns mapped to prompt and answer, all others are metadata."""

    def __init__(self, source: FilePrompts) -> None:
        path = source.prompts
        self._source = source
        self._rows = _reader(path)(path, frozenset(source.media.values()), source.prompt_key)
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
        used = {source.prompt_key, source.answer_key, *source.media.values()}
        metadata = json.loads(json.dumps({k: v for k, v in row.items() if k not in used}, default=str))
        return Item(content, answer if answer is None else str(answer), metadata)

    @property
    def media_are_cheap(self) -> bool:
        """True where a row's media cells are read with the row: they name files, or are short."""
        return isinstance(self._rows, JsonLines)

    def media(self, index: int) -> dict[str, list[Any]]:
        """The row's cells by modality. Raises RunError for a column that is not there."""
        found: dict[str, list[Any]] = {}
        columns = self._rows.media(index)
        for modality, column in self._source.media.items():
            if column not in columns:
                raise RunError(f"{self.where(index)}: no column '{column}' (media.{modality})")
            found[modality] = _cells(modality, columns[column])
        return found

    def _split(self, content: Any, index: int) -> tuple[Any, Any]:
        """Split a conversation that ends with an assistant's message into (messages before, that text); otherwise the
        answer is None."""
        last = content[-1] if isinstance(content, list) and len(content) > 1 else None
        if not isinstance(last, dict) or last.get("role") != "assistant":
            return content, None
        try:
            answer = message_of(last)["content"]
            if not isinstance(answer, str):
                raise ContentError("an answer to be learned is text alone, the last message has other parts")
            return content[:-1], answer
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


def _reader(path: Path) -> Callable[[Path, frozenset[str], str], Rows]:
    """Find how a file or folder is read. Raises RunError for what is not there, or of another kind."""
    if path.is_file() and path.suffix in FORMATS:
        return FORMATS[path.suffix]
    if path.is_dir() or (path.suffix not in FORMATS and not path.exists() and _is_split(path)):
        return FolderRows
    if path.is_file() or path.suffix not in FORMATS:
        raise RunError(
            f"source.prompts = '{path}': expected a file that ends in {' or '.join(FORMATS)}, or the folder of a data set"
        )
    raise RunError(f"source.prompts = '{path}': there is no such file (seen from {Path.cwd()})")


def _is_split(path: Path) -> bool:
    """True for FOLDER/SPLIT where the folder has .parquet files of that split."""
    try:
        return bool(files_of(path))
    except RunError:
        return False


def _cells(modality: str, value: Any) -> list[Any]:
    """Cells of one column: a list of them, or one alone. A list of frames is one video, a list of those several."""
    if value is None:
        return []
    if not isinstance(value, list):
        return [value]
    frames = modality == "video" and value and isinstance(value[0], str | bytes | dict) and _is_frame(value[0])
    return [value] if frames else value


def _is_frame(value: Any) -> bool:
    """True for a picture, which is then a frame; a video's file has another ending, or other bytes."""
    if isinstance(value, dict) and value.get("frames") is not None:
        return False
    try:
        name = stored(value, Path()).data
    except MediaError:
        return False
    return name[:12].startswith(PICTURE_BYTES) if isinstance(name, bytes) else name.suffix.lower() in PICTURE_ENDINGS


def _nested(row: Any, path: Iterable[str]) -> Any:
    for name in path:
        if not isinstance(row, dict) or name not in row:
            return _MISSING
        row = row[name]
    return row
