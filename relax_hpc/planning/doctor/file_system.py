"""`relax-hpc doctor --file-system DIR`: measures what a file system promises, and says what of relax_hpc rests on each.

node A: doctor --file-system DIR --second ─► pulses in DIR/.doctor.second-…, until that folder goes
node B: doctor --file-system DIR          ─► its own checks ─► load ─► watches the second, removes its folder ─► rows
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import write_file
from relax_hpc.planning.doctor import files
from relax_hpc.planning.doctor.checks import Check, failed, note, ok, warning
from relax_hpc.planning.doctor.load import under_load
from relax_hpc.planning.doctor.seen import seen
from relax_hpc.planning.doctor.two_nodes import PULSE_S, Pulse, Watch, node_of

SECOND = f"{files.PREFIX}second-"
STAYS_S = 900.0
"""Seconds after which a second that nobody looks at leaves."""
TRAINERS = 2
"""Trainer processes that locks are judged for: more than one takes them."""
RESTS = {
    "exclusive link": "a shard, ledger entry, version or checkpoint is published once: the first counts",
    "hard links across folders": "what a trainer commits passes through its incarnation's folder: fencing",
    "O_EXCL": "hidden names of files that are being written",
    "rename over a file": "latest.json, heartbeats and the lease are old or new, never torn",
    "rename of a folder": "the lease's takeover, which fences what ran before",
    "rename across folders": "requests are claimed and given back, weights get their name, damaged shards leave",
    "modification times": "the lease is renewed",
    "fsync of a file": "what was published outlives a loss of power; once a shard, ledger entry, version, checkpoint",
    "fsync of a folder": "the names of what was published outlive it too",
    "flock": "processes of a trainer, and of a broadcast, find each other by torch's FileStore",
    "clocks": "nothing: times of several machines are only read side by side",
    "times of folders": "new requests and shards are noticed by one stat of their folder",
    "deletion while open": "old versions and shards are removed while others may still read them",
    "one winner among processes": "a request is claimed by one worker, a name published once",
    "lost replies": "every commit, claim and take-over",
    "errors under load": "roles end at an error and are started again; supervisors wait it out",
    "attribute cache of files": "nothing that waits: roles open what they wait for",
    "attribute cache of folders": "new requests and shards, until the folder is listed anyhow",
    "negative lookups": "`relax-hpc stop`, and the call to a broadcast",
    "listing cache": "new requests and shards: no other call tells of them",
    "close-to-open": "latest.json, heartbeats, the lease: who lives, and which weights are newest",
    "visibility after close": "a shard or manifest whose name is there is whole",
    "one winner among nodes": "two supervisors, two workers: one gets the lease, the ledger's entry, the request",
    "replaced while open": "workers that read a version while it is retired",
    "flock between nodes": "trainers on several nodes, and broadcasts, find each other by torch's FileStore",
}


def measure(root: Path, say: Callable[[str], None] = lambda what: None) -> Iterator[Check]:
    """Yield what is found in `root`, a folder; within a minute. Raises RunError when nothing can be written there."""
    for check in _measured(_existing(root), say):
        yield replace(check, area="files", rests=RESTS.get(check.what, ""))


def _measured(root: Path, say: Callable[[str], None]) -> Iterator[Check]:
    with files.scratch(root, "--file-system") as folder:
        looks: dict[str, Callable[[Path], list[Check]]] = {
            "names and files": files.guarantees,
            "fsync": files.fsyncs,
            "locks": lambda own: [files.locks(own, TRAINERS)],
            "clocks": lambda own: [files.skew(own)],
            "times of folders": lambda own: [files.times(own)],
            "deletion while open": lambda own: [_deletion(own)],
            "answers under load": under_load,
        }
        for what, look in looks.items():
            say(what)
            yield from _tried(what, look, folder)
        say("another node's changes")
        yield from _tried("changes by another node", lambda own: _second(root, own), folder)


def _tried(what: str, look: Callable[[Path], list[Check]], folder: Path) -> list[Check]:
    """Look, in a folder of its own; an error of the file system is a check that failed."""
    own = folder / what.replace(" ", "-").replace("'", "")
    try:
        own.mkdir()
        return look(own)
    except OSError as error:
        words = f"{error.strerror}: '{error.filename}'" if error.filename else str(error)
        return [failed(what, words, "no error", "supervision.io_wait_s says how long a run outlives errors; tell the site, or " + files.ELSEWHERE)]  # fmt: skip


def _deletion(folder: Path) -> Check:
    """Remove a file that is open, and its folder."""
    inside = folder / "inside"
    inside.mkdir()
    write_file(inside / "file", b"kept", durable=False)
    with (inside / "file").open("rb") as file:
        (inside / "file").unlink()
        if file.read() != b"kept":
            return failed("deletion while open", "the content is gone at once", "content until it is closed", files.ELSEWHERE)  # fmt: skip
        left = os.listdir(inside)
    if left:
        return note("deletion while open", f"leaves '{left[0]}' until it is closed, so that its folder stays as long")
    return ok("deletion while open", "the content stays until it is closed, no name does")


def _second(root: Path, folder: Path) -> list[Check]:
    """Watch the second that pulses in `root`, and end it."""
    there = max(root.glob(f"{SECOND}*"), key=lambda path: path.stat().st_mtime, default=None)
    if there is None:
        how = f"`relax-hpc doctor --file-system {root} --second` on another node, then this again"
        return [warning("changes by another node", "not measured: nobody else is here", "a second node", how)]
    tick_s = files.granularity_s(folder)
    watch = Watch(there)
    try:
        watch.work()
        found = seen(watch, os.uname().nodename, tick_s)
    finally:
        _remove(there)
    if watch.about.get("node") == node_of(root):
        words = "the second runs on this node, in this mount: what is said of caches and of nodes says nothing"
        found.append(warning("another node", words, "another node, or another mount", "start the second elsewhere"))
    return found


def second(root: Path, say: Callable[[str], None] = lambda what: None, stays_s: float = STAYS_S) -> bool:
    """Pulse in `root` for another node's `measure`, until it is through; return False if none came within `stays_s`."""
    for stale in _existing(root).glob(f"{SECOND}*"):  # of one that was killed; a living one leaves
        _remove(stale)
    try:
        folder = Path(tempfile.mkdtemp(prefix=SECOND, dir=root))
    except OSError as error:
        raise RunError(f"nothing can be written in '{root}' ({error.strerror}): choose a folder that you can write") from None  # fmt: skip
    try:
        return _pulse(folder, lambda: say(f"ready: `relax-hpc doctor --file-system {root}` on another node"), stays_s)
    finally:
        _remove(folder)


def _pulse(folder: Path, ready: Callable[[], None], stays_s: float) -> bool:
    """Pulse until the folder is gone; return False if that took longer than `stays_s`."""
    pulse, until = Pulse(folder), time.monotonic() + stays_s
    ready()
    try:
        while time.monotonic() < until:
            time.sleep(PULSE_S)
            try:
                pulse.beat()
            except OSError as error:  # any other than these passes, and the first will tell of it
                if error.errno in (errno.ENOENT, errno.ESTALE):
                    return True
    finally:
        pulse.close()
    return False


def _existing(root: Path) -> Path:
    if not root.is_dir():
        raise RunError(f"--file-system '{root}': no such folder (seen from {Path.cwd()})")
    return root.absolute()


def _remove(folder: Path) -> None:
    """Remove a folder in which another node may still write: under another name, so that it notices."""
    gone = folder.with_name(f"{files.PREFIX}gone-{folder.name.removeprefix(SECOND)}")
    with contextlib.suppress(OSError):
        os.rename(folder, gone)
    files.remove_tree(gone)
