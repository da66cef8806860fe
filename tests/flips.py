"""One bit of a shard, changed after it was published."""

from __future__ import annotations

from pathlib import Path

import h5py


def flip(path: Path, column: str, row: int = 0) -> None:
    """Change the lowest bit of a row's last byte, where the file has it."""
    with h5py.File(path, "r", locking=False) as file:
        dataset = file[column]
        place = dataset.id.get_offset() + (row + 1) * dataset.dtype.itemsize - 1
    with path.open("r+b") as raw:
        raw.seek(place)
        byte = raw.read(1)[0]
        raw.seek(place)
        raw.write(bytes([byte ^ 1]))
