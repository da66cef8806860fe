"""The commands of each kind of sandbox, as plain lists; nothing is started here.

A place (what may be read and written, which socket) + the recipe's table ─► the kind's own command, around that of the user
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import relax_hpc
from relax_hpc.recipe.sandbox import Sandbox

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt")
"""Folders of the system, which every sandbox may read."""
LOCAL, ANY = (socket.AF_UNIX,), (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""Address families of sockets."""
_GB, _MB = 1 << 30, 1 << 20
COUNTS_PROCESSES_OF_A_NAMESPACE = (5, 14)
"""Linux from here on counts RLIMIT_NPROC in each user namespace; before, all of the user's processes counted."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a sandbox has of this machine's files."""

    folder: Path
    """Where the command begins; it may write here."""
    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()
    socket: Path | None = None
    """A Unix socket that it may connect to."""
    variables: tuple[str, ...] = ()
    """Names of variables that the command knows; only enroot asks for them."""


def python_folders() -> tuple[Path, ...]:
    """Folders that a Python like this one needs, with relax_hpc itself, and no more of what lies beside them."""
    names = (sys.prefix, sys.base_prefix, str(Path(relax_hpc.__file__).parent))
    return tuple(dict.fromkeys(Path(name) for name in names))


def bwrap(sandbox: Sandbox, place: Place, command: Sequence[str]) -> list[str]:
    """Namespaces of its own, made by bubblewrap: all that is not named here is not there."""
    size = ["--size", str(int(sandbox.disk_gb * _GB))]
    made = ["bwrap", "--die-with-parent", "--new-session", "--unshare-user", "--disable-userns", "--unshare-pid"]
    made += ["--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--cap-drop", "ALL", "--hostname", "sandbox"]
    made += [] if sandbox.network else ["--unshare-net"]
    made += ["--proc", "/proc", "--dev", "/dev", *size, "--tmpfs", "/dev/shm", *size, "--tmpfs", "/tmp"]
    binds = [("--ro-bind-try", Path(path)) for path in SYSTEM] + [("--ro-bind", path) for path in place.readable]
    if sandbox.network:  # /etc/resolv.conf often leads out of /etc
        binds.append(("--ro-bind-try", Path(os.path.realpath("/etc/resolv.conf"))))
    binds += [("--bind", path) for path in (place.folder, *place.writable, *([place.socket] if place.socket else []))]
    for how, path in sorted(binds, key=lambda bind: len(bind[1].parts)):  # the deeper ones lie over the others
        made += [how, str(path), str(path)]
    made += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(place.folder), "--"]
    return [*made, *_few_processes(sandbox), *command]


def _few_processes(sandbox: Sandbox) -> list[str]:
    """A limit that begins inside, where only the sandbox's own processes count."""
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if release < COUNTS_PROCESSES_OF_A_NAMESPACE or shutil.which("prlimit") is None:
        return []
    return ["prlimit", f"--nproc={sandbox.processes}:{sandbox.processes}", "--"]


def apptainer(sandbox: Sandbox, place: Place, command: Sequence[str]) -> list[str]:
    """Run in an image: own /tmp, home, processes and environment."""
    made = ["apptainer", "exec", "--containall", "--no-home", "--no-privs", "--pwd", str(place.folder)]
    made += [] if sandbox.network else ["--net", "--network", "none"]
    for path in place.readable:
        made += ["--bind", f"{path}:{path}:ro"]
    for path in (place.folder, *place.writable, *([place.socket] if place.socket else [])):
        made += ["--bind", f"{path}:{path}"]
    return [*made, str(sandbox.image), *command]


def enroot(sandbox: Sandbox, place: Place, command: Sequence[str]) -> list[str]:
    """Run in an image, which is mounted read-only; processes and network are the node's."""
    made = ["enroot", "start"]
    for path in place.readable:
        made += ["--mount", f"{path}:{path}:x-create=auto,rbind,ro"]
    for path in (place.folder, *place.writable, *([place.socket] if place.socket else [])):
        made += ["--mount", f"{path}:{path}:x-create=auto,rbind,rw"]
    for name in place.variables:
        made += ["--env", name]
    inside = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(place.folder)]
    return [*made, str(sandbox.image), *inside, *command]
