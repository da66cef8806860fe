"""The process that speaks MPI for a trainer or a worker, so that MPI may crash: `python mpi_process.py SOCKET MEMORY
PARENT`.

    parent ──{"call": …}──► socket ──► MPI ──► {"value": …} or {"error": …} ──► parent
    bytes ──► memory that both have mapped ──► MPI_Issend … MPI_Irecv ──► memory that both have mapped ──► bytes

It imports nothing of relax_hpc, so that it starts in the time that MPI needs; and it ends when its parent is gone. MPI
would end a common MPI_COMM_WORLD as soon as one process dies. So each process asks an mpiexec of Hydra (MPICH, Intel
MPI, MVAPICH) for a job of one, initializes MPI in itself, and connects to the others by ports.
"""

from __future__ import annotations

import json
import mmap
import os
import resource
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLOTS, SLOT_BYTES = 8, 4 << 20
"""Number of slots and bytes of each. Together they fit a processor's cache: bytes copied into a slot are sent from it."""
MESSAGE_BYTES = 1 << 16
SPIN_S = 0.001
IDLE_POLL_S = 0.002
LOOK_S = 1.0
PMI = ("PMI_FD", "PMI_RANK", "PMI_SIZE", "PMI_PORT", "PMI_ID")
SAY = "import os, sys; print({n: os.environ[n] for n in ('PMI_PORT', 'PMI_ID')}, flush=True); sys.stdin.read()"
"""Program of the one process that mpiexec starts: it hands its place on, and ends when we are gone."""


def begin() -> tuple[Any, subprocess.Popen[str]]:
    """Initialize MPI as a job of this process alone; returns it and that job, which must be kept. Raises RuntimeError."""
    try:
        import mpi4py
    except ImportError as error:
        raise RuntimeError(
            f'weights.transport = "mpi" needs mpi4py, built for the MPI of this machine: pip install mpi4py ({error})'
        ) from error
    # The mpiexec of an MPI that is installed beside this Python belongs to the mpi4py there.
    places = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    mpiexec = shutil.which("mpiexec.hydra", path=places) or shutil.which("mpiexec", path=places)
    said = ""
    if mpiexec is not None:
        environment = {name: value for name, value in os.environ.items() if name not in PMI}
        # On this node, whatever a scheduler gave us.
        job = subprocess.Popen(
            [mpiexec, "-launcher", "fork", "-host", os.uname().nodename, "-pmi-port", "-n", "1", sys.executable, "-S", "-c", SAY],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert job.stdout is not None
        said = job.stdout.readline().strip()
    if not said.startswith("{"):
        raise RuntimeError(
            f'weights.transport = "mpi" needs an mpiexec of Hydra (MPICH, Intel MPI, MVAPICH): {mpiexec or "none"} was found, '
            f'and it said {said!r}; load the module of such an MPI, or use weights.transport = "collective"'
        )
    for name in PMI:
        os.environ.pop(name, None)
    os.environ.update(json.loads(said.replace("'", '"')))
    # UCX crashes on the memory that it shares with a process which dies; without, such a peer is one that does not answer.
    os.environ.setdefault("UCX_TLS", "^shm")
    mpi4py.rc.thread_level = "funneled"
    mpi4py.rc.finalize = False  # it would wait for the dead
    from mpi4py import MPI

    _unlink_memory()
    MPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)
    return MPI, job


def _unlink_memory() -> None:
    """Remove the names of memory that MPICH shares with its job, which is this process: nobody would when it is killed."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/dev/shm/mpich_shm_")
        if path[1] and "(deleted)" not in line:
            Path(path[1] + path[2]).unlink(missing_ok=True)


class Backend:
    """Carries out its parent's calls: calls one by one, moves as many at a time as there are slots."""

    failures: type[Exception]
    """Exceptions that are reported to the parent, and do not end this process."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self.moves: deque[Any] = deque()
        """Moves that were begun, in order."""

    def done(self, move: Any) -> bool:
        """Return True if the move has ended well. Raises one of `failures` where it failed."""
        raise NotImplementedError

    def serve(self) -> None:
        """Serve calls until the parent is gone."""
        idle, waited_since = False, 0.0
        while True:
            if select.select([self._channel], [], [], 0 if self.moves else None)[0]:
                data, descriptors, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, 1)
                if not data:
                    return
                asked = json.loads(data)
                if descriptors:
                    asked["descriptor"] = descriptors[0]
                idle, waited_since = asked.pop("idle", False), time.monotonic()
                self._answer(asked)
            elif self._ended():
                self.moves.popleft()
            elif idle and time.monotonic() - waited_since > SPIN_S:
                time.sleep(IDLE_POLL_S)
            else:
                os.sched_yield()

    def _ended(self) -> bool:
        """Check the first move; returns True if it is over, after telling the parent."""
        try:
            if not self.done(self.moves[0]):
                return False
        except self.failures as error:
            self._say(error=str(error))
        else:
            self._say(value=None)
        return True

    def _answer(self, asked: dict[str, Any]) -> None:
        """Carry out a call and answer it. A move is answered later, when it is done."""
        try:
            call = asked.pop("call")
            value = getattr(self, call)(**asked)
        except self.failures as error:
            self._say(error=str(error))
        else:
            if call != "move":
                self._say(value=value)

    def _say(self, **answer: Any) -> None:
        self._channel.send(json.dumps(answer).encode())


class MpiBackend(Backend):
    """Connections to the other processes of a group, over MPI."""

    def __init__(self, channel: socket.socket, memory: mmap.mmap) -> None:
        """Raises RuntimeError when MPI cannot be used."""
        super().__init__(channel)
        self._memories = [memoryview(memory)]
        """The slots, then further memory that is shared."""
        self._mpi, self._job = begin()
        self.failures = self._mpi.Exception
        self._peers: list[Any] = []
        self._port = ""

    def done(self, move: list[Any]) -> bool:
        return bool(self._mpi.Request.Testall(move))

    def begin(self) -> None:
        """Begin a new group. The connections of the one before stay: freeing one waits for the other side."""
        self._peers = []
        self._shut()

    def open(self) -> str:
        """Open a port to be connected to, and return its name."""
        self._port = str(self._mpi.Open_port())
        return self._port

    def accept(self) -> None:
        self._take(self._mpi.COMM_SELF.Accept(self._port))
        self._shut()

    def _shut(self) -> None:
        if self._port:
            self._mpi.Close_port(self._port)
            self._port = ""

    def connect(self, port: str, timeout_s: int) -> None:
        self._take(self._mpi.COMM_SELF.Connect(port, self._mpi.Info.Create({"timeout": str(timeout_s)})))

    def _take(self, peer: Any) -> None:
        peer.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._peers.append(peer)

    def share(self, descriptor: int) -> int:
        """Map shared memory; returns its number."""
        with os.fdopen(descriptor, "r+b") as file:
            self._memories.append(memoryview(mmap.mmap(file.fileno(), 0)))
        return len(self._memories) - 1

    def move(self, begin: int, size: int, sends: bool, memory: int = 0) -> None:
        """Begin to send bytes of a memory to every peer, or to receive them from the only one."""
        buffer = [self._memories[memory][begin : begin + size], self._mpi.BYTE]
        # Synchronous: what is done has been taken, and a sender that leaves then takes nothing with it.
        self.moves.append([(peer.Issend if sends else peer.Irecv)(buffer, 0, 0) for peer in self._peers])


def _leave_with(parent: int) -> None:
    """End this process when its parent dies, also while another thread waits for a peer."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


def run(make: Callable[[socket.socket, mmap.mmap], Backend]) -> None:
    """Serve the parent, which gave us a socket and memory, until it is gone."""
    descriptor, memory, parent = map(int, sys.argv[1:4])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash in here is nothing unheard of
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    channel = socket.socket(fileno=descriptor)
    try:
        backend = make(channel, mmap.mmap(memory, SLOTS * SLOT_BYTES))
    except RuntimeError as error:
        channel.send(json.dumps({"error": str(error)}).encode())
        sys.exit(1)
    channel.send(json.dumps({"value": None}).encode())
    code = 1
    try:
        backend.serve()
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # nothing of a group is to be waited for


if __name__ == "__main__":
    run(MpiBackend)
