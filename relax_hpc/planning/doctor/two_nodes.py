"""Measures between two clients of a file system (nodes, or two mounts) what one notices of the other: one pulses, the other watches.

second, every PULSE_S:  stat/file, opened/file   replaced         ─► first: stat of the one, open and read of the other
                        folder/N, missing/N      added            ─► stat of the folder; of the name that comes next
                        listing/N                published        ─► a listing; what it names is read, and must be whole
                        race/N                   linked, renamed  ─► the first does the same, before or after: one may have it

The longest time for which a look stays the same is how long the first's client caches it; PULSE_S where it caches nothing. They
meet in the folder alone, and never wait for each other. Each kind of look has a folder of its own: opening a folder or file
makes many clients ask the server, and would hide what a `stat` alone is told.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_hpc.files.publish import (  # fmt: skip
    is_there,
    link_exclusive,
    names,
    publish,
    read_json,
    rename_once,
    replace,
    to_json,
    write_file,
)

PULSE_S = 0.25
LOOK_S = 0.02
LEAST_S, WINDOW_S = 6.0, 35.0
"""Seconds of watching: at least, and at most, where something does not change. A cache that lasts longer is found, but not measured."""
APART = 3
"""Pulses by which the first tries for a name before the second, or after it."""
PAYLOAD = b"0123456789abcdef" * 8192
KINDS = ("stat", "opened", "folder", "missing", "listing", "race")


class Pulse:
    """The second's side: changes that the first watches, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.won = folder, 0, list[str]()
        for kind in KINDS:
            (folder / kind).mkdir(parents=True)
        self._lock = (folder / "lock").open("wb")
        with contextlib.suppress(OSError):  # without locks the first gets this one, and says so
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for number in range(1, 2 * APART):
            self._offer(number)
        self.beat()

    def _offer(self, number: int) -> None:
        write_file(self.folder / "race" / f"source-{number}", b"", durable=False)

    def beat(self) -> None:
        """Change everything once. Raises OSError when the folder is gone."""
        self.count += 1
        for kind in ("missing", "folder"):
            write_file(self.folder / kind / str(self.count), b"", durable=False)
        publish(self.folder / "listing" / str(self.count), PAYLOAD, durable=False)
        self._offer(self.count + 2 * APART - 1)
        self.won += race(self.folder / "race", "second", self.count)
        replace(self.folder / "stat" / "file", str(self.count).encode(), durable=False)
        about = {"count": self.count, "won": self.won, "node": node_of(self.folder)}
        replace(self.folder / "opened" / "file", to_json(about), durable=False)

    def close(self) -> None:
        self._lock.close()


@contextmanager
def pulse(folder: Path, name: str) -> Iterator[None]:
    """Pulse in FOLDER/pulse-NAME/ from a thread, until the block ends or the folder is gone."""
    own, over = Pulse(folder / f"pulse-{name}"), threading.Event()

    def change() -> None:
        with contextlib.suppress(OSError):  # the doctor's folder goes before its nodes do
            while not over.wait(PULSE_S):
                own.beat()

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        own.close()


def node_of(folder: Path) -> list[object]:
    """Name the client that sees `folder`: the host, and the mount on it."""
    return [os.uname().nodename, os.stat(folder).st_dev]


def race(folder: Path, who: str, number: int) -> list[str]:
    """Try to get a pulse's names: one by link, one by rename of the source that there is. Return those that were got."""
    linked, renamed = (folder / f"{call}-{number}.{who}" for call in ("link", "rename"))
    write_file(linked, who.encode(), durable=False)
    won = ["link"] if link_exclusive(linked, folder / f"link-{number}", durable=False) else []
    with contextlib.suppress(FileNotFoundError):  # the other was first
        rename_once(folder / f"source-{number}", renamed, lambda: is_there(renamed))
        won.append("rename")
    return [f"{call}-{number}" for call in won]


@dataclass(slots=True)
class Look:
    """One way of looking, and the longest time that it gave the same answer."""

    look: Callable[[], object]
    seen: object = None
    since_s: float = field(default_factory=time.monotonic)
    longest_s: float = 0.0
    changes: int = -1
    """Changes seen after the first answer."""

    error: str = ""
    """The error of a look that failed."""

    def again(self) -> None:
        try:
            new = self.look()
        except OSError as error:
            self.error = str(error.strerror)
            return
        if new != self.seen or self.changes < 0:
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - self.since_s) if self.changes >= 0 else 0.0
            self.seen, self.since_s, self.changes = new, now, self.changes + 1


class Watch:
    """The first's side: looks at another's pulse in `folder`."""

    def __init__(self, folder: Path, window_s: float = WINDOW_S) -> None:
        self.folder, self.window_s = folder, window_s
        self.who = f"{os.uname().nodename}-{os.getpid()}"
        self.looks = {
            "stat": Look(lambda: _of(folder / "stat" / "file")),
            "folder": Look(lambda: os.stat(folder / "folder").st_mtime_ns),
            "missing": Look(self._next_name),
            "listing": Look(self._listing),
            "opened": Look(self._opened),
        }
        self.about: dict[str, Any] = {}
        """The second's own words, as an opened file says them."""
        self.torn, self.won, self.raced = list[str](), list[str](), set[int]()
        self.held_error, self.looked_s = "", 0.0
        self._missing, self.read = 1, frozenset[str]()
        """`read`: names of published files that were listed, and read."""

    def work(self) -> None:
        """Look until each look has changed, for LEAST_S at least and `window_s` at most."""
        began = time.monotonic()
        with self._held() as held:
            while (passed_s := time.monotonic() - began) < self.window_s:
                if passed_s > LEAST_S and all(look.changes > 0 for look in self.looks.values()):
                    break
                for look in self.looks.values():
                    look.again()
                self._race()
                time.sleep(LOOK_S)
            self.held_error = held()
        self.looked_s = time.monotonic() - began
        for look in self.looks.values():
            look.longest_s = max(look.longest_s, time.monotonic() - look.since_s)
        self._wait_for_the_second()

    def _next_name(self) -> int:
        while _of(self.folder / "missing" / str(self._missing)) is not None:
            self._missing += 1
        return self._missing

    def _listing(self) -> frozenset[str]:
        now = frozenset(names(self.folder / "listing"))
        for name in now - self.read:
            try:
                whole = (self.folder / "listing" / name).read_bytes() == PAYLOAD
            except FileNotFoundError:
                whole = False
            self.torn += [] if whole else [name]
        self.read = now
        return now

    def _opened(self) -> int:
        self.about = read_json(self.folder / "opened" / "file") or {}
        return int(self.about.get("count", 0))

    def _race(self) -> None:
        """Try for even names before the second does, and for odd ones after it."""
        count = int(self.about.get("count", 0))
        for number, odd in ((count + APART, 0), (count - APART, 1)):
            if count and number > 0 and number % 2 == odd and number not in self.raced:
                self.raced.add(number)
                with contextlib.suppress(FileNotFoundError):
                    self.won += race(self.folder / "race", self.who, number)

    def _wait_for_the_second(self) -> None:
        """Wait until an opened file tells of the last race, for as long as it was seen to be cached."""
        last, until = max(self.raced, default=0), time.monotonic() + self.looks["opened"].longest_s + APART
        with contextlib.suppress(OSError):
            while self._opened() < last and time.monotonic() < until:
                time.sleep(PULSE_S)

    @contextmanager
    def _held(self) -> Iterator[Callable[[], str]]:
        """Hold a file open that the second replaces; yields a function that reads it, and returns the error."""
        handle = os.open(self.folder / "stat" / "file", os.O_RDONLY)

        def read() -> str:
            try:
                return "" if os.read(handle, 100) else "it is empty"
            except OSError as error:
                return str(error.strerror)

        try:
            yield read
        finally:
            with contextlib.suppress(OSError):  # GlusterFS: closing what another node replaced fails like reading it
                os.close(handle)

    def lock_error(self) -> str:
        """Ask for the lock that the second holds; return what came instead of a refusal, empty where it was refused."""
        try:
            with (self.folder / "lock").open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
        except OSError as error:
            return str(error.strerror)
        return "two nodes held one lock"


def _of(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns
