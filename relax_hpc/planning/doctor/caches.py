"""Measures between two nodes how long one does not notice changes by the other: one node pulses, the other watches.

node A: replaces a file and adds a name every PULSE_S ──► node B: `stat` of the file, a listing of the folder

The longest time that each stays the same is how long node B's client caches it, or PULSE_S where it caches nothing.
Nothing is opened meanwhile: that would make an NFS client ask the server.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_hpc.files.publish import names, replace
from relax_hpc.planning.doctor.checks import Check, note, ok

PULSE_S = 0.25
LOOK_S = 0.02
WINDOW_S = 8.0
"""Seconds of watching: a cache that lasts longer is found, but not measured."""
NOTICEABLE_S = 1.0


@contextmanager
def pulse(folder: Path, name: str) -> Iterator[None]:
    """Every PULSE_S, from a thread, replace a file in FOLDER/pulse-NAME/ and rename another."""
    own, over = folder / f"pulse-{name}", threading.Event()
    own.mkdir()

    def change() -> None:
        count = 0
        with contextlib.suppress(OSError):  # the doctor's folder goes before its nodes do
            while not over.wait(PULSE_S):
                count += 1
                replace(own / "file", str(count).encode(), durable=False)
                (own / f"name-{count}").touch()
                (own / f"name-{count - 1}").unlink(missing_ok=True)

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def longest_unchanged(look: Callable[[], object], window_s: float) -> float:
    """The longest time in seconds that `look` gave one answer, within `window_s`; `window_s` if it never changed."""
    end, seen, since, longest, changes = time.monotonic() + window_s, look(), time.monotonic(), 0.0, 0
    while (now := time.monotonic()) < end:
        if (new := look()) != seen:
            longest, seen, since, changes = max(longest, now - since), new, now, changes + 1
        time.sleep(LOOK_S)
    return max(longest, end - since) if changes else window_s


def caches(folder: Path, peer: str, host: str, window_s: float = WINDOW_S) -> list[Check]:
    """Measure how long this node, `host`, caches the folder in which `peer` pulses."""
    watched = folder / f"pulse-{peer}"
    looks: dict[str, Callable[[], object]] = {
        "attributes of files": lambda: _of(watched / "file"),
        "listings of folders": lambda: names(watched),
    }
    return [_check(what, longest_unchanged(look, window_s / len(looks)), window_s / len(looks), host) for what, look in looks.items()]  # fmt: skip


def _of(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _check(what: str, unchanged_s: float, window_s: float, host: str) -> Check:
    if unchanged_s >= window_s:
        return note(what, f"{host} saw no change of another node's in {window_s:g} s: cached for longer; a step of a new run may wait that long once, "
                    "then a second (actimeo, acregmax, acdirmax of an NFS mount)")  # fmt: skip
    if unchanged_s > NOTICEABLE_S:
        return note(what, f"{host} saw changes up to {unchanged_s:.1f} s late: requests and versions are looked at anew every second all the same")  # fmt: skip
    return ok(what, f"changes seen within {unchanged_s:.1f} s")
