"""Write flat arrays as the bytes of an HDF5 file, and read them back, with h5py's low-level API.

    columns ──image──► pieces of bytes ──written by the caller──► FILE ──File──► datasets, each checked to lie within the file

For a request of eight samples the high-level API costs four times as much. Nothing here knows what the columns mean.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5fd, h5g, h5l, h5p, h5s, h5t
from numpy.typing import NDArray

Codec = Literal["lz4", "zstd"]
CHUNK = 1 << 17
"""Rows in a compressed chunk: half a megabyte, large enough for Blosc2 to pay, small enough to read a slice."""
BLOSC2 = 32026
"""The filter that compressed columns pass through, by its HDF5 number; no other is accepted."""
TEXT_BYTES = 1024
"""Longest text of an attribute."""
READ_WHOLE_BYTES = 2 << 20
"""A file up to this size is read in one piece. Of a larger one only the rows asked for are read, so memory peaks at the
slice."""
USE_OURS, LEAVE_IT = 2, 4
"""Flags of H5LT: H5LT_FILE_IMAGE_DONT_COPY and H5LT_FILE_IMAGE_DONT_RELEASE."""


class Column:
    """A one-dimensional array in parts that are not copied: a shard's tokens are thousands of arrays."""

    def __init__(self, parts: Sequence[NDArray[Any]], dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.pieces = [_as_bytes(np.asarray(part, dtype)) for part in parts if len(part)]
        self.bytes = sum(map(len, self.pieces))
        self.rows = self.bytes // self.dtype.itemsize


def image(
    columns: Mapping[str, Column], attributes: Mapping[str, str | int], compressed: Mapping[str, Codec]
) -> list[bytes | memoryview]:
    """Return a file with these columns and root attributes as pieces, in file order; the arrays themselves are pieces.

    columns: a name "GROUP/NAME" also makes the group.
    compressed: column -> codec; the other columns are contiguous, so that a reader can map them.

    HDF5 lays the file out in memory and writes all but the contiguous columns there, without a system call.
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
    """Return an array's bytes, copied only if it is not contiguous. The quick way is tried first."""
    try:
        return array.data.cast("B")
    except (TypeError, ValueError):
        return np.ascontiguousarray(array).view(np.uint8).data


class _Record:
    """A file in memory, as HDF5's file-object driver wants one: keeps each write with its offset; the rest is zeros."""

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
        """Return the bytes [begin, end)."""
        found = bytearray(end - begin)
        for offset, data in self._writes:
            low, high = max(begin, offset), min(end, offset + len(data))
            if low < high:
                found[low - begin : high - begin] = data[low - offset : high - offset]
        return bytes(found)


def _lay_out(
    record: _Record, columns: Mapping[str, Column], attributes: Mapping[str, str | int], compressed: Mapping[str, Codec]
) -> dict[int, Column]:
    """Write the file without its contiguous columns, and return those by their offset in the file."""
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


class File:
    """A file made by `image`, opened for reading. Raises OSError if it is not an HDF5 file.

    Claims of a damaged file are not believed: nothing is allocated for rows that it cannot hold, and no other file is
    opened on its word. ValueError says which claim was wrong.
    """

    def __init__(self, path: Path) -> None:
        self._whole: bytearray | None = None
        with path.open("rb", buffering=0) as file:
            self.bytes = os.fstat(file.fileno()).st_size
            if self.bytes <= READ_WHOLE_BYTES:
                self._whole = bytearray(self.bytes)
                if file.readinto(self._whole) != self.bytes or not self.bytes:
                    raise OSError(f"it ends before its {self.bytes} bytes")
        if self._whole is not None:
            try:
                self._file = h5f.open_file_image(self._whole, USE_OURS | LEAVE_IT)
            except ValueError as error:  # how h5py reports that it is not HDF5
                raise OSError(f"its {self.bytes} bytes do not begin as HDF5 does, or end too early") from error
            return
        access = h5p.create(h5p.FILE_ACCESS)
        access.set_file_locking(False, True)
        self._file = h5f.open(os.fsencode(path), h5f.ACC_RDONLY, access)
        self._handle: int = self._file.get_vfd_handle()

    def __enter__(self) -> File:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def is_open(self) -> bool:
        return bool(self._file.valid)

    def attributes(self, names: Sequence[str]) -> list[Any]:
        """Return the values of root attributes, None for a missing one. Raises ValueError for a value that is neither a
        number nor a short text."""
        found: list[Any] = []
        for name in names:
            if not h5a.exists(self._file, name.encode()):
                found.append(None)
                continue
            attribute = h5a.open(self._file, name.encode())
            dtype = _scalar_type(attribute.get_type())
            if dtype is None or attribute.shape != ():
                raise ValueError(f"attribute '{name}' is of type {attribute.dtype} and shape {attribute.shape}")
            value = np.empty((), dtype)
            attribute.read(value)
            scalar: Any = value[()]
            found.append(scalar.decode() if isinstance(scalar, bytes) else scalar)
        return found

    def dataset(self, name: str, dtypes: Sequence[np.dtype[Any]]) -> Dataset:
        """Open a one-dimensional dataset of one of `dtypes`. Raises KeyError if there is none, ValueError if it is of
        another kind."""
        parts = name.split("/")
        for depth in range(len(parts)):
            if self._file.links.get_info("/".join(parts[: depth + 1]).encode()).type != h5l.TYPE_HARD:
                raise ValueError("it is a link to somewhere else")
        dataset = h5d.open(self._file, name.encode())
        shape, stored = dataset.shape, dataset.get_type()
        dtype = next((dtype for dtype in dtypes if stored.equal(type_of(dtype))), None)
        if dtype is None or shape is None or len(shape) != 1:
            raise ValueError(f"it has type {dataset.dtype} and shape {shape}, expected {dtypes[0]} and one dimension")
        begin = dataset.get_offset()  # None unless it is contiguous and in this file
        if begin is None and shape[0]:
            _check_chunks(dataset, shape[0], self.bytes)
        elif shape[0] and begin + shape[0] * dtype.itemsize > self.bytes:
            raise ValueError(f"it claims {shape[0]} rows, the file of {self.bytes} bytes has less")
        return Dataset(self, dataset, dtype, shape[0], begin)

    def read(self, begin: int, into: memoryview) -> None:
        """Read the bytes from offset `begin` on, until `into` is full. Raises ValueError if the file ends before."""
        if self._whole is not None:
            into[:] = memoryview(self._whole)[begin : begin + len(into)]
            return
        done = 0
        while done < len(into):
            count = os.preadv(self._handle, [into[done:]], begin + done)
            if not count:
                raise ValueError(f"the file ends at byte {begin + done}")
            done += count


@dataclass(frozen=True, slots=True)
class Dataset:
    """A one-dimensional array in a file."""

    file: File
    id: h5d.DatasetID
    dtype: np.dtype[Any]
    rows: int
    begin: int | None
    """Offset of its bytes in the file; None if it is compressed or empty."""

    def read(self, first: int, into: NDArray[Any]) -> None:
        """Read rows from `first` on, until `into` is full."""
        if not len(into):
            return
        if self.begin is not None:
            self.file.read(self.begin + first * self.dtype.itemsize, into.view(np.uint8).data)
            return
        where = self.id.get_space()
        where.select_hyperslab((first,), into.shape)
        self.id.read(h5s.create_simple(into.shape), where, into, type_of(into.dtype))


def _scalar_type(kind: h5t.TypeID) -> str | None:
    """Return numpy's name for the type of a short text or an integer; None for any other. h5py's own translation costs
    ten times as much."""
    if isinstance(kind, h5t.TypeStringID) and not kind.is_variable_str() and kind.get_size() <= TEXT_BYTES:
        return f"S{kind.get_size()}"
    if isinstance(kind, h5t.TypeIntegerID):
        return f"{'u' if kind.get_sign() == h5t.SGN_NONE else 'i'}{kind.get_size()}"
    return None


def _check_chunks(dataset: h5d.DatasetID, rows: int, file_bytes: int) -> None:
    """Raise ValueError if a compressed dataset is not laid out as `image` does it, or cannot have so many rows."""
    made = dataset.get_create_plist()
    filters = [made.get_filter(n)[0] for n in range(made.get_nfilters())]
    if made.get_layout() != h5d.CHUNKED or filters != [BLOSC2] or not 0 < made.get_chunk()[0] <= CHUNK:
        raise ValueError("its data are not in the file as those of a column are")
    if rows > dataset.get_num_chunks() * made.get_chunk()[0] or dataset.get_storage_size() > file_bytes:
        raise ValueError(f"it claims {rows} rows, more than it has chunks for")
    import hdf5plugin  # noqa: F401  its import registers the filter; only compressed columns need it


@functools.cache
def type_of(dtype: np.dtype[Any]) -> h5t.TypeID:
    """Return HDF5's type for a numpy type."""
    return h5t.py_create(dtype, logical=True)


def _write_attribute(file: h5f.FileID, name: str, value: NDArray[Any]) -> None:
    kind = type_of(value.dtype)
    h5a.create(file, name.encode(), kind, h5s.create(h5s.SCALAR)).write(value, kind)


def _make_column(file: h5f.FileID, name: str, column: Column, codec: Codec | None) -> int | None:
    """Make a dataset. Return the offset where its data belong; None if they are written already (compressed) or there
    are none."""
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
    """Layout of a dataset in one piece, whose offset is known before anything is written."""
    layout = h5p.create(h5p.DATASET_CREATE)
    layout.set_obj_track_times(False)
    layout.set_fill_time(h5d.FILL_TIME_NEVER)
    layout.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    return layout


def _chunked(codec: Codec, rows: int) -> h5p.PropDCID:
    """Layout of a dataset in compressed chunks of `rows` rows."""
    import hdf5plugin  # registers its filters with HDF5 when it is imported: only where compression is asked for

    layout = h5p.create(h5p.DATASET_CREATE)
    layout.set_obj_track_times(False)
    blosc = hdf5plugin.Blosc2(cname=codec, clevel=1, filters=hdf5plugin.Blosc2.SHUFFLE)
    layout.set_chunk((rows,))
    layout.set_filter(blosc.filter_id, h5py.h5z.FLAG_MANDATORY, blosc.filter_options)
    return layout
