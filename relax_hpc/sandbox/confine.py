"""What the kernel itself holds back from a process and all that it starts: Landlock's rules, a filter of system calls.

Neither needs privileges or namespaces, and neither can be taken off again. The standard library alone: see warden.py.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable, Sequence

LANDLOCK_NEEDED = 6
"""Version of Landlock's interface that has scopes of signals and abstract sockets (Linux 6.12)."""
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
"""Flag of landlock_create_ruleset that asks for the version."""
_PATH_BENEATH = 1
_ALL_FILES = (1 << 16) - 1
"""Every right to files that version 6 knows."""
_READ_FILE = 1 << 0 | 1 << 2
"""Execute and read a file."""
_READ = _READ_FILE | 1 << 3
"""The same, and list folders."""
_WRITE_FILE = _READ_FILE | 1 << 1 | 1 << 14
"""Write and truncate a file too."""
_TCP = 0b11
"""Bind and connect."""
_SCOPES = 0b11
"""Abstract Unix sockets and signals."""
_PR_SET_NO_NEW_PRIVS, _PR_CAPBSET_DROP, _PR_SET_SECCOMP = 38, 24, 22
_FILTER_MODE = 2
_libc = ctypes.CDLL(None, use_errno=True)


def landlock_version() -> int:
    """The version of Landlock's interface that this kernel has; 0 for none."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)))


def landlock(readable: Sequence[str], writable: Sequence[str], network: bool) -> None:
    """Leave this process, for good, only these paths, and of the network's TCP what `network` says. Capabilities go
    too, with the next exec."""
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    asked = struct.pack("QQQ", _ALL_FILES, 0 if network else _TCP, _SCOPES)
    rules = _checked(_libc.syscall(_CREATE_RULESET, asked, ctypes.c_size_t(len(asked)), 0))
    for paths, for_files, for_folders in ((readable, _READ_FILE, _READ), (writable, _WRITE_FILE, _ALL_FILES)):
        for path in paths:
            _allow(rules, path, for_files, for_folders)
    _checked(_libc.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _allow(rules: int, path: str, for_files: int, for_folders: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:  # not every system has every folder
        return
    rights = for_folders if os.path.isdir(path) else for_files
    _checked(_libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", rights, place), 0))
    os.close(place)


def _checked(answer: int) -> int:
    if answer < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return answer


NUMBERS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (0xC000003E, {
        "socket": 41, "shmget": 29, "semget": 64, "msgget": 68, "add_key": 248, "request_key": 249, "keyctl": 250,
        "chmod": 90, "fchmodat": 268, "chown": 92, "lchown": 94, "fchownat": 260, "setxattr": 188, "lsetxattr": 189,
        "setpriority": 141, "ioprio_set": 251, "prlimit64": 302, "sched_setaffinity": 203, "sched_setscheduler": 144,
        "sched_setparam": 142, "sched_setattr": 314, "perf_event_open": 298, "bpf": 321, "userfaultfd": 323,
    }),
    "aarch64": (0xC00000B7, {
        "socket": 198, "shmget": 194, "semget": 190, "msgget": 186, "add_key": 217, "request_key": 218, "keyctl": 219,
        "fchmodat": 53, "fchownat": 54, "setxattr": 5, "lsetxattr": 6,
        "setpriority": 140, "ioprio_set": 30, "prlimit64": 261, "sched_setaffinity": 122, "sched_setscheduler": 119,
        "sched_setparam": 118, "sched_setattr": 274, "perf_event_open": 241, "bpf": 280, "userfaultfd": 282,
    }),
}  # fmt: skip
"""Machine -> (its name in the kernel's audit, numbers of system calls)."""
_EVERYWHERE = {"io_uring_setup": 425, "fchmodat2": 452, "setxattrat": 463}
"""Calls with one number on all machines."""
_NEVER = (
    "shmget", "semget", "msgget", "add_key", "request_key", "keyctl", "perf_event_open", "bpf", "userfaultfd", "io_uring_setup",
)  # fmt: skip
"""Calls that reach what is shared with the user's other processes, or by which other calls pass the filter."""
_BY_PATH = (
    "chmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchownat", "setxattr", "lsetxattr", "setxattrat",
    "setpriority", "ioprio_set",
)  # fmt: skip
"""Calls that change a file by its path alone, or the user's other processes, about which Landlock has no rule."""
_OF_ITSELF = ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
"""Calls whose first argument names a process, for which Landlock has no rule either: 0 is who asks."""
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
"""Instructions: load a word, jump if equal, jump if at least, return."""
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_X32 = 0x40000000
"""Numbers from here on are another way into the same kernel."""


def call_filter(families: Iterable[int], *, alone: bool) -> bytes:
    """Make a filter (struct sock_filter) that refuses sockets of other address families, and calls that reach outside.

    alone: there are no namespaces, so more calls reach outside.
    """
    audit, numbers = NUMBERS[platform.machine()]
    numbers = numbers | _EVERYWHERE
    refused = [numbers[name] for name in (*_NEVER, *(_BY_PATH if alone else ())) if name in numbers]
    deny, allow = (_RETURN, 0, 0, _ERROR | errno.EPERM), (_RETURN, 0, 0, _ALLOW)
    made = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, audit), deny, (_LOAD, 0, 0, 0), (_AT_LEAST, 0, 1, _X32), deny]
    for number in refused:
        made += [(_EQUAL, 0, 1, number), deny]
    for name in _OF_ITSELF if alone else ():
        made += [(_EQUAL, 0, 4, numbers[name]), (_LOAD, 0, 0, 16), (_EQUAL, 1, 0, 0), deny, allow]
    made += [(_EQUAL, 1, 0, numbers["socket"]), allow, (_LOAD, 0, 0, 16)]
    for family in families:
        made += [(_EQUAL, 0, 1, family), allow]
    return b"".join(struct.pack("HBBI", *one) for one in [*made, deny])


def filter_calls(instructions: bytes) -> None:
    """Have the kernel filter the system calls of this process and of all that it starts."""
    program = struct.pack(
        "HxxxxxxP", len(instructions) // 8, ctypes.addressof(kept := ctypes.create_string_buffer(instructions))
    )
    _checked(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(_libc.prctl(_PR_SET_SECCOMP, _FILTER_MODE, program, 0, 0))
    del kept
