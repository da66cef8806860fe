"""Publishing files: a name appears with its whole content or not at all, and readers cope with what file systems do.

Publishing is always: unique temporary name, write, fsync, link or rename, fsync of the directory. A lost reply is no failure:
after an error the file system is asked what is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from relax_hpc.files.errors import DamagedFile

STALE_PAUSES_S = (0.0, 0.0, 0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0)
"""Pauses between attempts to read a file whose handle is stale: it was replaced meanwhile, or a cache of some seconds says so."""
SMALL_BYTES = 1 << 16


def names(folder: Path) -> list[str]:
    """List the published names in a folder, those without a leading dot, sorted; a missing folder has none."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except FileNotFoundError:
        return []


def is_there(path: Path) -> bool:
    """Return True if a name exists. Raises OSError where the file system cannot say: some Pythons' Path.exists says no."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def rename_once(source: Path, target: Path, done: Callable[[], bool]) -> None:
    """Rename; where the reply is an error, believe `done()`: the reply to a rename that succeeded can be lost."""
    try:
        os.rename(source, target)
    except OSError:
        if not done():
            raise


@contextlib.contextmanager
def open_handle(path: Path, flags: int) -> Iterator[int]:
    """Open a file or folder. Errors of calls on the handle, closing it included, name `path`, which the system does not."""
    handle = os.open(path, flags, 0o644)
    try:
        try:
            yield handle
        finally:
            os.close(handle)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def discard(folder: Path) -> None:
    """Remove a folder that has no name of its own any more, as far as that goes: clients of NFS keep what another process of this
    node has open under a hidden name, with its folder, until it is closed. Whoever removes the folder above removes the rest."""
    shutil.rmtree(folder, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Make names that appeared in `folder` survive a power failure."""
    with open_handle(folder, os.O_RDONLY) as handle:
        os.fsync(handle)


Data = bytes | Sequence[bytes | memoryview]
"""The content of a file: its bytes, or pieces of them in order."""

PIECES_A_WRITE = os.sysconf("SC_IOV_MAX")
"""Pieces in one write, some megabytes of arrays: large writes make large pages in the cache, which are quick to read."""
SYNC_FILE_RANGE_WRITE = 2
_begin_writing_back = ctypes.CDLL(None).sync_file_range
_begin_writing_back.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def write_file(path: Path, data: Data, *, durable: bool = True) -> None:
    """Create `path`, which must not exist, with `data`."""
    with open_handle(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as handle:
        _write_all(handle, [data] if isinstance(data, bytes) else data, durable)
        if durable:
            os.fsync(handle)


def _write_all(handle: int, pieces: Sequence[bytes | memoryview], durable: bool) -> None:
    """Write the pieces in order. durable: the disk starts on the first ones while the last are still copied."""
    rest = [memoryview(piece) for piece in pieces]
    while rest:
        written, done = os.writev(handle, rest[:PIECES_A_WRITE]), 0  # the system may take less than it is given
        while done < len(rest) and written >= rest[done].nbytes:
            written -= rest[done].nbytes
            done += 1
        rest = rest[done:]
        if written:
            rest[0] = rest[0][written:]
        if rest and durable:
            _begin_writing_back(handle, 0, 0, SYNC_FILE_RANGE_WRITE)  # a hint: a file system that lacks it says so


def link_exclusive(temporary: Path, final: Path, *, durable: bool = True) -> bool:
    """Give a finished file its name if nobody has it yet; True when this call did. The temporary name goes either way.

    Raises FileNotFoundError where that is gone: the caller was fenced. After an error, two names on the temporary file
    say that the link was made, and only the reply lost.
    """
    try:
        os.link(temporary, final)
        mine = True
    except OSError as error:
        mine = temporary.stat().st_nlink > 1 and temporary.samefile(final)
        if not mine and not isinstance(error, FileExistsError):
            raise
    temporary.unlink(missing_ok=True)
    if mine and durable:
        sync_folder(final.parent)
    return mine


def publish(final: Path, data: Data, *, commit_dir: Path | None = None, durable: bool = True) -> bool:
    """Publish `data` under a new name; False if it is taken. commit_dir: the temporary name's folder, else `final`'s."""
    temporary = (commit_dir or final.parent) / f".{final.name}.{uuid.uuid4().hex}"
    written = False
    try:
        write_file(temporary, data, durable=durable)
        written = True
        return link_exclusive(temporary, final, durable=durable)
    except OSError as error:
        # Else the temporary file, or its folder, is gone: the caller was fenced, or swept away. Another may have made the folder by now.
        no_folder = isinstance(error, FileNotFoundError) and (temporary.exists() if written else commit_dir is None)
        temporary.unlink(missing_ok=True)
        if not no_folder:
            raise
    final.parent.mkdir(parents=True, exist_ok=True)  # one of dozens is the first in its folder
    if durable:
        sync_folder(final.parent.parent)
    return publish(final, data, commit_dir=commit_dir, durable=durable)


def replace(final: Path, data: Data, *, commit_dir: Path | None = None, durable: bool = True) -> None:
    """Put `data` under a name that may exist; readers see the old or the new content, whole."""

    def is_in_place() -> bool:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):  # others do not answer it
            return final.read_bytes() == (data if isinstance(data, bytes) else b"".join(data))
        return False

    temporary = (commit_dir or final.parent) / f".{final.name}.{uuid.uuid4().hex}"
    try:
        write_file(temporary, data, durable=durable)
        rename_once(temporary, final, is_in_place)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(final.parent)


def read_json(path: Path) -> Any:
    """Read a published JSON file; None if there is none. Raises DamagedFile for one that is not valid JSON."""
    pauses = iter(STALE_PAUSES_S)
    while True:
        try:
            return json.loads(_read_small(path))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise DamagedFile(
                f"'{path}' is no JSON ({error}): files are published whole, so it was damaged after it was written; put it back from a "
                "copy, or remove it"
            ) from error
        except OSError as error:
            pause_s = next(pauses, None)
            if error.errno != errno.ESTALE or pause_s is None:  # replaced between opening and reading
                raise
            time.sleep(pause_s)


def _read_small(path: Path) -> bytes:
    """Read all of a small file, mostly in three calls to the file system; path.read_bytes() needs eight.

    That there is no such file is said by opening it alone: after that, the file was replaced, which some clients (GlusterFS) call
    ENOENT and others (NFS) ESTALE. It is ESTALE here.
    """
    opened = False
    try:
        with open_handle(path, os.O_RDONLY) as handle:
            opened = True
            parts = [os.read(handle, SMALL_BYTES)]
            while len(parts[-1]) == SMALL_BYTES:
                parts.append(os.read(handle, SMALL_BYTES))
            return b"".join(parts)
    except FileNotFoundError as error:
        if not opened:
            raise
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path)) from error


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
