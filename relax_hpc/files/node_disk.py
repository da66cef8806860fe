"""The node's own disk: one folder of ours there, safe from other users, filled by one process while the others wait.
It is the first thing that runs on a node, from a shared file system: it imports the standard library only."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir


def node_disk() -> Path:
    """Return our folder, made if need be: below SLURM_TMPDIR (some sites empty it after the job), TMPDIR or /tmp. Code
    runs from there, so it raises RunError if somebody else made the folder, or may write into it."""
    folder = Path(os.environ.get("SLURM_TMPDIR") or tempfile.gettempdir()) / f"relax_hpc-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RunError(
            f"'{folder}' on {os.uname().nodename} is not a folder that you alone can write (owner {about.st_uid}, mode "
            f"{stat.filemode(about.st_mode)}): code would run from it; remove it, or set TMPDIR in slurm.environment"
        )
    return folder


def lock_file(run: RunDir, what: str) -> Path:
    """The lock file `what` of the run on this node's disk: locks of shared file systems may be off, or outlive a node."""
    return node_disk() / f"{what}-{read_json(run.identity)['id']}-{os.uname().nodename}.lock"


def fill_once(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fill `folder` with `fill`, whole or not at all, unless a process of this node has done so; the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return
        for killed in folder.parent.glob(f".{folder.name}.new-*"):
            shutil.rmtree(killed, ignore_errors=True)
        draft = folder.with_name(f".{folder.name}.new-{uuid.uuid4().hex}")
        draft.mkdir()
        try:
            fill(draft)
            os.rename(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
