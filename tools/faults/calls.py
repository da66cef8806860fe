"""Errors of file-system calls, made inside one process: no mount, no root, a millisecond a call.

    code ──► os.open, os.write, … below a folder ──► the rule: carry it out, fail it, lose its reply, carry it out twice

Files that Python opens are opened by `_pyio`, whose reads, writes and closes are calls of `os`, so these are counted too.
Reads and writes of C and C++ code (torch, HDF5) are not.
"""

from __future__ import annotations

import _pyio
import builtins
import errno
import io
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHANGES = ("mkdir", "rename", "link", "unlink", "rmdir", "replace")
"""Calls that a server carries out twice where the reply to the first is lost: the second answer is another one."""
CALLS = (
    *CHANGES, "open", "stat", "lstat", "listdir", "scandir", "utime", "chmod", "remove", "readlink", "symlink", "statvfs",
)  # fmt: skip
HANDLE_CALLS = (
    "read", "pread", "preadv", "readv", "write", "writev", "pwrite", "fsync", "fdatasync", "fstat", "lseek", "ftruncate", "close",
)  # fmt: skip
"""Calls on an open file, which is known by the path that the system knows it by."""
GIVE_HANDLES = ("open", "scandir")
"""Calls without a lost reply: no answer is no handle."""


class Faults:
    """Counts calls below `root`; `rule(number, call, path)` is asked before each what becomes of it."""

    def __init__(self, root: Path) -> None:
        self.root, self.count, self.quiet = str(root), 0, 0
        self.hit: str = ""
        """The last call that went wrong, and its file."""
        self.error = errno.EIO
        self.rule: Callable[[int, str, str], str | None] = lambda number, call, path: None

    @contextmanager
    def spared(self) -> Iterator[None]:
        """Have all calls carried out meanwhile: somebody else makes them."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def fail(self, number: int, how: str, error: int = errno.EIO) -> None:
        """Have the call `number` fail: "before" it is carried out; "lost", when only the answer is; "again", when it is carried out twice for
        that, and the second answer comes (other calls than CHANGES fail before)."""
        self.error = error
        self.rule = lambda n, call, path: how if n == number else None

    def wrap(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(target: Any = ".", *arguments: Any, **options: Any) -> Any:
            path = "" if self.quiet else _path(call, target, options.get("dir_fd"))
            if self.quiet or not self._below(path) or _asks_nobody(call, target, *arguments):
                return real(target, *arguments, **options)
            self.count += 1
            how = self.rule(self.count, call, path)
            if how is None:
                return real(target, *arguments, **options)
            self.hit = f"{call} {path}"
            if how == "kill":
                os.kill(os.getpid(), 9)
            if how == "again" and call in CHANGES:
                real(target, *arguments, **options)
                return real(target, *arguments, **options)
            if call == "close" or (how == "lost" and call not in GIVE_HANDLES):  # Linux closes a file that it fails for
                real(target, *arguments, **options)
            named = () if call in HANDLE_CALLS else (path,)  # a handle's errors name no file
            raise OSError(self.error, os.strerror(self.error), *named)

        return wrapped

    def _below(self, path: str) -> bool:
        return path == self.root or path.startswith(f"{self.root}/")

    def open(self, file: Any, *arguments: Any, **options: Any) -> Any:
        """Open a file as `open` does; one below `root` by calls of `os`."""
        below = isinstance(file, (str, os.PathLike)) and self._below(os.fspath(file))
        return (_pyio.open if below and not self.quiet else OPEN)(file, *arguments, **options)


OPEN, FSTAT = io.open, os.fstat


def _path(call: str, target: Any, folder: int | None) -> str:
    """Return the path that a call is about; empty where it has none."""
    if isinstance(target, (str, bytes, os.PathLike)):
        path = os.fsdecode(target)
        return path if folder is None else os.path.join(_of_handle(folder), path)
    return _of_handle(target if isinstance(target, int) else target.fileno())


def _asks_nobody(call: str, handle: Any, *arguments: Any) -> bool:
    """Return True for calls whose failure nobody would meet: closing a folder, which has nothing to write back; seeking
    a place that is not counted from a file's end; the fstat of `open`, whose errors Python ignores."""
    if call == "lseek":
        return bool(arguments[1] != os.SEEK_END)
    if call == "fstat":
        return bool(sys._getframe(2).f_globals["__name__"] == "_pyio")
    return call == "close" and stat.S_ISDIR(FSTAT(handle).st_mode)


def _of_handle(handle: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{handle}").removesuffix(" (deleted)")
    except OSError:
        return ""


def inject(patch: pytest.MonkeyPatch, root: Path) -> Faults:
    """Put a `Faults` below `root` in place."""
    faults = Faults(root)
    for call in (*CALLS, *HANDLE_CALLS):
        patch.setattr(os, call, faults.wrap(call, getattr(os, call)))
    for module in (io, builtins):
        patch.setattr(module, "open", faults.open)
    return faults
