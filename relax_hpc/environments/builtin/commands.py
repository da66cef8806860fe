"""Commands of the model in a folder of their own: with a time limit, and nothing of theirs left running afterwards.

They have the rights of the worker's user, its network and its files: whoever needs more runs the worker in a container.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from relax_hpc.environments.base import ToolError

PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ")
"""Variables of the worker that a command gets; others may hold keys."""


def run(command: Sequence[str], folder: Path, limit_s: float, longest: int) -> str:
    """Run a command there; returns what it said, output and errors together, at most `longest` characters of it (the
    middle is left out), with its exit status unless that is 0. Raises ToolError where it takes longer than `limit_s`."""
    about = {name: os.environ[name] for name in PASSED_ON if name in os.environ} | {
        "HOME": str(folder),
        "TMPDIR": str(folder),
    }
    said = folder.parent / f"{folder.name}.out"
    with said.open("w+b") as out:
        child = subprocess.Popen(
            command, cwd=folder, env=about, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            status = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it left in the background ends too
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        text = _read(out.fileno(), longest)
    if status is None:
        raise ToolError(f"took longer than {limit_s:g} s; said until then: {text}")
    return text if status == 0 else f"{text}\nexit status {status}".lstrip()


def _read(file: int, longest: int) -> str:
    """Read both ends of a file, however long it is."""
    size, each = os.fstat(file).st_size, 2 * longest  # a character may have several bytes
    if size <= 2 * each:
        text = os.pread(file, size, 0).decode(errors="replace").rstrip("\n")
        return text if len(text) <= longest else f"{text[: longest // 2]}\n…\n{text[len(text) - longest // 2 :]}"
    ends = (os.pread(file, each, at).decode(errors="replace") for at in (0, size - each))
    first, last = ends
    return f"{first[: longest // 2]}\n…\n{last[len(last) - longest // 2 :]}"
