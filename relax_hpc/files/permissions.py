"""Modes of a run's files: its user's alone, or its group's to read, whatever the umask of the shell."""

from __future__ import annotations

import os
import stat
from pathlib import Path

UMASKS = {"none": 0o077, "read": 0o027}
"""What run.group_access takes from the modes of new files and folders."""


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
