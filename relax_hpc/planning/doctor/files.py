"""Tries what a run needs of its file system, in a temporary folder: names appear whole, once, and for all to see."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import is_there, link_exclusive, sync_folder, write_file
from relax_hpc.files.watch import COARSE_RECENT_S, RECENT_S, RELIST_S
from relax_hpc.planning.doctor.checks import Check, failed, note, ok, warning

SKEW_WARNING_S, SKEW_FAILED_S = 2.0, 20.0
"""Clock differences of note: records of several machines are read side by side, though nothing relies on clocks."""
SLOW_FSYNC_S = 0.2
SYNCS = 5
"""How often fsync is tried."""
TICKS, LONGEST_TICK_S = 3, 3.2
"""Different times of a folder to see, and when to give up."""
TICK_PAUSE_S, LONGEST_TICK_PAUSE_S = 0.001, 0.02
"""Pauses between two names: short at first, so that short ticks are found."""
ELSEWHERE = "put run.root on another file system"
LONG_HANDOVERS = (
    "fewer, larger requests (rollout.groups_per_request), and async.max_staleness of 1 or more, so that waits overlap"
)
"""The advice where one role learns late of what another one made."""
CACHE_OPTIONS = ("acregmax", "acdirmax", "actimeo")
NFS_CACHE_S = 60
"""Seconds that an NFS client caches folders where the mount does not say: the default of acdirmax."""
PREFIX = ".doctor."
NETWORKED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "glusterfs", "panfs", "wekafs", "afs", "9p", "virtiofs", "daos", "orangefs", "pvfs")  # fmt: skip
"""File systems that several machines can mount; FUSE ones carry the name after `fuse.`."""


def existing_part(path: Path) -> Path:
    """`path`, or the nearest folder above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


@contextmanager
def scratch(root: Path, asked: str = "run.root") -> Iterator[Path]:
    """Make a folder in `root` (or the nearest one above that exists); it is removed at the end. Raises RunError.

    asked: the key or option that names `root`.
    """
    near = existing_part(root)
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=near))
    except OSError as error:
        raise RunError(
            f"nothing can be written in '{near}' ({error.strerror}), where {asked} = '{root}' is to be: give yourself write "
            f"permission, or choose another with {'--set run.root=DIR' if asked == 'run.root' else asked}"
        ) from None
    try:
        yield folder
    finally:
        remove_tree(folder)


def remove_tree(folder: Path) -> None:
    """Remove a folder in which a process on another node may be writing its last file."""
    for _ in range(5):
        with contextlib.suppress(OSError):
            shutil.rmtree(folder, ignore_errors=True)
            if not is_there(folder):
                break
        time.sleep(0.2)


def semantics(folder: Path, *, trainer_processes: int) -> list[Check]:
    """Try each guarantee that runs rely on, in `folder`, which must be empty."""
    tried = guarantees(folder)
    broken = [check for check in tried if check.verdict != "ok"]
    semantic = broken or [ok("semantics", ", ".join(check.what for check in tried))]
    locked = locks(folder, trainer_processes)
    return [*semantic, *fsyncs(folder), locked, skew(folder), times(folder), attribute_cache(folder)]


def guarantees(folder: Path) -> list[Check]:
    """Try what POSIX promises of names and files, each in a folder of its own."""
    found = []
    for what, attempt in GUARANTEES.items():
        own = folder / what.replace(" ", "-")
        try:
            own.mkdir()
            attempt(own)
            found.append(ok(what, "as POSIX says"))
        except (OSError, Wrong) as error:
            said = error.strerror if isinstance(error, OSError) else None
            found.append(failed(what, said or str(error), "POSIX semantics", ELSEWHERE))
    return found


class Wrong(Exception):
    """Raised when the file system did something else than it should."""


def _exclusive_link(folder: Path) -> None:
    for name in ("a", "b"):
        write_file(folder / name, name.encode(), durable=False)
    first = link_exclusive(folder / "a", folder / "final", durable=False)
    second = link_exclusive(folder / "b", folder / "final", durable=False)
    if (first, second) != (True, False) or (folder / "final").read_bytes() != b"a":
        raise Wrong(f"two links to one name gave {first} and {second}, and the name holds another file's bytes")


def _link_across(folder: Path) -> None:
    (folder / "x").mkdir()
    (folder / "y").mkdir()
    write_file(folder / "x" / "a", b"a", durable=False)
    os.link(folder / "x" / "a", folder / "y" / "a")
    if (folder / "y" / "a").stat().st_nlink != 2:
        raise Wrong(f"a file with two names says that it has {(folder / 'y' / 'a').stat().st_nlink}")


def _rename_across(folder: Path) -> None:
    """Try renames from one folder into another: of a file, as requests are claimed, and of a folder, as weights get their name."""
    for name in ("from", "from/whole", "to"):
        (folder / name).mkdir()
    for name in ("from/file", "from/whole/inside"):
        write_file(folder / name, b"a", durable=False)
    for name in ("file", "whole"):
        os.rename(folder / "from" / name, folder / "to" / name)
    if os.listdir(folder / "from") or (folder / "to" / "whole" / "inside").read_bytes() != b"a":
        raise Wrong("after a rename into another folder the old name is still there, or the content is another")


def _exclusive_create(folder: Path) -> None:
    write_file(folder / "a", b"a", durable=False)
    with contextlib.suppress(FileExistsError):
        write_file(folder / "a", b"b", durable=False)
        raise Wrong("a file that is there was created again")


def _rename_over_file(folder: Path) -> None:
    for name in ("a", "b"):
        write_file(folder / name, name.encode(), durable=False)
    os.rename(folder / "a", folder / "b")
    if (folder / "b").read_bytes() != b"a" or (folder / "a").exists():
        raise Wrong("after a rename over a file the old name, or the old bytes, are still there")


def _rename_folder(folder: Path) -> None:
    """Try the rename of a folder, which is how a superseded trainer is fenced."""
    (folder / "a").mkdir()
    (folder / "full").mkdir()
    write_file(folder / "full" / "x", b"", durable=False)
    try:
        os.rename(folder / "a", folder / "full")
        raise Wrong("a folder was renamed over one that is not empty")
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    os.rename(folder / "a", folder / "over")
    try:
        write_file(folder / "a" / "x", b"", durable=False)
        raise Wrong("a file was created in a folder by the name that it had before a rename")
    except FileNotFoundError:
        pass


def _touch(folder: Path) -> None:
    path = folder / "a"
    write_file(path, b"", durable=False)
    os.utime(path, (1e9, 1e9))
    old = path.stat().st_mtime
    os.utime(path)
    if not old == 1e9 < path.stat().st_mtime:
        raise Wrong(
            f"a file touched now shows the time {path.stat().st_mtime:.0f}, before it {old:.0f} and not 1000000000"
        )


GUARANTEES: dict[str, Callable[[Path], None]] = {
    "exclusive link": _exclusive_link,
    "hard links across folders": _link_across,
    "O_EXCL": _exclusive_create,
    "rename over a file": _rename_over_file,
    "rename of a folder": _rename_folder,
    "rename across folders": _rename_across,
    "modification times": _touch,
}


def fsyncs(folder: Path) -> list[Check]:
    """Measure what fsync of a file and of a folder takes: the median of a few."""
    sync: dict[str, Callable[[int], None]] = {
        "fsync of a file": lambda i: write_file(folder / f"synced-{i}", b"x" * 4096),
        "fsync of a folder": lambda i: sync_folder(folder),
    }
    return [_fsync(what, call) for what, call in sync.items()]


def _fsync(what: str, call: Callable[[int], None]) -> Check:
    took_s = []
    try:
        for i in range(SYNCS):
            began = time.monotonic()
            call(i)
            took_s.append(time.monotonic() - began)
    except OSError as error:
        return failed(what, str(error), "fsync of files and folders", ELSEWHERE)
    words = f"{statistics.median(took_s) * 1e3:.1f} ms, at most {max(took_s) * 1e3:.1f} ms"
    if statistics.median(took_s) > SLOW_FSYNC_S:
        return warning(what, words, f"{SLOW_FSYNC_S * 1e3:.0f} ms at most", "publishing will be slow: fewer, larger requests (rollout.groups_per_request), or another file system")  # fmt: skip
    return ok(what, words)


def locks(folder: Path, trainer_processes: int) -> Check:
    """Try flock between two processes: torch's FileStore, by which trainer processes find each other, takes it."""
    with (folder / "lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return _no_locks(f"refused: {error}", trainer_processes)
        child = multiprocessing.get_context("fork").Process(target=_take_lock, args=(str(folder / "lock"),))
        child.start()
        child.join()
    if child.exitcode != 0:
        return _no_locks("two processes held the same lock", trainer_processes)
    return ok("flock", "a lock that one process holds, another does not get (HDF5's are off)")


def _take_lock(path: str) -> None:
    with open(path, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os._exit(0)
    os._exit(1)


def _no_locks(found: str, trainer_processes: int) -> Check:
    if trainer_processes == 1:
        return note("flock", f"{found}; not needed: HDF5's are off, and trainer.processes = 1")
    expected = f"flock, by which trainer.processes = {trainer_processes} find each other"
    fix = "mount with locks (Lustre: -o flock; NFS: without nolock), or use trainer.processes = 1"
    return failed("flock", found, expected, fix)


def skew(folder: Path) -> Check:
    """Compare this machine's clock with the one that stamps files."""
    before = time.time()
    path = folder / "now"
    write_file(path, b"", durable=False)
    stamped, after = path.stat().st_mtime, time.time()
    off = stamped - min(max(stamped, before), after)
    words = f"{off:+.2f} s between this machine and the file system"
    if abs(off) < SKEW_WARNING_S:
        return ok("clocks", words)
    make = failed if abs(off) > SKEW_FAILED_S else warning
    return make("clocks", words, f"less than {SKEW_WARNING_S:.0f} s", "run an NTP client (chronyd) on this machine: `timedatectl`")  # fmt: skip


def times(folder: Path) -> Check:
    """Check how fine the times of folders are: names that appear within one tick are seen by listing alone."""
    tick_s = granularity_s(folder)
    if tick_s <= RECENT_S:
        return ok("times of folders", f"a tick is {tick_s * 1e3:.0f} ms")
    if tick_s <= COARSE_RECENT_S:
        return note("times of folders", f"a tick is {tick_s:.1f} s: folders that changed are listed every 0.1 s for {COARSE_RECENT_S:.1f} s")  # fmt: skip
    words = f"names did not change a folder's time for {tick_s:.1f} s: they are seen when it is listed again, {RELIST_S:.0f} s later or more"
    return warning("times of folders", words, f"{COARSE_RECENT_S:.1f} s at most", LONG_HANDOVERS)


def granularity_s(folder: Path) -> float:
    """The seconds by which the time of a folder advances while names appear in it, to a millisecond; LONGEST_TICK_S or more
    if it did not."""
    own = folder / "ticks"
    own.mkdir()
    stamps, until = list[int](), time.monotonic() + LONGEST_TICK_S
    for i in itertools.count():
        write_file(own / str(i), b"", durable=False)
        stamp = os.stat(own).st_mtime_ns
        stamps += [stamp] if stamp not in stamps else []
        if len(stamps) == TICKS:
            return min(b - a for a, b in itertools.pairwise(stamps[1:])) / 1e9  # the first tick had begun before
        if time.monotonic() > until:
            break
        time.sleep(min(TICK_PAUSE_S * 1.1**i, LONGEST_TICK_PAUSE_S))
    return float(LONGEST_TICK_S)


def attribute_cache(folder: Path) -> Check:
    """Read from the mount's options how long this machine may miss others' changes; --on-nodes measures it (caches.py)."""
    kind, networked = kind_of(folder)
    if not kind.startswith("nfs"):
        found = "none that is known of" if networked else "of this machine alone"
        return ok("attribute cache", f"{kind}: {found}")
    options = _mount_of(folder)[1]
    if "noac" in options:
        return ok("attribute cache", "noac: none")
    said = (option.partition("=") for option in options)
    seconds = [int(value) for name, _, value in said if name in CACHE_OPTIONS and value.isdigit()]
    longest = max(seconds, default=NFS_CACHE_S)
    return note(
        "attribute cache", f"{kind}, up to {longest} s: what is new is seen a second later at the most after the first time, since "
        "files are opened and folders listed again; lookupcache=pos or noac would cost the server more",
    )  # fmt: skip


def access(root: Path, run: Path | None) -> list[Check]:
    """Check if others can write where a run lies: if so, they can run code in its user's name."""
    found = []
    for folder in filter(None, (root, run)):
        mode = folder.stat().st_mode if folder.is_dir() else 0
        words = f"'{folder}' has mode {mode & 0o777:o}"
        if run is not None and folder == run and mode & 0o022:
            found.append(warning("access", words, "no writing by others", f"chmod -R go-w '{folder}'"))
        elif mode & 0o002 and not mode & 0o1000:
            found.append(warning("access", words, "a root that not all can rename runs in", f"chmod o-w '{folder}'"))
    return found or [ok("access", "nobody else can write the run")]


def kind_of(path: Path) -> tuple[str, bool]:
    """(type of the file system that `path` lies on, True if it looks like one that other machines mount too)."""
    kind = _mount_of(path)[0]
    return kind, kind.removeprefix("fuse.").startswith(NETWORKED)


def _mount_of(path: Path) -> tuple[str, list[str]]:
    """(type, options) of the file system of `path`."""
    real, best, kind, options = path.resolve(), "", "unknown", list[str]()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            left, _, right = line.partition(" - ")
            mount = left.split()[4].replace("\\040", " ")
            if real.is_relative_to(mount) and len(mount) >= len(best):
                best, kind, options = mount, right.split()[0], right.split()[-1].split(",")
    return kind, options
