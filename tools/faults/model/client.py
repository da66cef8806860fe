"""A file server with virtual times, and its clients, whose caches may be old.

    client ──names, attributes: as they were when its caches froze──► a real directory ◄── changes: always the server's answer
           ──a folder that was renamed since: still by its handle──►

Times are the server's: a virtual clock, in ticks of nanoseconds or of whole seconds. What was not flushed is lost with the power.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BEGIN_S = 1_800_000_000.0
SECOND_NS = 10**9
real: dict[str, Callable[..., Any]] = {
    name: getattr(os, name)
    for name in (
        "open", "close", "mkdir", "rename", "link", "unlink", "rmdir", "utime", "replace", "stat", "lstat", "fstat", "listdir", "scandir",
        "readlink", "write", "writev", "urandom", "uname",
    )
} | {"io.open": io.open, "sleep": time.sleep, "monotonic": time.monotonic, "time": time.time}  # fmt: skip
"""The calls themselves, whatever is put in their place."""
_UNIQUE = re.compile(r"[0-9a-f]{32}|(?<=\.)[0-9a-f]{8}(?=\.)|(?<=\.)[0-9a-z_]{8}$")


class Server:
    """The directory of a run as its server has it: times, what is on the disk, and a fingerprint of all names."""

    def __init__(self, root: Path, tick_ns: int = 1) -> None:
        self.root, self._prefix, self._tick_ns = root, f"{root}/", tick_ns
        self.now_s = BEGIN_S
        self.names_given = 0
        self.violation: AssertionError | None = None
        self.observe: Callable[[Any, Any], None] = lambda actor, call: None
        self.times: dict[int, int] = {}
        """Inode -> its modification time."""
        self.unsynced: set[int] = set()
        """Inodes of files whose content is not flushed."""
        self.unnamed: set[str] = set()
        """Paths that are lost with the power: their folder was not flushed since."""
        self.fingerprint = 0

    def has(self, path: str) -> bool:
        return path.startswith(self._prefix)

    def _time_ns(self) -> int:
        return int(self.now_s * SECOND_NS) // self._tick_ns * self._tick_ns

    def touch(self, path: str) -> None:
        with contextlib.suppress(OSError):
            self.times[real["stat"](path).st_ino] = self._time_ns()

    def changed(self, op: str, path: str, to: str, result: Any) -> None:
        """Note a change: times, and what is not on the disk yet."""
        if op in ("write", "utime", "open"):
            self.touch(path)
            if op == "write":
                with contextlib.suppress(OSError):
                    self.unsynced.add(real["stat"](path).st_ino)
        if op in ("write", "utime"):
            return
        for name in filter(None, (path, to)):
            self.touch(os.path.dirname(name))
        if op in ("open", "link", "rename"):
            self.unnamed.add(to or path)
        if op in ("unlink", "rename"):
            self.unnamed.discard(path)
        self.fingerprint ^= hash((op != "link" and _UNIQUE.sub("#", path), _UNIQUE.sub("#", to)))

    def synced(self, handle: int) -> None:
        """Note a flush of a file, or of a folder's names."""
        found = real["fstat"](handle)
        if stat.S_ISDIR(found.st_mode):
            folder = real["readlink"](f"/proc/self/fd/{handle}")
            self.unnamed -= {path for path in self.unnamed if os.path.dirname(path) == folder}
        self.unsynced.discard(found.st_ino)

    def dated(self, found: os.stat_result) -> os.stat_result:
        """Return attributes with the server's time."""
        at = self.times.get(found.st_ino, int(BEGIN_S) * SECOND_NS)
        return os.stat_result(tuple(found)[:10], {"st_mtime": at / SECOND_NS, "st_mtime_ns": at})

    def lose_power(self, names: bool) -> list[str]:
        """Lose contents that are not on the disk, which leaves empty files, and `names` that are not; returns these."""
        lost = [path for path in sorted(self.unnamed) if names and os.path.isfile(path)]
        for path in lost:
            real["unlink"](path)
            self.touch(os.path.dirname(path))
        for folder, _, files in os.walk(self.root):
            for name in files:
                path = os.path.join(folder, name)
                if real["stat"](path).st_ino in self.unsynced:
                    os.truncate(path, 0)
        self.unnamed.clear()
        self.unsynced.clear()
        return lost


class _Entries(list[Any]):
    """The entries of a folder, as `os.scandir` gives them."""

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    def close(self) -> None: ...


class Client:
    """A host's view of the server. Frozen, it shows names and attributes as they were, but for its own changes; it opens
    files as they are, and folders that were renamed by their handles."""

    def __init__(self, server: Server, name: str) -> None:
        self.server, self.name, self.clock_s = server, name, 0.0
        """clock_s: how far the clock on its wall is off."""
        self.frozen_until = float("-inf")
        self._listings: dict[str, list[str]] = {}
        self._attributes: dict[str, os.stat_result] = {}
        self._own: dict[str, set[str]] = defaultdict(set)
        self._handles: dict[str, int] = {}
        self._keeps_listings = self._keeps_absences = True

    @property
    def frozen(self) -> bool:
        if self.server.now_s >= self.frozen_until and self._listings:
            self.thaw()
        return self.server.now_s < self.frozen_until

    def freeze(self, seconds: float, listings: bool = True, absences: bool = True) -> None:
        """Keep attributes (and listings, and that names are absent) as they are, for so many seconds."""
        self.thaw()
        self.frozen_until = self.server.now_s + seconds
        self._keeps_listings, self._keeps_absences = listings, absences
        for folder, folders, names in os.walk(self.server.root):
            self._listings[folder] = [*folders, *names]
            self._attributes[folder] = self.server.dated(real["stat"](folder))
            for name in names:
                path = os.path.join(folder, name)
                self._attributes[path] = self.server.dated(real["stat"](path))
            if f"{folder}/".startswith(f"{self.server.root}/lease/"):
                self._handles[folder] = real["open"](folder, os.O_PATH | os.O_DIRECTORY)

    def thaw(self) -> None:
        self.frozen_until = float("-inf")
        self._listings, self._attributes = {}, {}
        self._own.clear()
        for handle in self._handles.values():
            real["close"](handle)
        self._handles = {}

    def where(self, path: str) -> str:
        """Return the path by which a name is reached: through the handle of its folder, if that is known by one."""
        folder, _, name = path.rpartition("/")
        if self.frozen and folder in self._handles:
            return f"/proc/self/fd/{self._handles[folder]}/{name}"
        return path

    def touches(self, path: str, to: str) -> None:
        """Note a change of our own: from then on we know these names as they are."""
        if not self.frozen:
            return
        for name in filter(None, (path, to)):
            folder, _, last = name.rpartition("/")
            self._own[folder].add(last)
            self._attributes.pop(folder, None)
            for known in [k for k in self._handles if k == name or k.startswith(f"{name}/")]:
                real["close"](self._handles.pop(known))

    def _is_old(self, path: str) -> bool:
        """Return True if we answer for this name from our caches."""
        folder, _, name = path.rpartition("/")
        return self.frozen and folder in self._listings and name not in self._own[folder]

    def opened(self, path: str) -> str:
        """Return the path by which to open a file; the server is asked, unless we know that there is none."""
        folder, _, name = path.rpartition("/")
        if self._is_old(path) and self._keeps_absences and name not in self._listings[folder]:
            raise FileNotFoundError(2, os.strerror(2), path)
        return self.where(path)

    def stat(self, path: str) -> os.stat_result:
        if self._is_old(path):
            if path in self._attributes:
                return self._attributes[path]
            if self._keeps_absences and path.rpartition("/")[2] not in self._listings[path.rpartition("/")[0]]:
                raise FileNotFoundError(2, os.strerror(2), path)
        return self.server.dated(real["stat"](self.where(path)))

    lstat = stat

    def listdir(self, path: str) -> list[str]:
        if not (self.frozen and self._keeps_listings and path in self._listings):
            handle = self._handles.get(path) if self.frozen else None
            return list(real["listdir"](path if handle is None else f"/proc/self/fd/{handle}"))
        own = self._own[path]
        kept = [name for name in self._listings[path] if name not in own]
        return kept + [name for name in sorted(own) if os.path.lexists(self.where(f"{path}/{name}"))]

    def scandir(self, path: str) -> _Entries:
        shown = set(self.listdir(path))
        with real["scandir"](path) as entries:
            return _Entries(
                sorted((entry for entry in entries if entry.name in shown), key=lambda entry: str(entry.name))
            )
