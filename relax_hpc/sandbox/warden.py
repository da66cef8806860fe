"""A process that starts a command, watches what the command and all that it starts use, and leaves nothing behind.

    python -I -S warden.py ORDER command …    ORDER: JSON, as `wrap` makes it

command within its limits ─► its exit status (128 + signal, where one ended it)
beyond a limit, the parent is gone, or TERM ─► TERM to all, after `grace_s` KILL; status 124 for a limit, the reason on stderr

It runs before any other code of ours, in the Python of the worker but without its libraries, so that it is small and starts
within hundredths of a second: the standard library and `confine.py` alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
from typing import Any

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from relax_hpc.sandbox.confine import call_filter, filter_calls, landlock

LIMIT = 124
"""Exit status of a command that was ended because it used too much."""
POLL_S = 0.1
_DISK_SHARE = 20
"""What is on disk is counted for one of so many parts of the time at the most."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GB = 1 << 30
_OF_ITSELF = (
    "/proc/self",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/uptime",
    "/proc/loadavg",
    "/proc/sys",
    "/sys/devices/system/cpu",
)
"""Beyond /proc/self nothing of /proc that tells of other processes: their command lines are readable for everybody."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Warden:
    """Watches one command."""

    def __init__(self, order: dict[str, Any], command: list[str]) -> None:
        self.order, self.command = order, command
        self.began = self.disk_at = time.monotonic()
        self.tmp = tempfile.mkdtemp(prefix="relax-sandbox-") if order.get("landlock") else None
        self.counted = [*order["writable"], *([self.tmp] if self.tmp else [])]
        self.before = on_disk(self.counted, [])
        self.asked_to_end = False
        self.status: int | None = None

    def work(self) -> int:
        """Run the command to its end; return the exit status."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGTERM, self._asked)
        try:
            self.child = os.fork()
            if self.child == 0:
                self._become()
            return self._watch()
        finally:
            self._kill()
            if self.tmp:
                shutil.rmtree(self.tmp, ignore_errors=True)

    def _asked(self, *_: object) -> None:
        self.asked_to_end = True

    def _become(self) -> None:
        """Become the command, with its limits."""
        try:
            os.setsid()  # a signal to the warden's group is for the warden alone
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            for name, value in self.order["limits"].items():
                which = getattr(resource, f"RLIMIT_{name}")
                most = resource.getrlimit(which)[1]
                value = value if most == resource.RLIM_INFINITY else min(value, most)
                resource.setrlimit(which, (value, value))
            environment = dict(os.environ)
            if rules := self.order.get("landlock"):
                environment |= {"TMPDIR": str(self.tmp), "TMP": str(self.tmp), "TEMP": str(self.tmp)}
                os.chdir(self.order["folder"])
                landlock(
                    [*self.order["readable"], *_OF_ITSELF],
                    [*self.order["writable"], *_DEVICES, str(self.tmp)],
                    rules["network"],
                )
                filter_calls(call_filter(rules["families"], alone=True))
            if (families := self.order.get("filter")) is not None:
                self._give_filter(call_filter(families, alone=False))
            os.execvpe(self.command[0], self.command, environment)
        except BaseException as error:
            print(f"sandbox: '{self.command[0]}' does not start: {error}", file=sys.stderr, flush=True)
            os._exit(127)

    def _give_filter(self, instructions: bytes) -> None:
        """Hand bwrap its filter through a pipe, which has room for all of it."""
        ours, theirs = os.pipe()
        os.write(theirs, instructions)
        os.close(theirs)
        os.set_inheritable(ours, True)
        self.command[1:1] = ["--seccomp", str(ours)]

    def _watch(self) -> int:
        parent = os.getppid()
        while True:
            self._reap()
            if self.status is not None:
                return (
                    os.waitstatus_to_exitcode(self.status)
                    if os.WIFEXITED(self.status)
                    else 128 + os.WTERMSIG(self.status)
                )
            if os.getppid() != parent:
                return 128 + signal.SIGKILL
            if self.asked_to_end:
                self._ask(self.order["grace_s"])
                return 128 + signal.SIGTERM
            if reason := self._beyond():
                print(f"sandbox: {reason}", file=sys.stderr, flush=True)
                return LIMIT
            signal.sigtimedwait({signal.SIGCHLD}, POLL_S)

    def _reap(self) -> None:
        """Collect children that ended, adopted ones too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                self.status = status

    def _beyond(self) -> str | None:
        """The limit that is passed, in words."""
        most, everybody = self.order["most"], descendants(os.getpid())
        if most["time_s"] is not None and time.monotonic() - self.began > most["time_s"]:
            return f"time_limit_s = {most['time_s']:g} is over"
        if (count := sum(threads(pid) for pid in everybody)) > most["processes"] + self.order["own"]:
            return f"{count} processes and threads are more than processes = {most['processes']}"
        if (
            memory(everybody) > most["memory_gb"] * _GB
            and (used := memory(everybody, exact=True)) > most["memory_gb"] * _GB
        ):
            return f"{used / _GB:.2f} GB of memory are more than memory_gb = {most['memory_gb']:g}"
        if time.monotonic() >= self.disk_at:
            began = time.monotonic()
            used = on_disk(self.counted, everybody) - self.before
            self.disk_at = time.monotonic() + max(POLL_S, _DISK_SHARE * (time.monotonic() - began))
            if used > most["disk_gb"] * _GB:
                return f"{used / _GB:.2f} GB on disk are more than disk_gb = {most['disk_gb']:g}"
        return None

    def _ask(self, grace_s: float) -> None:
        """Ask all to end, but bubblewrap itself, which would take the others along."""
        for pid in descendants(os.getpid()):
            if read(f"/proc/{pid}/comm") != "bwrap\n":
                send(pid, signal.SIGTERM)
        until = time.monotonic() + grace_s
        while self.status is None and time.monotonic() < until:
            time.sleep(POLL_S / 5)
            self._reap()

    def _kill(self) -> None:
        """Kill all that there is, until nothing is: first they are stopped, so that they start nothing new."""
        while everybody := descendants(os.getpid()):
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in everybody:
                    send(pid, number)
            time.sleep(POLL_S / 20)
            self._reap()


def descendants(pid: int) -> list[int]:
    """All processes that `pid` started, and those that these did."""
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        try:
            tasks = os.listdir(f"/proc/{one}/task")
        except OSError:
            continue
        children = [int(child) for task in tasks for child in read(f"/proc/{one}/task/{task}/children").split()]
        found += children
        todo += children
    return found


def threads(pid: int) -> int:
    """How many threads a process has."""
    try:
        return os.stat(f"/proc/{pid}/task").st_nlink - 2
    except OSError:
        return 0


def memory(pids: list[int], exact: bool = False) -> int:
    """Bytes of memory that processes have; `exact`: what several share counts once, which takes longer to find out."""
    total = 0
    for pid in pids:
        if not exact:
            total += int((read(f"/proc/{pid}/statm").split() or ["0", "0"])[1]) * _PAGE
            continue
        for line in read(f"/proc/{pid}/smaps_rollup").splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def on_disk(folders: list[str], pids: list[int]) -> int:
    """Bytes in folders, and in files without a name that processes hold."""
    seen: dict[tuple[int, int], int] = {}
    for folder in folders:
        for place, _, names in os.walk(folder):
            for name in ("", *names):
                note(os.path.join(place, name), seen, named=True)
    for pid in pids:
        try:
            numbers = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for number in numbers:
            note(f"/proc/{pid}/fd/{number}", seen, named=False)
    return sum(seen.values())


def note(path: str, seen: dict[tuple[int, int], int], named: bool) -> None:
    """Note a file's bytes by its number; of those that are open only such without a name."""
    try:
        about = os.lstat(path) if named else os.stat(path)
    except OSError:
        return
    if named or (about.st_nlink == 0 and stat.S_ISREG(about.st_mode)):
        seen[about.st_dev, about.st_ino] = about.st_blocks * 512


def read(path: str) -> str:
    """A file's text; empty where its process is gone."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(OSError):
        os.kill(pid, number)


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    sys.exit(Warden(json.loads(sys.argv[1]), sys.argv[2:]).work())
