"""The fork server: a process that has imported torch once and forks each role from there in milliseconds.

    supervisor or node agent ──(arguments, environment, log)──► fork server ──fork──► role, role, …
           ▲                                                       │
           └─────────────(its pid; later its exit code)────────────┘

Importing torch and transformers costs seconds of CPU, for each role and for each restart. Children of the fork server
share these imports and their memory. The fork server has one thread, touches no GPU and computes nothing before it
forks. The first child of a new run prepares the run (launch/prepare.py); the run's copy of the code is made after that.
The fork server ends with the process that started it. Roles whose fork server is gone leave as they do when their
supervisor is gone.

multiprocessing's own fork server was tried. It carries environment, session, log and imports, but its `start` waits until
the server has imported torch, seconds in which nobody renews the lease (test_nobody_waits_for_one_that_is_not_spawned).
When it is killed, its children live on and are reported as ended with code 255
(test_its_end_is_told_truly_and_it_ends_with_the_fork_server).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from relax_hpc.files.run_dir import RunDir
from relax_hpc.supervise.environment import role_environment, snapshot_code, start_logged

MESSAGE_BYTES = PIPE_BYTES = 1 << 16
DIED = -signal.SIGKILL
PREPARE = "prepare"


class ForkServer:
    """The fork server as its supervisor uses it.

    The process starts with the first role, and again after it was lost.
    """

    def __init__(self, run: RunDir) -> None:
        """run: the run whose roles are forked here; its directory may be made later."""
        self._run = run
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._not_spawned: list[ForkedProcess] = []
        self._children: dict[int, ForkedProcess] = {}

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.give_up()

    def spawn(
        self,
        arguments: Sequence[str],
        log: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> ForkedProcess:
        """Fork a role with these arguments of relax_hpc.roles, or PREPARE with those of relax_hpc.launch.prepare.

        log: takes what the role prints.
        """
        code = snapshot_code(self._run)
        request = {"arguments": arguments, "environment": dict(environment), "code": str(code) if code else None}
        with log.open("ab") as file:
            if self._socket is None:
                self._start(log)
            assert self._socket is not None
            reading, writing = os.pipe()
            child = ForkedProcess(self, reading)
            # From here on nothing fails: a lost fork server is noticed when its child is looked at.
            self._not_spawned.append(child)
            with contextlib.suppress(OSError):
                socket.send_fds(self._socket, [json.dumps(request).encode()], [file.fileno(), writing])
            os.close(writing)
        return child

    def _start(self, log: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-m", "relax_hpc.supervise.fork_server", str(theirs.fileno())]
            self._process = start_logged(command, log, role_environment(self._run), theirs.fileno())
        self._socket = ours

    def listen(self, timeout_s: float = 0.0) -> None:
        """Read the fork server's messages: pids of new children, exit codes of ended ones.

        Wait up to `timeout_s` for the first.
        """
        while self._socket is not None and select.select([self._socket], [], [], timeout_s)[0]:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
            except OSError:
                data, descriptors = b"", []
            if not data:
                self._lost()
                return
            said, timeout_s = json.loads(data), 0.0
            if descriptors:
                child = self._not_spawned.pop(0)
                self._children[said["pid"]] = child
                child.spawned(said["pid"], descriptors[0])
            else:
                self._children.pop(said["pid"]).ended(said["code"])

    def give_up(self) -> None:
        """Kill the fork server and its roles, forked or not: it takes too long, or nobody wants to wait."""
        if self._process is not None and self._socket is not None:
            self._process.kill()
            self._lost()

    def _lost(self) -> None:
        """Note that the fork server died: its children, running or not forked yet, are ended with it."""
        assert self._process is not None and self._socket is not None
        self._socket.close()
        code, self._socket = self._process.wait(), None
        for child in self._not_spawned:
            child.ended(code or DIED)
        for child in self._children.values():
            child.send_signal(signal.SIGKILL)
            select.select([child.handle], [], [])
            child.ended(DIED)
        self._not_spawned, self._children = [], {}


class ForkedProcess:
    """A forked role as its supervisor sees it, with the methods of subprocess.Popen that supervisors use."""

    def __init__(self, fork_server: ForkServer, reading: int) -> None:
        """reading: the reading end of the pipe for the child's final message."""
        self._fork_server, self._reading = fork_server, reading
        self.final_message = ""
        """The reason it gave for failing: the disk with its heartbeat and log may be full. Known once it ended."""
        self.pid = 0
        self.handle = -1
        """A pidfd, -1 before the fork: it means this process even after the kernel gave its number to another."""
        self._waiting: signal.Signals | None = None
        """A signal to deliver once the process is forked."""
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while the role runs, or is about to."""
        if self.returncode is None:
            self._fork_server.listen()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = 60.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                assert timeout is not None
                raise subprocess.TimeoutExpired(f"role {self.pid}", timeout)
            self._fork_server.listen(left)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send the signal now, or as soon as the role is forked: the caller has heartbeats to write and cannot wait for
        imports.
        """
        self._fork_server.listen()
        if self.returncode is not None:
            return
        if self.handle < 0:
            self._waiting = number
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        if self.returncode is None and self.handle < 0:
            self._fork_server.give_up()

    def spawned(self, pid: int, handle: int) -> None:
        self.pid, self.handle = pid, handle
        if self._waiting is not None:
            self.send_signal(self._waiting)

    def ended(self, code: int) -> None:
        self.returncode = code
        if select.select([self._reading], [], [], 0)[0]:  # else a child of its own still holds the other end
            self.final_message = os.read(self._reading, PIPE_BYTES).decode(errors="replace")
        os.close(self._reading)
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


class _Server:
    """The loop inside the fork server's own process."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._children: dict[int, int] = {}
        """Pid of each child, by its pidfd."""

    def serve(self) -> None:
        """Fork and reap roles until the process that started the fork server is gone."""
        while True:
            ready = select.select([self._socket.fileno(), *self._children], [], [])[0]
            for handle in self._children.keys() & ready:
                self._reap(handle)
            if self._socket.fileno() in ready:
                data, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 2)
                if not data:
                    return
                self._spawn(json.loads(data), *descriptors)

    def _spawn(self, request: dict[str, Any], log: int, final_message: int) -> None:
        pid = os.fork()
        if pid == 0:
            self._socket.close()
            for handle in self._children:
                os.close(handle)
            _live(request, log, final_message)
        os.close(log)
        os.close(final_message)
        handle = os.pidfd_open(pid)
        self._children[handle] = pid
        socket.send_fds(self._socket, [json.dumps({"pid": pid}).encode()], [handle])

    def _reap(self, handle: int) -> None:
        pid = self._children.pop(handle)
        os.close(handle)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._socket.send(json.dumps({"pid": pid, "code": code}).encode())


def _live(request: dict[str, Any], log: int, final_message: int) -> NoReturn:
    """Run the child from the fork to its end: set up its session, log and code, then call the role."""
    import setproctitle

    from relax_hpc.launch import prepare
    from relax_hpc.roles import __main__ as roles

    os.setsid()  # the supervisor decides what Ctrl-C means
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    setproctitle.getproctitle()  # it finds its place by the environment that this process began with
    os.environ.update(request["environment"])
    if request["code"] is not None and request["code"] not in sys.path:
        _import_from(Path(request["code"]))
    what, *rest = request["arguments"]
    setproctitle.setproctitle(f"relax_hpc {' '.join([what, *rest])}")
    try:
        if what == PREPARE:
            prepare.main(final_message, *rest)
        else:
            roles.main([what, *rest, "--supervisor", str(os.getppid()), "--final-message", str(final_message)])
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _import_from(code: Path) -> None:
    """Make every later import, here or in a process below, come from the run's copy of the code.

    The fork server that saw the run made began before that copy; the modules it has imported are those that were
    copied.
    """
    sys.path.insert(0, str(code))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(code), os.environ.get("PYTHONPATH")]))
    for name, module in sys.modules.items():
        if name.partition(".")[0] == "relax_hpc" and hasattr(module, "__path__"):
            module.__path__ = [str(code.joinpath(*name.split(".")))]


def main() -> None:
    gc.disable()  # the collector would scan a million lasting objects again and again: a third of the import time
    os.environ["OMP_NUM_THREADS"] = "1"  # no thread may live when it forks; each role sets its own number
    # scikit-learn, which transformers imports where it is installed, imports pyarrow, whose allocator has a thread
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    from relax_hpc.roles import __main__ as roles

    roles.prepare_cpu()
    import relax_hpc.launch.prepare
    import relax_hpc.roles.rollout.worker
    import relax_hpc.roles.scoring.critic
    import relax_hpc.roles.scoring.scorer
    import relax_hpc.roles.training.trainer
    import relax_hpc.trainers.torch  # noqa: F401

    gc.freeze()  # the collector would write to, and so copy, pages that the children share
    gc.enable()
    _Server(int(sys.argv[1])).serve()
    os._exit(0)  # nanobind would report frozen objects as leaked, in pages of the first role's log


if __name__ == "__main__":
    main()
