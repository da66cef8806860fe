"""Flat arrays as an HDF5 file in memory, by h5py's low-level API.

For an order of eight samples the high-level API costs four times as much; nothing here knows what the columns mean.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5g, h5p, h5s, h5t
from numpy.typing import NDArray

Codec = Literal["lz4", "zstd"]
CHUNK = 1 << 17
"""Rows in a compressed chunk: half a megabyte, large enough for Blosc2 to pay, small enough to read a slice."""
METADATA_BYTES = 1 << 14
_files = itertools.count()


def image(
    columns: Mapping[str, NDArray[Any]], attributes: Mapping[str, str | int], compressed: Mapping[str, Codec]
) -> bytes:
    """The bytes of a file with these columns (of one dimension; "GROUP/NAME" makes the group) and root attributes.

    compressed: column -> "lz4" or "zstd"; the others are contiguous, so that a reader can map them.
    """
    access = in_memory(sum(a.nbytes for a in columns.values()) + METADATA_BYTES)
    access.set_libver_bounds(h5f.LIBVER_LATEST, h5f.LIBVER_LATEST)
    # HDF5 knows open files by name, those in memory too: two threads, or a file that an exception left open, must not meet.
    file = h5f.create(f"image-{next(_files)}".encode(), fapl=access)
    try:
        for name, value in attributes.items():
            _write_attribute(file, name, np.array(value.encode() if isinstance(value, str) else value))
        for name, array in columns.items():
            _write_column(file, name, array, compressed.get(name))
        h5f.flush(file)
        return cast(bytes, file.get_file_image())
    finally:
        file.close()


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


def _write_column(file: h5f.FileID, name: str, array: NDArray[Any], compression: Codec | None) -> None:
    layout = h5p.create(h5p.DATASET_CREATE)
    layout.set_obj_track_times(False)
    if compression and array.size:
        import hdf5plugin  # registers its filters with HDF5 when it is imported: only where compression is asked for

        blosc = hdf5plugin.Blosc2(cname=compression, clevel=1, filters=hdf5plugin.Blosc2.SHUFFLE)
        layout.set_chunk((min(CHUNK, array.size),))
        layout.set_filter(blosc.filter_id, h5py.h5z.FLAG_MANDATORY, blosc.filter_options)
    group = name.rpartition("/")[0].encode()
    if group and group not in file:
        h5g.create(file, group)
    kind = type_of(array.dtype)
    h5d.create(file, name.encode(), kind, h5s.create_simple(array.shape), layout).write(h5s.ALL, h5s.ALL, array, kind)
