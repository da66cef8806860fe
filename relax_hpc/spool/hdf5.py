"""Flat arrays as the bytes of an HDF5 file, by h5py's low-level API.

For an order of eight samples the high-level API costs four times as much; nothing here knows what the columns mean.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5fd, h5g, h5p, h5s, h5t
from numpy.typing import NDArray

Codec = Literal["lz4", "zstd"]
CHUNK = 1 << 17
"""Rows in a compressed chunk: half a megabyte, large enough for Blosc2 to pay, small enough to read a slice."""


class Column:
    """An array of one dimension in parts, which are not copied: a shard's tokens are thousands of arrays."""

    def __init__(self, parts: Sequence[NDArray[Any]], dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.pieces = [_as_bytes(np.asarray(part, dtype)) for part in parts if len(part)]
        self.bytes = sum(map(len, self.pieces))
        self.rows = self.bytes // self.dtype.itemsize


def image(
    columns: Mapping[str, Column], attributes: Mapping[str, str | int], compressed: Mapping[str, Codec]
) -> list[bytes | memoryview]:
    """A file with these columns and root attributes, as pieces in the order of the file; the arrays themselves are pieces.

    columns: "GROUP/NAME" makes the group.
    compressed: column -> codec; the others are contiguous, so that a reader can map them.

    HDF5 lays the file out and writes all but the contiguous columns into a record, without a call to the system.
    """
    record = _Record()
    places = _lay_out(record, columns, attributes, compressed)
    pieces: list[bytes | memoryview] = []
    at = 0
    for begin, column in sorted(places.items()):
        pieces += [record.between(at, begin), *column.pieces]
        at = begin + column.bytes
    pieces.append(record.between(at, record.size))
    return [piece for piece in pieces if len(piece)]


def _as_bytes(array: NDArray[Any]) -> memoryview:
    """An array's bytes; a copy only where it is not contiguous. The quick way first."""
    try:
        return array.data.cast("B")
    except (TypeError, ValueError):
        return np.ascontiguousarray(array).view(np.uint8).data


class _Record:
    """A file as HDF5's file-object driver wants one: it keeps what is written, and where; the rest is zeros."""

    def __init__(self) -> None:
        self.size = self._at = 0
        self._writes: list[tuple[int, bytes]] = []

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        self._writes.append((self._at, bytes(data)))
        self._at += len(data)
        self.size = max(self.size, self._at)
        return len(data)

    def readinto(self, buffer: Any) -> int:
        buffer[:] = self.between(self._at, self._at + len(buffer))
        self._at += len(buffer)
        return len(buffer)

    def truncate(self, size: int) -> int:
        self.size = size
        return size

    def flush(self) -> None: ...

    def between(self, begin: int, end: int) -> bytes:
        """The bytes [begin, end)."""
        found = bytearray(end - begin)
        for offset, data in self._writes:
            low, high = max(begin, offset), min(end, offset + len(data))
            if low < high:
                found[low - begin : high - begin] = data[low - offset : high - offset]
        return bytes(found)


def _lay_out(
    record: _Record, columns: Mapping[str, Column], attributes: Mapping[str, str | int], compressed: Mapping[str, Codec]
) -> dict[int, Column]:
    """Write the file but for its contiguous columns: these, by where they belong."""
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_libver_bounds(h5f.LIBVER_LATEST, h5f.LIBVER_LATEST)
    access.set_fileobj_driver(h5fd.fileobj_driver, record)
    file = h5f.create(b"/image", fapl=access)
    places: dict[int, Column] = {}
    try:
        for name, value in attributes.items():
            _write_attribute(file, name, np.array(value.encode() if isinstance(value, str) else value))
        for name, column in columns.items():
            place = _make_column(file, name, column, compressed.get(name))
            if place is not None:
                places[place] = column
    finally:
        file.close()
    return places


def attributes(file: h5f.FileID, names: Sequence[str]) -> list[Any]:
    """Values of root attributes, None where there is none."""
    found: list[Any] = []
    for name in names:
        if not h5a.exists(file, name.encode()):
            found.append(None)
            continue
        attribute = h5a.open(file, name.encode())
        value = np.empty(attribute.shape, attribute.dtype)
        attribute.read(value)
        scalar: Any = value[()]
        found.append(scalar.decode() if isinstance(scalar, bytes) else scalar)
    return found


def load_filters(dataset: h5d.DatasetID) -> None:
    """Register the filters that a compressed dataset is read with; nothing is imported for one that is not."""
    if dataset.get_create_plist().get_nfilters():
        import hdf5plugin  # noqa: F401  its import registers them


def in_memory(block_bytes: int) -> h5p.PropFAID:
    """Access to a file in memory; it grows by `block_bytes` at a time, and is read from disk in one piece."""
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fapl_core(block_bytes, False)
    return access


@functools.cache
def type_of(dtype: np.dtype[Any]) -> h5t.TypeID:
    """HDF5's type for a numpy one."""
    return h5t.py_create(dtype, logical=True)


def _write_attribute(file: h5f.FileID, name: str, value: NDArray[Any]) -> None:
    kind = type_of(value.dtype)
    h5a.create(file, name.encode(), kind, h5s.create(h5s.SCALAR)).write(value, kind)


def _make_column(file: h5f.FileID, name: str, column: Column, codec: Codec | None) -> int | None:
    """Make a dataset; where its data belongs in the file, or None when they are written (compressed) or there are none."""
    group = name.rpartition("/")[0].encode()
    if group and group not in file:
        h5g.create(file, group)
    kind = type_of(column.dtype)
    layout = _chunked(codec, min(CHUNK, column.rows)) if codec and column.rows else _contiguous()
    dataset = h5d.create(file, name.encode(), kind, h5s.create_simple((column.rows,)), layout)
    if not column.rows:
        return None
    if codec:
        dataset.write(h5s.ALL, h5s.ALL, np.frombuffer(b"".join(column.pieces), column.dtype), kind)
        return None
    return int(dataset.get_offset())


@functools.cache
def _contiguous() -> h5p.PropDCID:
    """A dataset in one piece, whose place is known before anything is written."""
    layout = h5p.create(h5p.DATASET_CREATE)
    layout.set_obj_track_times(False)
    layout.set_fill_time(h5d.FILL_TIME_NEVER)
    layout.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    return layout


def _chunked(codec: Codec, rows: int) -> h5p.PropDCID:
    """A dataset in compressed chunks of `rows`."""
    import hdf5plugin  # registers its filters with HDF5 when it is imported: only where compression is asked for

    layout = h5p.create(h5p.DATASET_CREATE)
    layout.set_obj_track_times(False)
    blosc = hdf5plugin.Blosc2(cname=codec, clevel=1, filters=hdf5plugin.Blosc2.SHUFFLE)
    layout.set_chunk((rows,))
    layout.set_filter(blosc.filter_id, h5py.h5z.FLAG_MANDATORY, blosc.filter_options)
    return layout
