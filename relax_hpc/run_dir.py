"""The run directory: every path of a run, and the only ways in which a file appears in it.

    RUN/
      run.json recipe.toml changes.jsonl    what the run is; recipe.toml is the resolved recipe in force
      snapshot/                             code, versions and git state at submission; snapshot/user/v0/ the user's own files
      model/                                config and tokenizer (weights are versions)
      lease/000002/                         the holder; lease/000002/i000007/ is an incarnation of the trainer
      orders/open/  orders/claimed/WORKER/  requests, moved by rename
      orders/parts/ORDER.p1.h5              what was generated of orders that were given back half-played
      shards/0000/ORDER.h5   evals/         what was generated; complete or absent
      columns/0000/ORDER.NAME.h5            what a scorer's models, or a critic, say of the same tokens
      reference/                            the weights of before step 0, where a scorer holds them or a critic begins as them
      critic/                               of a critic in processes of its own: its attempts' folders, its checkpoints
      scorer/                               of scorers that work as one group: their attempts' folders
      aside/                                shards that lost a race, or were made once more, each with its reason
      ledger/0000/00000123.json             what each step trains on
      weights/v00000012.l0.i3/              a version's tensors; weights/v00000012.l0.json makes it exist
      checkpoints/
      heartbeats/  metrics/  logs/          one writer each
      tracking/                             copies of the metrics for other tools; which messages were sent
      caches/                               compiled kernels, packed once for nodes that have none
      slurm/                                batch scripts as they were sent; slurm/jobs/ID.json, a file for each job;
                                            slurm/places/GROUP-INDEX.json, the agent that a node of a group has now
      evaluated/                            evaluations of its checkpoints by `relax-hpc eval`, each laid out like a run
      rows.json                             how many rows of the sources are left out or cut, where keys say so
      stop  outcome.json                    how it shall end, how it ended

Publishing is always: unique temporary name, write, fsync, link or rename, fsync of the directory. A trainer's temporary
names lie in its incarnation's folder: when a successor renames that folder, whatever the old trainer still wants to
commit fails by path, so a superseded incarnation can commit nothing however late it wakes up.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ORDERS_PER_FOLDER = 64
"""Training steps whose shards share a folder: hundreds of entries a directory, not tens of thousands."""
STEPS_PER_FOLDER = 1000
STALE_TRIES = 10
OPTIMIZERS = {"trainer": "optimizer", "critic": "critic_optimizer"}
"""What roles that learn call theirs in a checkpoint."""
SMALL_BYTES = 1 << 16
_CHECKPOINT = re.compile(r"step-(\d{8,})")


UMASKS = {"none": 0o077, "read": 0o027}
"""What run.group_access takes from the modes of new files and folders."""


class RunError(Exception):
    """Something about a run that a person must know: names the thing, the value, what was expected, the fix."""


class Damaged(RunError):
    """A file is not as it was published: torn, changed since, or another's under its name."""


class DamagedFile(RunError, ValueError):
    """A published JSON file that is none any more."""


_FIXES = {
    errno.EACCES: "this user may not do that there: ask its owner for access, or choose a directory of your own",
    errno.EPERM: "this user may not do that there: ask its owner for access, or choose a directory of your own",
    errno.EROFS: "it lies on a file system that is mounted read-only: choose another directory",
    errno.ENOSPC: "the disk is full: make room, or choose another directory",
    errno.EDQUOT: "the quota is used up: make room, or choose another directory",
}


_HIDDEN = re.compile(r"(?:^|(?<=/))\.(?P<final>[^/]+?)\.(?:[0-9a-f]{32}|[0-9a-f]{8}\.new)(?=/|$)")
"""Names that files and runs have until they are published: nobody has seen them."""
_ERRNO = re.compile(r"\[Errno (\d+)\]")


def explain_os(error: OSError) -> str:
    """An error of the file system in words: which file, what the system says, what a person can do."""
    error = _first_of(error) if isinstance(error, shutil.Error) else error
    where = f"'{_HIDDEN.sub(lambda name: name['final'], str(error.filename))}': " if error.filename is not None else ""
    fix = _FIXES.get(error.errno or 0)
    return f"{where}{error.strerror or error}" + (f"; {fix}" if fix else "")


def _first_of(error: shutil.Error) -> OSError:
    """Of a folder that was copied, which has an entry (source, target, error as text) for each of maybe hundreds of files."""
    source, target, said = error.args[0][0]
    number = _ERRNO.match(said)
    if number is None:
        return OSError(said)
    code = int(number[1])
    # The system names the source, whichever of the two it could not do with.
    return OSError(code, os.strerror(code), target if code in (errno.ENOSPC, errno.EDQUOT) else source)


class RunDir:
    """Paths of one run; knows names, not meanings."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self.doing = self.root / "doing.json"
        self.identity = self.root / "run.json"
        self.rows = self.root / "rows.json"
        self.recipe = self.root / "recipe.toml"
        self.changes = self.root / "changes.jsonl"
        self.snapshot = self.root / "snapshot"
        self.model = self.root / "model"
        self.lease = self.root / "lease"
        self.open_orders = self.root / "orders" / "open"
        self.claimed_orders = self.root / "orders" / "claimed"
        self.parts = self.root / "orders" / "parts"
        self.shards = self.root / "shards"
        self.evals = self.root / "evals"
        self.columns = self.root / "columns"
        self.reference = self.root / "reference"
        self.critic, self.scorer = self.root / "critic", self.root / "scorer"
        self.aside = self.root / "aside"
        self.ledger = self.root / "ledger"
        self.weights = self.root / "weights"
        self.checkpoints = self.root / "checkpoints"
        self.heartbeats = self.root / "heartbeats"
        self.metrics = self.root / "metrics"
        self.logs = self.root / "logs"
        self.caches = self.root / "caches"
        self.tracking = self.root / "tracking"
        self.slurm = self.root / "slurm"
        self.stop = self.root / "stop"
        self.outcome = self.root / "outcome.json"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunDir) and self.root == other.root

    def __hash__(self) -> int:
        return hash(self.root)

    @property
    def exists(self) -> bool:
        return is_there(self.identity)

    def read_id(self) -> str | None:
        """What shards name this run by; None where there is no run.json, or one of an old version."""
        return (read_json(self.identity) or {}).get("id")

    def create(self) -> None:
        """Make the folders (those that are there already stay)."""
        for folder in (
            self.open_orders, self.claimed_orders, self.parts, self.shards, self.evals, self.columns, self.aside, self.ledger, self.lease,
            self.weights, self.checkpoints, self.heartbeats, self.metrics, self.logs,
        ):  # fmt: skip
            folder.mkdir(parents=True, exist_ok=True)

    def shard(self, order_id: str) -> Path:
        """Where an order's shard is, or will be."""
        if order_id.startswith("e"):
            return self.evals / f"{order_id}.h5"
        return self.shards / f"{int(order_id[1:7]) // ORDERS_PER_FOLDER:04d}" / f"{order_id}.h5"

    def column(self, order_id: str, name: str) -> Path:
        """Where a column of an order's shard is, or will be."""
        return self.columns / self.shard(order_id).parent.name / f"{order_id}.{name}.h5"

    def part(self, order_id: str, number: int) -> Path:
        """What an order had when it was given back half-played for the number-th time."""
        return self.parts / f"{order_id}.p{number}.h5"

    def checkpoint_steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        found = [match for name in names(self.checkpoints) if (match := _CHECKPOINT.fullmatch(name))]
        return sorted(int(match[1]) for match in found if is_there(self.checkpoints / match[0] / "DONE"))

    def ledger_entry(self, step: int) -> Path:
        return self.ledger / f"{step // STEPS_PER_FOLDER:04d}" / f"{step:08d}.json"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"


def keep_private(group_access: str) -> None:
    """Have what this process and its children make from now on be their user's alone, or the group's to read, whatever the shell's umask is."""
    os.umask(UMASKS[group_access])


def make_private(folder: Path, group_access: str) -> None:
    """The same for what is there: files that were copied brought their modes with them."""
    taken = UMASKS[group_access]
    for path in (folder, *folder.rglob("*")):
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode) and mode & taken:
            path.chmod(stat.S_IMODE(mode) & ~taken)


@contextlib.contextmanager
def drafted(final: Path) -> Iterator[RunDir]:
    """A new run directory under a hidden name: `final` appears whole when the block ends well, else nothing is left."""
    draft = RunDir(final.with_name(f".{final.name}.{uuid.uuid4().hex[:8]}.new"))
    try:
        draft.create()
        yield draft
        rename_once(draft.root, final, lambda: is_there(final) and not is_there(draft.root))
        sync_folder(final.parent)
    finally:
        shutil.rmtree(draft.root, ignore_errors=True)


def open_existing(path: str | os.PathLike[str]) -> RunDir:
    """The run at `path`. Raises RunError when there is none."""
    run = RunDir(path)
    if not run.exists:
        raise RunError(f"'{path}' is not a run directory: it has no run.json; runs are made by `relax-hpc run RECIPE`")
    return run


def names(folder: Path) -> list[str]:
    """The published names in a folder, those without a leading dot, in order; a missing folder has none."""
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except FileNotFoundError:
        return []


def is_there(path: Path) -> bool:
    """Whether a name exists. Raises OSError where the file system cannot say; Path.exists takes that for a no on some Pythons."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def rename_once(source: Path, target: Path, done: Callable[[], bool]) -> None:
    """Rename; when the file system says that it failed, believe `done()`: the reply to a rename that succeeded can be lost."""
    try:
        os.rename(source, target)
    except OSError:
        if not done():
            raise


def sync_folder(folder: Path) -> None:
    """Make names that appeared in `folder` survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


Data = bytes | Sequence[bytes | memoryview]
"""What a file shall hold: its bytes, or pieces of them in order."""
PIECES_A_WRITE = os.sysconf("SC_IOV_MAX")
"""Some megabytes of a shard's arrays: large writes make large pages in the cache, which readers like."""
_begin_writing_back = ctypes.CDLL(None).sync_file_range
_begin_writing_back.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
SYNC_FILE_RANGE_WRITE = 2


def write_file(path: Path, data: Data, *, durable: bool = True) -> None:
    """Create `path` (which must not exist) with `data`."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _write_all(handle, [data] if isinstance(data, bytes) else data, durable)
        if durable:
            os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(handle: int, pieces: Sequence[bytes | memoryview], durable: bool) -> None:
    """Write the pieces one after the other. `durable`: the disk begins with the first ones while the last are copied."""
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
    """Give a finished file its name if nobody has it yet; True when this call did.

    The temporary name goes either way. A missing temporary raises FileNotFoundError (the caller was fenced). The reply to
    a link that succeeded can be lost, and the call be answered with an error: two names on the temporary file say that it was ours.
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


def publish(final: Path, data: Data, *, via: Path | None = None, durable: bool = True) -> bool:
    """Publish `data` under a name that nobody has; False when somebody has it. `via`: the folder of the temporary name."""
    temporary = (via or final.parent) / f".{final.name}.{uuid.uuid4().hex}"
    written = False
    try:
        write_file(temporary, data, durable=durable)
        written = True
        return link_exclusive(temporary, final, durable=durable)
    except OSError as error:
        # Else the temporary file, or its folder, is gone: the caller was fenced, or swept away. Another may have made the folder by now.
        no_folder = isinstance(error, FileNotFoundError) and (temporary.exists() if written else via is None)
        temporary.unlink(missing_ok=True)
        if not no_folder:
            raise
    final.parent.mkdir(parents=True, exist_ok=True)  # one of dozens is the first in its folder
    if durable:
        sync_folder(final.parent.parent)
    return publish(final, data, via=via, durable=durable)


def replace(final: Path, data: Data, *, via: Path | None = None, durable: bool = True) -> None:
    """Put `data` under a name that may exist; readers see the old or the new content, whole."""

    def is_in_place() -> bool:
        with contextlib.suppress(OSError):
            return final.read_bytes() == (data if isinstance(data, bytes) else b"".join(data))
        return False

    temporary = (via or final.parent) / f".{final.name}.{uuid.uuid4().hex}"
    try:
        write_file(temporary, data, durable=durable)
        rename_once(temporary, final, is_in_place)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(final.parent)


def read_json(path: Path) -> Any:
    """A published JSON file; None when there is none. Raises DamagedFile for one that is no JSON."""
    for _ in range(STALE_TRIES):
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
            if error.errno != errno.ESTALE:  # NFS: replaced between opening and reading
                raise
    raise OSError(errno.ESTALE, "replaced again and again while it was read", str(path))


def _read_small(path: Path) -> bytes:
    """All of a file, mostly in three calls to the file system; path.read_bytes() needs eight."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = [os.read(handle, SMALL_BYTES)]
        while len(parts[-1]) == SMALL_BYTES:
            parts.append(os.read(handle, SMALL_BYTES))
        return b"".join(parts)
    finally:
        os.close(handle)


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
