"""Commands in sandboxes: `wrap` makes the command, `environment` what it knows, `start` and `end` do it with processes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_hpc.files.errors import RunError
from relax_hpc.parent import start_child
from relax_hpc.recipe.sandbox import KINDS, Kind, Sandbox
from relax_hpc.sandbox import kinds, warden
from relax_hpc.sandbox.confine import LANDLOCK_NEEDED, NUMBERS, landlock_version
from relax_hpc.sandbox.kinds import Place

GRACE_S = 5.0
"""Seconds between the request to end and the kill."""
BWRAP_NEEDED = (0, 8, 0)
"""The first bubblewrap that limits a tmpfs and forbids further user namespaces."""
_PROBE_S = 20.0
_PASSED_ON = re.compile(r"LANG|LC_\w+|TZ|TERM|(OMP|MKL|OPENBLAS)_NUM_THREADS|PYTHON(UNBUFFERED|DONTWRITEBYTECODE)")
"""Variables of ours that a sandbox knows too; any other may be a key."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_COMMANDS = {"bwrap": kinds.bwrap, "apptainer": kinds.apptainer, "enroot": kinds.enroot}


def wrap(
    sandbox: Sandbox,
    command: Sequence[str],
    *,
    folder: Path,
    readable: Sequence[Path] = (),
    writable: Sequence[Path] = (),
    socket: Path | None = None,
    variables: Sequence[str] = (),
    grace_s: float = GRACE_S,
) -> list[str]:
    """Make the command that runs `command` in a sandbox. Raises RunError for a kind that this node does not have, or a
    folder that is not there.

    It begins in `folder`, which it may write, as `writable`; it may read `readable`, and connect to `socket`: these are
    absolute paths, the same inside and outside. Give it `environment` as its environment; `variables`: the names of what
    you add there, which enroot asks for. TERM ends all of it, with
    `grace_s` seconds for those who listen. It ends with the process that starts it, and leaves no process behind.
    """
    if sandbox.kind == "none":
        return list(command)
    require(sandbox)
    place = Place(
        _there(folder),
        tuple(map(_there, dict.fromkeys((*kinds.python_folders(), *sandbox.readable, *readable)))),
        tuple(map(_there, dict.fromkeys((*sandbox.writable, *writable)))),
        socket and _there(socket),
        tuple(variables),
    )
    around = _COMMANDS.get(sandbox.kind)
    inner = around(sandbox, place, command) if around else list(command)
    return [sys.executable, "-I", "-S", warden.__file__, json.dumps(_order(sandbox, place, grace_s)), *inner]


def _order(sandbox: Sandbox, place: Place, grace_s: float) -> dict[str, Any]:
    """Write down for the warden what the sandbox may do and use."""
    memory, disk = int(sandbox.memory_gb * (1 << 30)), int(sandbox.disk_gb * (1 << 30))
    limits = {"CORE": 0, "DATA": memory, "FSIZE": disk, "NOFILE": sandbox.files}
    if sandbox.cpu_s is not None:
        limits["CPU"] = sandbox.cpu_s
    most = {"time_s": sandbox.time_limit_s, "processes": sandbox.processes}
    order: dict[str, Any] = {
        "folder": str(place.folder),
        "readable": [*kinds.SYSTEM, *map(str, place.readable)],
        "writable": [str(path) for path in (place.folder, *place.writable)],
        "limits": limits,
        "most": most | {"memory_gb": sandbox.memory_gb, "disk_gb": sandbox.disk_gb},
        "grace_s": grace_s,
        "own": 2 if sandbox.kind == "bwrap" else 0,
    }
    if sandbox.kind == "bwrap":
        order["filter"] = kinds.ANY  # the namespace has a network of its own, which leads nowhere
    if sandbox.kind == "landlock":
        families = kinds.ANY if sandbox.network else kinds.LOCAL if place.socket else ()
        order["landlock"] = {"network": sandbox.network, "families": families}
    return order


def environment(sandbox: Sandbox, folder: Path, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Make the environment of a sandbox's command: the little that it may know of ours, and `given`."""
    if sandbox.kind == "none":
        return dict(os.environ) | dict(given or {})
    mine = {name: value for name, value in os.environ.items() if _PASSED_ON.fullmatch(name)}
    tmp = os.environ.get("TMPDIR", "/tmp") if sandbox.kind == "landlock" else "/tmp"  # where the warden makes one
    mine["PATH"] = os.pathsep.join((str(Path(sys.prefix, "bin")), _PATH))
    inside = mine | {"HOME": str(folder), "TMPDIR": tmp} | dict(given or {})
    if sandbox.kind == "apptainer":  # it passes on what has its prefix
        own = {f"APPTAINERENV_{name}": value for name, value in inside.items() if name not in ("PATH", "HOME")}
        inside = {"PATH": os.environ.get("PATH", _PATH)} | own
    return inside


def start(
    sandbox: Sandbox, command: Sequence[str], *, folder: Path, given: Mapping[str, str] | None = None,
    readable: Sequence[Path] = (), writable: Sequence[Path] = (), socket: Path | None = None, grace_s: float = GRACE_S,
    **options: Any,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """Start a command in a sandbox, in a session of its own; `options` are those of subprocess.Popen."""
    wrapped = wrap(
        sandbox, command, folder=folder, readable=readable, writable=writable, socket=socket, variables=list(given or ()),
        grace_s=grace_s,
    )  # fmt: skip
    return start_child(wrapped, env=environment(sandbox, folder, given), cwd=folder, start_new_session=True, **options)


def end(process: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> int:
    """End a command that `start` started, with all that it started: TERM, then KILL; return its exit status."""
    for number, wait_s in ((signal.SIGTERM, grace_s + 1), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)  # alone in it where there is a warden, which has the others ended
            return process.wait(wait_s)
    return process.wait()


def require(sandbox: Sandbox) -> None:
    """Raise RunError where this node does not have this kind; it names those that it has."""
    if reason := missing(sandbox.kind):
        have = [kind for kind in KINDS if not missing(kind)]
        raise RunError(
            f"sandbox.kind = '{sandbox.kind}': {os.uname().nodename} does not have it: {reason}; it has {', '.join(have)}"
        )


@functools.cache
def missing(kind: Kind) -> str:
    """The reason why this node does not have a kind of sandbox, found by trying; empty where it has it."""
    if kind == "none":
        return ""
    if kind in ("bwrap", "landlock") and platform.machine() not in NUMBERS:
        return f"the numbers of system calls are known of {' and '.join(NUMBERS)} only, not of {platform.machine()}"
    if kind == "landlock":
        found = landlock_version()
        return "" if found >= LANDLOCK_NEEDED else (
            f"the kernel has version {found} of Landlock, needed is {LANDLOCK_NEEDED} (Linux 6.12)"
        )  # fmt: skip
    if shutil.which(kind) is None:
        return f"there is no program '{kind}' in PATH"
    return _bwrap_fails() if kind == "bwrap" else ""


def _bwrap_fails() -> str:
    """Try bubblewrap: user namespaces may be forbidden."""
    version = subprocess.run(
        ["bwrap", "--version"], capture_output=True, text=True, check=False, timeout=_PROBE_S
    ).stdout
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    needed = ".".join(map(str, BWRAP_NEEDED))
    if numbers < BWRAP_NEEDED:
        return f"{version.strip() or 'its version is not known'}, needed is {needed}"
    command = kinds.bwrap(Sandbox(kind="bwrap"), Place(Path(os.sep, "usr")), ["true"])
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PROBE_S)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"it ended with {done.returncode}")


def _there(path: Path) -> Path:
    if not path.is_absolute() or not path.exists():
        raise RunError(f"sandbox: no '{path}' on this node; expected an absolute path that is there")
    return path
