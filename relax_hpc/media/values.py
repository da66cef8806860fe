"""Values of a data set's cells: a path, bytes, base64, a data URI, or a table of these ──► an open file and its digest."""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote_to_bytes

import xxhash

WHOLE_BYTES = 1 << 24
"""Longest file that is digested whole; of a longer one, its length and as many bytes of its beginning and its end."""
KEYS = ("bytes", "base64", "path", "url", "image_url", "video_url", "audio_url", "image", "video", "audio")
"""Keys of a table that hold its value, in the order in which they are looked for."""


class MediaError(Exception):
    """A picture, video or sound that cannot be shown to the model. The message says why; the caller adds where."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The file of a picture, video or sound, on a disk or in memory."""

    data: bytes | Path

    @property
    def name(self) -> str:
        """A name for error messages."""
        return f"'{self.data}'" if isinstance(self.data, Path) else f"{len(self.data)} bytes"

    def open(self) -> BinaryIO:
        """Open it for reading. Raises MediaError where it is not there."""
        if isinstance(self.data, bytes):
            return io.BytesIO(self.data)
        try:
            return self.data.open("rb")
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
            raise MediaError(f"'{self.data}' cannot be opened: {error.strerror}") from None

    def check(self) -> None:
        """Raise MediaError where there is no such file, or an empty one."""
        with self.open() as file:
            if not file.read(1):
                raise MediaError(f"{self.name} is an empty file")


def stored(value: Any, folder: Path) -> Stored:
    """Find the file that a cell names or holds; `folder`: where relative paths begin. Raises MediaError for other values."""
    if isinstance(value, bytes):
        return Stored(value)
    if isinstance(value, str):
        return _named(value, folder)
    if isinstance(value, Mapping):
        key = next((key for key in KEYS if value.get(key) is not None), None)
        if key == "base64":
            return Stored(_decoded(str(value[key])))
        if key is not None:
            return stored(value[key], folder)
        raise MediaError(f"a table with {sorted(value)} has none of {list(KEYS)}")
    raise MediaError(f"expected a path, bytes, base64 or a data URI, found {type(value).__name__}")


def digest(value: Any, folder: Path) -> bytes:
    """A digest of a cell's bytes, the same wherever and however they are stored. Raises MediaError where there are none.

    Frames and arrays are digested as their values.
    """
    try:
        file = stored(value, folder)
    except MediaError:
        if not isinstance(value, Mapping | list):
            raise
        return xxhash.xxh3_128(b"".join(_leaves(value, folder))).digest()
    with file.open() as opened:
        size = opened.seek(0, io.SEEK_END)
        opened.seek(0)
        found = xxhash.xxh3_128(opened.read(WHOLE_BYTES))
        if size > WHOLE_BYTES:
            opened.seek(max(size - WHOLE_BYTES, WHOLE_BYTES))
            found.update(size.to_bytes(8, "big") + opened.read())
    return found.digest()


def _leaves(value: Any, folder: Path) -> Iterable[bytes]:
    if isinstance(value, Mapping):
        frames = value.get("frames")
        rest = {key: item for key, item in value.items() if key != "frames"}
        yield json.dumps(rest, sort_keys=True, default=str).encode()
        if isinstance(frames, list):
            yield from _leaves(frames, folder)
    elif value and isinstance(value, list) and isinstance(value[0], str | bytes | Mapping):
        yield from (digest(frame, folder) for frame in value)
    else:
        yield json.dumps(value, default=str).encode()


def _named(text: str, folder: Path) -> Stored:
    if text.startswith("data:"):
        about, comma, data = text.partition(",")
        if not comma:
            raise MediaError(f"a data URI has no comma: {text[:40]!r}")
        return Stored(_decoded(data) if about.endswith(";base64") else unquote_to_bytes(data))
    scheme, separator, rest = text.partition("://")
    if separator and scheme != "file":
        raise MediaError(f"'{text[:80]}' is an address: nothing is fetched from a network; give a file of this machine")
    return Stored(folder / (rest if separator else text))


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(f"no base64: {error}") from None
