"""Modes of a run's files: its user's alone, or its group's to read, whatever the umask of the shell."""

from __future__ import annotations

import os
import stat
from pathlib import Path

UMASKS = {"none": 0o077, "read": 0o027}
"""run.group_access -> the umask, which takes these modes from new files and folders."""


def keep_private(group_access: str) -> None:
    """Set the umask of this process and its children, so that new files are the user's alone, or the group's to read."""
    os.umask(UMASKS[group_access])


def make_private(folder: Path, group_access: str) -> None:
    """Take from the files in `folder` the modes that `group_access` does not allow: copied ones bring theirs along."""
    taken = UMASKS[group_access]
    for path in (folder, *folder.rglob("*")):
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode) and mode & taken:
            path.chmod(stat.S_IMODE(mode) & ~taken)
