"""Commands without what root may: permissions count for them, whoever runs the tests."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.runs import command

PR_CAPBSET_DROP = 24
BEYOND_PERMISSIONS = (1, 2, 3)
"""CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER: with these root reads and writes whatever it likes."""
NOBODY = 65534


def relax_hpc(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as somebody to whom permissions apply."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, check=False, preexec_fn=drop_privileges, **options
    )


def give_away(path: Path, *, readable: bool) -> None:
    """Have `path`, a file or a folder with all below it, be somebody else's; `readable`: but not to be written."""
    for each in [*path.rglob("*"), path] if path.is_dir() else [path]:
        folder = each.is_dir()
        if os.geteuid() == 0:
            os.chown(each, NOBODY, NOBODY)
            each.chmod((0o755 if folder else 0o644) if readable else (0o700 if folder else 0o600))
        else:  # our own, then, without our permissions
            each.chmod((0o555 if folder else 0o444) if readable else 0)


def drop_privileges() -> None:
    """In a child that is about to exec: what the bounding set lacks is lost then. Does nothing where we are not root."""
    libc = ctypes.CDLL(None)
    for number in BEYOND_PERMISSIONS:
        libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
