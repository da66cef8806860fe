"""Checksums of the files of a finished folder, written with it and compared where a file is used.

files ──hashed as they are written, or read back──► FOLDER/DONE {"checksums": {NAME: XXH3-128}} ──► compared with what is read
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from relax_hpc.files.errors import Damaged
from relax_hpc.files.publish import open_handle, sync_folder, to_json, write_file

SEAL = "DONE"
READ_BYTES = 1 << 20
"""Bytes that are read and hashed at a time: few enough to be in the core's cache still."""
THREADS = 4


class DamagedCheckpoint(Damaged):
    """A file of a checkpoint that is not as it was written."""


def of_pieces(pieces: Iterable[bytes | memoryview]) -> str:
    """Hash the pieces of a file, one after the other, as XXH3-128."""
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def of_file(path: Path) -> str:
    """Hash the content of a file as XXH3-128."""
    digest, memory = xxhash.xxh3_128(), memoryview(bytearray(READ_BYTES))
    with open_handle(path, os.O_RDONLY) as handle:  # its errors name the file
        while count := os.readv(handle, [memory]):
            digest.update(memory[:count])
    return digest.hexdigest()


def write(folder: Path, known: Mapping[str, str]) -> None:
    """Seal `folder`, all of whose files are on the disk. known: checksums by name; the other files are read back."""
    names = sorted(path.name for path in folder.iterdir() if path.name != SEAL)
    with ThreadPoolExecutor(THREADS, "checksums") as pool:
        found = pool.map(lambda name: known.get(name) or of_file(folder / name), names)
        write_file(folder / SEAL, to_json({"checksums": dict(zip(names, found, strict=True))}))
    sync_folder(folder)


def expected(folder: Path) -> dict[str, str]:
    """Read the checksums in a folder's seal, by file name; none for a folder that is not sealed. Raises DamagedCheckpoint."""
    try:
        text = (folder / SEAL).read_bytes()
    except FileNotFoundError:
        return {}
    try:
        return {str(name): str(checksum) for name, checksum in json.loads(text)["checksums"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(f"'{folder / SEAL}' is damaged: it has no checksums ({error})") from error


def compare(path: Path, found: str | None = None) -> None:
    """Compare a file with the seal of its folder. found: its checksum, where it was read already. Raises DamagedCheckpoint."""
    wanted = expected(path.parent).get(path.name)
    if wanted is None:
        return
    try:
        found = found or of_file(path)
    except FileNotFoundError:
        raise DamagedCheckpoint(f"'{path}' is gone, which was written with checksum {wanted}") from None
    if found != wanted:
        raise DamagedCheckpoint(f"'{path}' has checksum {found}, {wanted} was written: the file was damaged")


def compare_all(folder: Path, names: Collection[str] | None = None) -> None:
    """Compare the files of `folder`, or those called `names`, several at once. Raises DamagedCheckpoint naming one."""
    wanted = expected(folder)
    with ThreadPoolExecutor(THREADS, "checksums") as pool:
        list(pool.map(compare, (folder / name for name in wanted if names is None or name in names)))
