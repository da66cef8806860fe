"""Linux namespaces, each set held alive by an init process of its own.

    create(None)          the cluster: an init that does nothing but reap; everything else is below it
    create(inside=init)   a node: own mounts, network, host name and PIDs, below the cluster's init
    enter(init)           this process (and the children that it forks) moves in
    SIGKILL to an init    the kernel kills all that runs in its PID namespace, and frees network and mounts

unshare(1) and nsenter(1) are not enough: for a plain user the latter drops the capabilities that `ip` needs, and os.setns
came with Python 3.12.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
from collections.abc import Callable

CLONE = {"user": 0x10000000, "mnt": 0x00020000, "net": 0x40000000, "uts": 0x04000000, "pid": 0x20000000}
"""Flag of each kind, in the order of entering: the user namespace first, it gives the right to enter the others."""

MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
CAPABILITY_VERSION_3 = 0x20080522
PR_SET_PDEATHSIG = 1
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 47, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]


class NamespaceError(Exception):
    """Namespaces cannot be made or entered here; the text says at which step."""


def create(
    setup: Callable[[], None], on_start: Callable[[int], None], inside: int | None = None, user: bool = False
) -> None:
    """Make namespaces with an init that has run `setup`; `on_start` gets its pid and must write it down.

    The init lives on only after `on_start` has returned: a caller that is killed in between leaves no process behind.
    `user`: in a user namespace of its own, which is what a plain user needs.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    forked = os.fork()
    if forked == 0:
        _child(ours, theirs, setup, inside, user)
    theirs.close()
    os.waitpid(forked, 0)
    with ours:
        text, ancillary, _, _ = ours.recvmsg(4096, socket.CMSG_SPACE(12))
        if text != b"ready":
            raise NamespaceError(text.decode() or "the init process died while it was set up")
        # The kernel translates the sender's pid into our PID namespace; no other way tells it without a race.
        on_start(int(struct.unpack("iII", ancillary[0][2])[0]))
        ours.send(b"go")


def _child(
    ours: socket.socket, theirs: socket.socket, setup: Callable[[], None], inside: int | None, user: bool
) -> None:
    """Fork twice, because a PID namespace holds only for children: in again after entering, once more after unsharing."""
    try:
        ours.close()
        if inside is not None:
            enter(inside)
            if os.fork():
                os._exit(0)
        uid, gid = os.geteuid(), os.getegid()
        kinds = [kind for kind in CLONE if user or kind != "user"]
        _check(_libc.unshare(sum(CLONE[kind] for kind in kinds)), "unshare")
        if user:
            _write("/proc/self/setgroups", "deny")  # the kernel's condition for the next line
            _write("/proc/self/gid_map", f"{gid} {gid} 1")
            _write("/proc/self/uid_map", f"{uid} {uid} 1")
        if os.fork():
            os._exit(0)
        os.setsid()
        mount("none", "/", flags=MS_REC | MS_PRIVATE)
        mount("proc", "/proc", "proc")
        setup()
        theirs.send(b"ready")
        if theirs.recv(2) == b"go":
            null = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(null, stream)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # survives exec: the kernel reaps orphans by itself
            os.execvp("sleep", ["sleep", "infinity"])
    except BaseException as error:  # a forked child must not run its parent's code, whatever happens
        theirs.send(str(error).encode()[:4000] or b"failed")
    finally:
        os._exit(1)


def enter(pid: int, *, pids: bool = True, capabilities: bool = False) -> None:
    """Move into the namespaces of `pid`; into its PID namespace come only the children forked from now on.

    `pids`: False for a command that starts threads itself, which it cannot while its children belong elsewhere.
    `capabilities`: a plain user keeps the rights it has in there over an exec, as `ip` needs.
    """
    own = os.stat("/proc/self/ns/user").st_ino
    fds = {}
    for kind in CLONE:
        if kind == "pid" and not pids:
            continue
        fd = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        if kind != "user" or os.fstat(fd).st_ino != own:  # entering the own user namespace again is refused
            fds[kind] = fd
    for kind, fd in fds.items():
        _check(_libc.setns(fd, CLONE[kind]), f"setns {kind}")
        os.close(fd)
    if capabilities and os.geteuid() != 0:
        _make_capabilities_ambient()


def mount(source: str, target: str, kind: str = "none", flags: int = 0, options: str = "") -> None:
    done = _libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode() or None)
    _check(done, f"mount {target}")


def die_with_parent() -> None:
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def _make_capabilities_ambient() -> None:
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    _check(_libc.capget(header, data), "capget")
    effective, permitted, _, effective_high, permitted_high, _ = struct.unpack("6I", data.raw)
    wanted = struct.pack("6I", effective, permitted, permitted, effective_high, permitted_high, permitted_high)
    _check(_libc.capset(header, wanted), "capset")
    for capability in range(64):
        if (permitted | permitted_high << 32) >> capability & 1:
            _check(_libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0), "prctl")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _check(result: int, what: str) -> None:
    if result != 0:
        raise NamespaceError(f"{what}: {os.strerror(ctypes.get_errno())}")
