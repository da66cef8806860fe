"""Files that threads read into memory while Python imports the code that loads them: at a restart both take seconds.

begin(paths) ──threads──► memory ──contents(path)──► the loader of a checkpoint, which then owns the memory
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from relax_hpc.files.folder_checksums import READ_BYTES

NICE = 10
"""Nice value of the reading threads, so that imports go first."""

Contents = tuple[mmap.mmap, str]
"""A file's content, and the checksum of what was read (see folder_checksums.py)."""

_ahead: dict[Path, Future[Contents]] = {}


def begin(paths: Collection[Path]) -> None:
    """Start reading these few files, each in a thread; files of an earlier call are dropped."""
    _ahead.clear()
    if not paths:
        return
    threads = ThreadPoolExecutor(len(paths), "read-ahead", lambda: os.nice(NICE))
    _ahead.update({path: threads.submit(_read, path) for path in paths})
    threads.shutdown(wait=False)


def contents(path: Path) -> Contents:
    """The content of `path`, in memory that is the caller's own; what was read ahead is handed out once. Raises OSError."""
    begun = _ahead.pop(path, None)
    if begun is None:
        _ahead.clear()  # another checkpoint became the newest meanwhile
    return _read(path) if begun is None else begun.result()


def _read(path: Path) -> Contents:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        memory = mmap.mmap(-1, max(path.stat().st_size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        rest = memoryview(memory)
        while count := file.readinto(rest[:READ_BYTES]):
            digest.update(rest[:count])
            rest = rest[count:]
    return memory, digest.hexdigest()
