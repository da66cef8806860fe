"""Files that threads read into memory while Python imports what will take them: at a restart both take seconds.

begin(paths) ──threads──► memory ──contents(path)──► whoever loads a checkpoint, and keeps what it takes
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
"""What imports goes first."""

Contents = tuple[mmap.mmap, str]
"""What is in a file, and the checksum of what was read (see seals.py)."""

_ahead: dict[Path, Future[Contents]] = {}


def begin(paths: Collection[Path]) -> None:
    """Read these few files, each in a thread; nothing else that was begun is kept."""
    _ahead.clear()
    if not paths:
        return
    threads = ThreadPoolExecutor(len(paths), "read-ahead", lambda: os.nice(NICE))
    _ahead.update({path: threads.submit(_read, path) for path in paths})
    threads.shutdown(wait=False)


def contents(path: Path) -> Contents:
    """What is in `path`, in memory that is the caller's own: of what was read ahead, given once. Raises OSError."""
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
