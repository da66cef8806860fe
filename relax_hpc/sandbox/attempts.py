"""Attempts to escape from a sandbox, made inside: python -I -S attempts.py TARGETS name …

Each attempt does what it can with TARGETS (JSON, see escapes.py) and returns if it succeeded; an OSError means that it was
held back. Prints {name: succeeded} as JSON. The standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import platform
import resource
import signal
import socket
import sys
import time
from typing import Any

Targets = dict[str, Any]
HELD_S = 4.0
"""Seconds for which what is too much must be kept to count."""
_libc = ctypes.CDLL(None, use_errno=True)
_PTRACE_SEIZE, _CLONE_NEWUSER, _AF_VSOCK = 0x4206, 0x10000000, 40
_KEYCTL = {"x86_64": 250, "aarch64": 219}
_VM_READ = {"x86_64": 310, "aarch64": 270}
_IO_URING_SETUP = 425


def read_others_file(of: Targets) -> bool:
    return bool(_read(of["secret"]))


def list_others_folder(of: Targets) -> bool:
    return bool(os.listdir(of["run"]))


def write_into_run(of: Targets) -> bool:
    with open(f"{of['run']}/planted", "w") as file:
        return bool(file.write("x"))


def remove_from_run(of: Targets) -> bool:
    os.remove(of["secret"])
    return True


def change_mode_of_run(of: Targets) -> bool:
    os.chmod(of["run"], 0o777)
    return True


def change_times_of_run(of: Targets) -> bool:
    os.utime(of["run"], (1, 1))
    return True


def see_that_a_file_is_there(of: Targets) -> bool:
    return os.stat(of["secret"]).st_size > 0


def list_home(of: Targets) -> bool:
    return bool({*os.listdir(of["home"])} & {*of["in_home"]})


def change_code_of_the_worker(of: Targets) -> bool:
    with open(__file__, "a"):
        return True


def read_through_a_link(of: Targets) -> bool:
    os.symlink(of["secret"], "link")
    return bool(_read("link"))


def write_through_a_linked_folder(of: Targets) -> bool:
    os.symlink(of["run"], "folder")
    with open("folder/planted", "w") as file:
        return bool(file.write("x"))


def hard_link_a_file(of: Targets) -> bool:
    os.link(of["secret"], "hard")
    return bool(_read("hard"))


def read_keys_of_processes(of: Targets) -> bool:
    key = of["key_backwards"][::-1]
    for pid in filter(str.isdigit, _listed("/proc", of["victim"])):
        for name in ("environ", "cmdline"):
            with contextlib.suppress(OSError):
                if key in _read(f"/proc/{pid}/{name}"):
                    return True
    return False


def read_memory_of_the_worker(of: Targets) -> bool:
    with open(f"/proc/{of['victim']}/mem", "rb"):
        return True


def copy_memory_of_the_worker(of: Targets) -> bool:
    into = ctypes.create_string_buffer(8)
    pair = (ctypes.c_void_p * 2)(ctypes.addressof(into), 8)
    there = (ctypes.c_void_p * 2)(int(of["address"]), 8)
    return int(_call(_VM_READ[platform.machine()], int(of["victim"]), pair, 1, there, 1, 0)) > 0


def trace_the_worker(of: Targets) -> bool:
    _checked(_libc.ptrace(_PTRACE_SEIZE, int(of["victim"]), None, None))
    return True


def signal_the_worker(of: Targets) -> bool:
    os.kill(of["victim"], signal.SIGUSR1)
    return True


def signal_the_parent(of: Targets) -> bool:
    if os.getppid() <= 1:
        return False
    os.kill(os.getppid(), signal.SIGWINCH)
    return not of["namespace"]  # the parent in a namespace of its own is the sandbox's own first process


def limit_the_worker(of: Targets) -> bool:
    resource.prlimit(of["victim"], resource.RLIMIT_CPU, (10**6, 10**6))
    return True


def slow_the_worker(of: Targets) -> bool:
    os.setpriority(os.PRIO_PROCESS, of["victim"], 19)
    return True


def bind_the_worker_to_a_cpu(of: Targets) -> bool:
    os.sched_setaffinity(of["victim"], {0})
    return True


def connect_by_tcp(of: Targets) -> bool:
    socket.create_connection(("127.0.0.1", of["tcp"]), 1).close()
    return True


def send_by_udp(of: Targets) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.sendto(b"x", ("127.0.0.1", of["udp"]))
    return not of["namespace"]  # a network of its own takes it, and leads nowhere: the receiver says more


def connect_to_an_abstract_socket(of: Targets) -> bool:
    return _connect("\0" + of["abstract"])


def connect_to_a_socket_file(of: Targets) -> bool:
    return _connect(of["socket"])


def open_a_socket_of_the_host(of: Targets) -> bool:
    socket.socket(_AF_VSOCK, socket.SOCK_STREAM).close()
    return True


def ask_the_kernels_keyring(of: Targets) -> bool:
    return int(_call(_KEYCTL[platform.machine()], 0, -3, 0)) > 0


def make_calls_in_a_ring(of: Targets) -> bool:
    return int(_call(_IO_URING_SETUP, 1, ctypes.create_string_buffer(120))) > 0


def make_a_user_namespace(of: Targets) -> bool:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if _libc.unshare(_CLONE_NEWUSER) == 0 else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def bomb_of_forks(of: Targets) -> bool:
    for count in range(4 * of["processes"]):
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)
        if count > 2 * of["processes"]:
            time.sleep(HELD_S)
            return True
    return False


def much_memory(of: Targets) -> bool:
    kept = bytearray(2 * of["memory"])
    kept[::4096] = b"x" * len(kept[::4096])
    time.sleep(HELD_S)
    return True


def much_shared_memory(of: Targets) -> bool:
    kept = mmap.mmap(-1, 2 * of["memory"])
    for at in range(0, len(kept), 4096):
        kept[at] = 1
    time.sleep(HELD_S)
    return True


def much_memory_of_many(of: Targets) -> bool:
    for _ in range(4):
        if os.fork() == 0:
            kept = bytearray(of["memory"] // 2)
            kept[::4096] = b"x" * len(kept[::4096])
            time.sleep(30)
    time.sleep(3 * HELD_S)
    return True


def a_large_file(of: Targets) -> bool:
    return _fill(".", 1, of["disk"] * 2)


def many_files(of: Targets) -> bool:
    return _fill(".", 20, of["disk"] // 8)


def many_files_in_tmp(of: Targets) -> bool:
    return _fill(os.environ["TMPDIR"], 20, of["disk"] // 8)


def files_without_a_name(of: Targets) -> bool:
    return _fill(".", 20, of["disk"] // 8, unlinked=True)


def files_in_shared_memory(of: Targets) -> bool:
    return _fill("/dev/shm", 20, of["disk"] // 8)


def write_where_nothing_is_counted(of: Targets) -> bool:
    for path in ("/", "/dev", "/var/tmp", "/run", "/etc", "/usr"):
        with contextlib.suppress(OSError), open(f"{path}/planted", "w"):
            return True
    return False


def leave_a_process(of: Targets) -> bool:
    if os.fork() != 0:
        return False  # whether it stayed, the host sees
    os.setsid()
    if os.fork() != 0:
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for number in range(3):
        os.close(number)
    time.sleep(60)
    os._exit(0)


QUIET = (
    read_others_file, list_others_folder, write_into_run, change_mode_of_run, change_times_of_run,
    see_that_a_file_is_there, list_home, change_code_of_the_worker, read_through_a_link, write_through_a_linked_folder,
    hard_link_a_file, read_keys_of_processes, read_memory_of_the_worker, copy_memory_of_the_worker, trace_the_worker,
    signal_the_worker, signal_the_parent, limit_the_worker, slow_the_worker, bind_the_worker_to_a_cpu, connect_by_tcp,
    send_by_udp, connect_to_an_abstract_socket, connect_to_a_socket_file, open_a_socket_of_the_host, ask_the_kernels_keyring,
    make_calls_in_a_ring, make_a_user_namespace, write_where_nothing_is_counted,
    remove_from_run,
)  # fmt: skip
"""Attempts that leave the sandbox as it is."""
LOUD = (
    bomb_of_forks, much_memory, much_shared_memory, much_memory_of_many, a_large_file, many_files, many_files_in_tmp,
    files_without_a_name, files_in_shared_memory, leave_a_process,
)  # fmt: skip
"""Attempts to use much, each in a sandbox of its own."""
ALL = {attempt.__name__: attempt for attempt in (*QUIET, *LOUD)}


def _read(path: str) -> str:
    with open(path, "rb") as file:
        return file.read().decode(errors="replace")


def _listed(path: str, fallback: int) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return [str(fallback), str(os.getppid())]


def _connect(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(address)
    return True


def _fill(folder: str, count: int, size: int, unlinked: bool = False) -> bool:
    """Write `count` files; True if they could be kept."""
    kept, block = [], b"x" * (1 << 20)
    for number in range(count):
        path = os.path.join(folder, f"much{number}")
        kept.append(os.open(path, os.O_WRONLY | os.O_CREAT))
        if unlinked:
            os.remove(path)
        for _ in range(0, size, len(block)):
            if os.write(kept[-1], block) < len(block):
                return False
    time.sleep(HELD_S)
    return True


def _call(number: int, *arguments: Any) -> int:
    whole = [ctypes.c_long(one) if isinstance(one, int) else one for one in arguments]  # the seventh lies on the stack
    return _checked(_libc.syscall(number, *whole))


def _checked(answer: int) -> int:
    if answer < 0:
        raise OSError(ctypes.get_errno(), "held back")
    return int(answer)


def main() -> None:
    """Make the attempts that the command line names."""
    of, made = json.loads(sys.argv[1]), {}
    for name in sys.argv[2:]:
        try:
            made[name] = ALL[name](of)
        except (OSError, MemoryError):
            made[name] = False
    print(json.dumps(made), flush=True)


if __name__ == "__main__":
    main()
