"""Progress of a run that is still being made: its maker writes it into the hidden folder, and others read it there.

say(draft, "reading the prompts") ──► ROOT/.NAME.….new/doing.json ──► being_made(ROOT/NAME): `run`'s own lines, `watch`, `status`
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import psutil

from relax_hpc.files.publish import read_json, replace, to_json
from relax_hpc.files.run_dir import RunDir


def say(draft: RunDir, doing: str) -> None:
    """Write down what is done next, for people only: a full disk is ignored here, the next write of the work reports
    it."""
    about = {"doing": doing, "pid": os.getpid(), "host": socket.gethostname()}
    with contextlib.suppress(OSError):
        replace(draft.doing, to_json(about), durable=False)


def read(draft: RunDir) -> str | None:
    """Return what was written last; None before the first time, and if the maker died."""
    try:
        about = read_json(draft.doing)
    except OSError:  # somebody else's
        return None
    if about is None or (about["host"] == socket.gethostname() and not psutil.pid_exists(about["pid"])):
        return None
    return str(about["doing"])


def being_made(final: Path) -> str | None:
    """Return what the command that prepares the run of this name is doing; None if there is no such command, or it
    died."""
    drafts = map(RunDir, final.parent.glob(f".{final.name}.*.new"))
    return next(filter(None, map(read, drafts)), None)
