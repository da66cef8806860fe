"""A column: what another model says of a shard's tokens, in a file beside it; complete or absent, never changed.

    scorer, critic: Shard ──forward──► logprobs, values ──encode──► one HDF5 image ──publish──► COLUMNS/REQUEST.NAME.h5 ──► trainer, analysis

Its name is the request's and the column's, so the first that is done counts. Its attributes say
of which shard it is, which weights said it, and the checksum of the numbers.
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
    """A column that is torn, or of something else. Nothing is lost by it: its role makes it again when it is gone."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column, read and compared with its checksum."""

    name: str
    request: str
    shard: int
    """The shard's `meta_checksum`."""
    model: str
    """Checksum of the weights that said it, or the version of the policy or critic."""
    checksum: str
    """XXH3-64 of the values' bytes."""
    values: NDArray[np.float32]  # [T] at each token of the shard; 0 where its loss mask is 0
    bytes: int
    """Of the file."""

    @property
    def version(self) -> str:
        """Names it in the ledger: the weights, and what they said."""
        return f"{self.model}/{self.checksum}"


def encode(name: str, request: str, shard: int, model: str, values: NDArray[np.float32]) -> list[bytes | memoryview]:
    """The bytes of a column, in pieces."""
    about: Mapping[str, str | int] = {
        "format": FORMAT, "schema": SCHEMA, "name": name, "request": request, "shard": shard, "model": model,
        "checksum": _checksum(values),
    }  # fmt: skip
    return hdf5.image({name: hdf5.Column([values], np.float32)}, about, {})


def read_column(path: Path, name: str) -> Column | None:
    """The column `name` in `path`; None where there is no such file. Raises DamagedColumn naming what is wrong."""
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
