"""A column: another model's numbers for a shard's tokens, in a file beside it; complete or absent, never changed.

    scorer, critic: Shard ──forward──► logprobs, values ──encode──► one HDF5 image ──publish──► COLUMNS/REQUEST.NAME.h5 ──► trainer, analysis

The file is named after the request and the column, so the first one published counts. Its attributes hold the shard's
checksum, the weights that made the numbers, and the numbers' own checksum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from relax_hpc.spool import hdf5

FORMAT = "relax_hpc.column"
SCHEMA = 1
ATTRIBUTES = ("format", "schema", "name", "request", "shard", "model", "checksum")


class DamagedColumn(Exception):
    """A column file that is torn, or belongs to something else. Nothing is lost: once it is removed, its role makes it
    again."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column, read and compared with its checksum."""

    name: str
    request: str
    shard: int
    """The `meta_checksum` of the shard that the column is for."""
    model: str
    """Checksum of the weights that made the numbers, or the version of the policy or critic."""
    checksum: str
    """XXH3-64 of the values' bytes."""
    values: NDArray[np.float32]  # [T] at each token of the shard; 0 where its loss mask is 0
    bytes: int
    """Size of the file."""

    @property
    def version(self) -> str:
        """The name that the ledger knows it by: MODEL/CHECKSUM, the weights and the numbers that they gave."""
        return f"{self.model}/{self.checksum}"


def encode(name: str, request: str, shard: int, model: str, values: NDArray[np.float32]) -> list[bytes | memoryview]:
    """Return the bytes of a column file, in pieces."""
    about: Mapping[str, str | int] = {
        "format": FORMAT, "schema": SCHEMA, "name": name, "request": request, "shard": shard, "model": model,
        "checksum": _checksum(values),
    }  # fmt: skip
    return hdf5.image({name: hdf5.Column([values], np.float32)}, about, {})


def read_column(path: Path, name: str) -> Column | None:
    """Read the column `name` from `path`; None if there is no such file. Raises DamagedColumn, which names the
    fault."""
    try:
        with hdf5.File(path) as file:
            found = dict(zip(ATTRIBUTES, file.attributes(ATTRIBUTES), strict=True))
            if None in found.values() or (found["format"], found["schema"], found["name"]) != (FORMAT, SCHEMA, name):
                raise ValueError(f"expected format, schema and name {(FORMAT, SCHEMA, name)}, found {found}")
            dataset = file.dataset(name, (np.dtype("<f4"),))
            values = np.empty(dataset.rows, np.float32)
            dataset.read(0, values)
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
        raise DamagedColumn(f"'{path}' is truncated or no column '{name}': {error}") from error
    if (checksum := _checksum(values)) != found["checksum"]:
        raise DamagedColumn(f"'{path}' has checksum {checksum}, {found['checksum']} was written: the file was damaged")
    return Column(name, found["request"], int(found["shard"]), found["model"], checksum, values, file.bytes)


def _checksum(values: NDArray[np.float32]) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(values, "<f4").data)
