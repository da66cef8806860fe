"""A file system that fails, without one: calls of `os` and `io` below a folder are counted, and one of them goes wrong. What C++ code
reads and writes by itself (torch, a file opened by `open`) is not among them."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHANGES = ("mkdir", "rename", "link", "unlink", "rmdir", "replace")
"""Calls that a server carries out twice where the reply to the first is lost: the second answer is another one."""
CALLS = ("open", "mkdir", "rename", "link", "unlink", "rmdir", "stat", "listdir", "scandir", "utime", "replace")
HANDLE_CALLS = ("read", "pread", "preadv", "writev", "fsync")
"""Calls on an open file, which is known by the path that the system knows it by."""


class Faults:
    """Counts calls below `root`; `goes_wrong(call, name)` is asked before each what becomes of it."""

    def __init__(self, root: Path) -> None:
        self.root, self.count, self.quiet = str(root), 0, 0
        self.hit: str = ""
        """The call that went wrong, and its file."""
        self.rule: Callable[[int, str, str], str | None] = lambda number, call, path: None

    @contextmanager
    def spared(self) -> Iterator[None]:
        """What is done here is done by somebody else."""
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
        def wrapped(path: Any, *arguments: Any, **options: Any) -> Any:
            text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
            if call in HANDLE_CALLS and not self.quiet:
                text = os.readlink(f"/proc/self/fd/{path if isinstance(path, int) else path.fileno()}")
            if self.quiet or not str(text).startswith(self.root):
                return real(path, *arguments, **options)
            self.count += 1
            how = self.rule(self.count, call, str(text))
            if how is None:
                return real(path, *arguments, **options)
            self.hit = f"{call} {text}"
            if how == "kill":
                os.kill(os.getpid(), 9)
            if how == "again" and call in CHANGES:
                real(path, *arguments, **options)
                return real(path, *arguments, **options)
            if how == "lost" and call not in ("open", "scandir"):  # those give handles: no answer is no handle
                real(path, *arguments, **options)
            name = () if call in HANDLE_CALLS else (str(text),)  # a handle's errors name no file
            raise OSError(self.error, os.strerror(self.error), *name)

        return wrapped


def inject(monkeypatch: pytest.MonkeyPatch, root: Path) -> Faults:
    """Put a `Faults` below `root` in place."""
    faults = Faults(root)
    for call in (*CALLS, *HANDLE_CALLS):
        monkeypatch.setattr(os, call, faults.wrap(call, getattr(os, call)))
    monkeypatch.setattr(io, "open", faults.wrap("open", io.open))
    return faults
