"""Tries what a run needs of its file system, in a temporary folder: names appear whole, once, and for all to see."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import link_exclusive, sync_folder, write_file
from relax_hpc.files.watch import COARSE_RECENT_S
from relax_hpc.planning.doctor.checks import Check, failed, note, ok, warning

SKEW_WARNING_S, SKEW_FAILED_S = 2.0, 20.0
"""Clock differences of note: records of several machines are read side by side, though nothing relies on clocks."""
SLOW_FSYNC_S = 0.2
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
def scratch(root: Path) -> Iterator[Path]:
    """Make a folder in `root` (or the nearest one above that exists); it is removed at the end. Raises RunError."""
    near = existing_part(root)
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=near))
    except OSError as error:
        raise RunError(
            f"nothing can be written in '{near}' ({error.strerror}), where run.root = '{root}' shall be: give yourself "
            "write permission, or choose another with --set run.root=DIR"
        ) from None
    try:
        yield folder
    finally:
        for _ in range(5):  # a process on another node may be writing its last file
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                break
            time.sleep(0.2)


def semantics(folder: Path, *, trainer_processes: int) -> list[Check]:
    """Try each guarantee that runs rely on, in `folder`, which must be empty."""
    tried: tuple[tuple[str, Callable[[Path], None]], ...] = (
        ("exclusive link", _exclusive_link),
        ("hard links across folders", _link_across),
        ("O_EXCL", _exclusive_create),
        ("rename over a file", _rename_over_file),
        ("rename of a folder", _rename_folder),
        ("modification times", _touch),
    )
    broken: list[Check] = []
    for what, attempt in tried:
        own = folder / what.replace(" ", "-")
        own.mkdir()
        try:
            attempt(own)
        except (OSError, _Wrong) as error:
            broken.append(failed(what, str(error), "POSIX semantics", "put run.root on another file system"))
    semantic = broken or [ok("semantics", ", ".join(what for what, _ in tried))]
    locks = _locks(folder, trainer_processes)
    return [*semantic, _fsync(folder), locks, skew(folder), times(folder), attribute_cache(folder)]


class _Wrong(Exception):
    """Raised when the file system did something else than it should."""


def _exclusive_link(folder: Path) -> None:
    for name in ("a", "b"):
        write_file(folder / name, name.encode(), durable=False)
    first = link_exclusive(folder / "a", folder / "final", durable=False)
    second = link_exclusive(folder / "b", folder / "final", durable=False)
    if (first, second) != (True, False) or (folder / "final").read_bytes() != b"a":
        raise _Wrong(f"two links to one name gave {first} and {second}, and the name holds another file's bytes")


def _link_across(folder: Path) -> None:
    (folder / "x").mkdir()
    (folder / "y").mkdir()
    write_file(folder / "x" / "a", b"a", durable=False)
    os.link(folder / "x" / "a", folder / "y" / "a")
    if (folder / "y" / "a").stat().st_nlink != 2:
        raise _Wrong(f"a file with two names says that it has {(folder / 'y' / 'a').stat().st_nlink}")


def _exclusive_create(folder: Path) -> None:
    write_file(folder / "a", b"a", durable=False)
    with contextlib.suppress(FileExistsError):
        write_file(folder / "a", b"b", durable=False)
        raise _Wrong("a file that is there was created again")


def _rename_over_file(folder: Path) -> None:
    for name in ("a", "b"):
        write_file(folder / name, name.encode(), durable=False)
    os.rename(folder / "a", folder / "b")
    if (folder / "b").read_bytes() != b"a" or (folder / "a").exists():
        raise _Wrong("after a rename over a file the old name, or the old bytes, are still there")


def _rename_folder(folder: Path) -> None:
    """Try the rename of a folder, which is how a superseded trainer is fenced."""
    (folder / "a").mkdir()
    (folder / "full").mkdir()
    write_file(folder / "full" / "x", b"", durable=False)
    try:
        os.rename(folder / "a", folder / "full")
        raise _Wrong("a folder was renamed over one that is not empty")
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    os.rename(folder / "a", folder / "over")
    try:
        write_file(folder / "a" / "x", b"", durable=False)
        raise _Wrong("a file was created in a folder by the name that it had before a rename")
    except FileNotFoundError:
        pass


def _touch(folder: Path) -> None:
    path = folder / "a"
    write_file(path, b"", durable=False)
    os.utime(path, (1e9, 1e9))
    old = path.stat().st_mtime
    os.utime(path)
    if not old == 1e9 < path.stat().st_mtime:
        raise _Wrong(
            f"a file touched now shows the time {path.stat().st_mtime:.0f}, before it {old:.0f} and not 1000000000"
        )


def _fsync(folder: Path) -> Check:
    began = time.monotonic()
    try:
        write_file(folder / "synced", b"x" * 4096)
        sync_folder(folder)
    except OSError as error:
        return failed("fsync", str(error), "fsync of files and folders", "put run.root on another file system")
    took = time.monotonic() - began
    words = f"a file and its folder in {took * 1e3:.1f} ms"
    if took > SLOW_FSYNC_S:
        return warning("fsync", words, f"{SLOW_FSYNC_S * 1e3:.0f} ms at most", "publishing will be slow: fewer, larger requests (rollout.groups_per_request), or another file system")  # fmt: skip
    return ok("fsync", words)


def _locks(folder: Path, trainer_processes: int) -> Check:
    """Try fcntl locks between two processes: torch's FileStore, by which trainer processes find each other, takes them."""
    with (folder / "lock").open("wb") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return _no_locks(f"refused: {error}", trainer_processes)
        child = multiprocessing.get_context("fork").Process(target=_take_lock, args=(str(folder / "lock"),))
        child.start()
        child.join()
    if child.exitcode != 0:
        return _no_locks("two processes held the same lock", trainer_processes)
    return ok("advisory locks", "fcntl locks work (HDF5's are off)")


def _take_lock(path: str) -> None:
    with open(path, "r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os._exit(0)
    os._exit(1)


def _no_locks(found: str, trainer_processes: int) -> Check:
    if trainer_processes == 1:
        return note("advisory locks", f"{found}; not needed: HDF5's are off, and trainer.processes = 1")
    expected = f"fcntl locks, by which trainer.processes = {trainer_processes} find each other"
    fix = "mount with locks (Lustre: -o flock; NFS: without nolock), or use trainer.processes = 1"
    return failed("advisory locks", found, expected, fix)


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
    """Measure how fine file times are: whole seconds hide a change from a reader that looked within the same second."""
    stamps = []
    for name in ("one", "two", "three"):
        write_file(folder / name, b"", durable=False)
        stamps.append((folder / name).stat().st_mtime_ns)
        time.sleep(0.01)
    if any(stamp % 10**9 for stamp in stamps):
        return ok("file times", "finer than a second")
    return note("file times", f"whole seconds: folders that changed are listed every 0.1 s for {COARSE_RECENT_S:.1f} s")


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
