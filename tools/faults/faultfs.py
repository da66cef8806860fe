"""A file system with faults: build it, mount it, say what goes wrong, read what did.

    with FaultFS(backing, mount) as disk:                   one mount is one host's view of `backing`
        disk.rules(Rule("link", "ledger/.*json$", "kill-after"))
        ...                                                 the first such link ends its caller
        disk.hits()

A call on `path` matches a rule when its regex is found in the path below the mount; of a rename or link, in "source>target".
The first rule that fires decides. `Caches` make a mount a client of a shared file system; two mounts of one folder are two hosts.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from tools.faults.build import Unavailable, compiled, compiler, compiles

HERE = Path(__file__).resolve().parent
SOURCES = [HERE / name for name in ("faultfs.c", "rules.c", "rules.h", "caches.c", "caches.h")]
CONTROL = ".faultfs"
OPTIONS, LIBRARIES = ["-D_FILE_OFFSET_BITS=64"], ["-lfuse3", "-lpthread"]
KIND = "fuse.faultfs"
MOUNT_S = 20.0
"""How long a mount may take to appear, and its server to end."""

Action = Literal[
    "note", "kill-before", "kill-after", "kill-half", "stop-before", "stop-after", "error-before", "error-after", "delay"
]  # fmt: skip
"""What becomes of a call, or of its caller. kill-half: of a write, half is carried out. stop-before: the caller is stopped, and the
call carried out once the rules are replaced; never, if the caller is killed before. Until then other callers on
the same mount may wait for it, as for a folder's lock: those on other mounts do not. error-after: the reply is lost. note: it is logged."""


@dataclass(frozen=True)
class Rule:
    """A call to meet, and what becomes of it."""

    op: str
    """stat, listdir, mkdir, unlink, rmdir, symlink, rename, link, chmod, chown, truncate, utime, create, open, read, write, close,
    fsync, flock, or * for each."""
    path: str
    action: Action
    when: int | float = 1
    """The n-th call that matches, alone; or each with this probability (a float, 1.0 for all)."""
    error: int = errno.EIO
    """After ESTALE the kernel asks once more by itself."""
    delay_ms: int = 0
    process: str = ""
    """A regex to find in the command line of the caller."""

    def line(self) -> str:
        value = self.delay_ms if self.action == "delay" else self.error
        when = f"{self.when:.6f}" if isinstance(self.when, float) else self.when
        return f"{self.op}\t{self.path}\t{self.process}\t{when}\t{self.action}\t{value}"


@dataclass(frozen=True)
class Hit:
    """A call that a rule met."""

    time_s: float
    op: str
    path: str
    target: str
    action: str
    value: int
    answer: int | None
    """The negative errno, or what the call returned; None where the rule hit before it was carried out."""
    pid: int
    process: str


@dataclass(frozen=True)
class Caches:
    """What a client of a shared file system may believe, and for how long, without asking the server."""

    attributes_s: float = 0.0
    entries_s: float = 0.0
    """Of names that were there."""
    negative_s: float = 0.0
    """Of names that were not."""
    listings_s: float = 0.0
    whole_seconds: bool = False
    silly_rename: bool = False
    """A file that is removed while this mount has it open becomes a hidden one."""
    close_to_open: bool = True
    """A file's size and content are asked for when it is opened. Without, they are as old as the attributes."""

    def options(self) -> list[str]:
        numbers = ("attributes_s", "entries_s", "negative_s", "listings_s")
        flags = {"--whole-seconds": self.whole_seconds, "--silly-rename": self.silly_rename}
        flags["--no-close-to-open"] = not self.close_to_open
        made = [f"--{name.replace('_', '-')}={getattr(self, name)}" for name in numbers if getattr(self, name)]
        return [*made, *(flag for flag, wanted in flags.items() if wanted)]


class FaultFS:
    """The folder `backing`, mounted at `mount`, which is made; the log of hits lies beside it."""

    def __init__(self, backing: Path, mount: Path, caches: Caches = Caches(), seed: int = 0) -> None:
        self.backing, self.mount, self.log = backing, mount, mount.with_name(f"{mount.name}.hits")
        self.caches, self.seed = caches, seed
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> FaultFS:
        unmount_stale()
        for folder in (self.backing, self.mount):
            folder.mkdir(parents=True, exist_ok=True)
        words = [str(build()), str(self.mount), "-f", f"--backing={self.backing}", f"--log={self.log}"]
        errors = self.log.with_suffix(".stderr")
        with errors.open("wb") as stderr:
            self._server = subprocess.Popen(
                [*words, f"--seed={self.seed}", *self.caches.options()], stdin=subprocess.DEVNULL, stderr=stderr
            )
        deadline = time.monotonic() + MOUNT_S
        while not os.path.ismount(self.mount):
            if self._server.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise Unavailable(f"the fault file system cannot be mounted: {errors.read_text().strip()}")
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmount, also where something still has a file open."""
        if self._server is None:
            return
        with contextlib.suppress(OSError):
            self.rules()  # who is held in a call goes on
        _unmount(self.mount)
        try:
            self._server.wait(MOUNT_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._server = None

    def rules(self, *rules: Rule) -> None:
        """Replace all rules. When this returns, they are in force. Raises OSError (EINVAL) for one that is not understood."""
        handle = os.open(self.mount / CONTROL, os.O_WRONLY)
        try:
            os.write(handle, "\n".join(rule.line() for rule in rules).encode() or b"\n")
        finally:
            os.close(handle)

    def counts(self) -> list[tuple[int, int]]:
        """Return for each rule how many calls matched, and how many of them it met."""
        lines = (self.mount / CONTROL).read_text().splitlines()
        return [(int(seen), int(hits)) for seen, hits in (line.split("\t") for line in lines)]

    def hits(self, start: int = 0) -> list[Hit]:
        """Read the log of hits, from the byte `start` on."""
        with self.log.open("rb") as log:
            log.seek(start)
            text = log.read().decode(errors="replace")
        return [_hit(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _hit(line: str) -> Hit:
    when, op, path, target, action, value, answer, pid, process = line.rstrip("\n").split("\t", 8)
    return Hit(
        float(when), op, path, target, action, int(value), None if answer == "-" else int(answer), int(pid), process
    )


def build() -> Path:
    """Compile the file system, once for each state of its source; return the program. Raises Unavailable."""
    if lacks := _missing():
        raise Unavailable(f"the fault file system needs {', '.join(lacks)}")
    return compiled(SOURCES, *OPTIONS, libraries=LIBRARIES)


@functools.cache
def why_not() -> str:
    """Explain why nothing can be mounted here, after a trial; empty where it can. Tests skip with this as their reason."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with FaultFS(Path(folder) / "backing", Path(folder) / "mount"):
                return ""
        except Unavailable as error:
            return str(error)


def unmount_stale() -> None:
    """Unmount what servers that are gone left behind: mounts of this kind alone, each of which names its server."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, about = line.partition(" - ")
        kind, source, *_ = about.split()
        if kind == KIND and not _serves(source.removeprefix("faultfs:")):
            _unmount(Path(place.split()[4].encode().decode("unicode_escape")))


def _serves(pid: str) -> bool:
    try:
        return Path("/proc", pid, "comm").read_text().startswith("faultfs")
    except OSError:
        return False


def _unmount(mount: Path) -> None:
    subprocess.run(["fusermount3", "-u", "-z", str(mount)], capture_output=True, check=False)


@functools.cache
def _missing() -> tuple[str, ...]:
    """Name what has to be installed or given first."""
    lacks = [] if os.access("/dev/fuse", os.R_OK | os.W_OK) else ["/dev/fuse, readable and writable"]
    if shutil.which("fusermount3") is None:
        lacks.append("fusermount3 (Debian: fuse3)")
    if compiler() is None:
        return (*lacks, "a C compiler (Debian: gcc libc6-dev)", "libfuse3 (Debian: libfuse3-dev)")
    trial = "#define FUSE_USE_VERSION 31\n#include <fuse3/fuse.h>\nint main(void) { return fuse_version(); }\n"
    if not compiles(trial, *OPTIONS, libraries=LIBRARIES):
        lacks.append("libfuse3's headers (Debian: libfuse3-dev libc6-dev)")
    return tuple(lacks)
