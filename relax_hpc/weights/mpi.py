"""A group over MPI, between processes that come and go: each is an MPI job of its own, and the jobs connect by ports.

    worker:  weights/group-ID/NAME        the port it opened          trainer: weights/group-ID.json    who is connected to
    trainer ──Connect──► worker (Accept), one after the other; then a broadcast is one Isend to each

One MPI_COMM_WORLD for all would be ended by MPI as soon as one process dies. So every process asks an mpiexec of Hydra
(MPICH, Intel MPI, MVAPICH) for a job of one, and initialises MPI in itself. A peer that dies then costs the others no more
than the time limit: MPI reports nothing, the transfer just does not end. Its connection is left alone afterwards, for
freeing it would wait for the dead; so is one to a process that was left out.
Known limits: a worker whose trainer dies within the moment between being named and being connected keeps a thread busy in Accept.
MPICH over UCX now and then crashes a sender whose receiver was killed in mid-transfer (seen once in some hundred such kills, in
MPI_Isend): the supervisor then starts the trainer again from its checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from relax_hpc.run_dir import RunDir, RunError, read_json, replace, to_json
from relax_hpc.weights.contents import as_bytes
from relax_hpc.weights.meeting import CHECK_IN_S, Called, call, leave_out
from relax_hpc.weights.wire import IDLE_S, GroupError

POLL_S = 0.02
IDLE_POLL_S = 0.002
LOOK_S = 0.5
"""Between two looks whether another group was called, while nothing comes."""
SPIN_S = 0.001
START_S = 60.0
PMI = ("PMI_FD", "PMI_RANK", "PMI_SIZE", "PMI_PORT", "PMI_ID")
SAY = "import os, sys; print({n: os.environ[n] for n in ('PMI_PORT', 'PMI_ID')}, flush=True); sys.stdin.read()"
"""The one process that mpiexec starts: hands its place on, and leaves when we are gone."""

_lock = threading.Lock()
_job: Any = None
_pending: list[Any] = []
"""Requests to the dead, with their buffers: MPI may touch these at any time."""


def mpi() -> Any:
    """mpi4py's MPI, initialised as a job of this process alone. Raises RunError when that cannot be."""
    global _job
    with _lock:
        if _job is None:
            _job = _begin_job()
    from mpi4py import MPI

    return MPI


def _begin_job() -> subprocess.Popen[str]:
    try:
        import mpi4py
    except ImportError as error:
        raise RunError(
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
        raise RunError(
            f'weights.transport = "mpi" needs an mpiexec of Hydra (MPICH, Intel MPI, MVAPICH): {mpiexec or "none"} was found, '
            f'and it said {said!r}; load the module of such an MPI, or use weights.transport = "collective"'
        )
    for name in PMI:
        os.environ.pop(name, None)
    os.environ.update(json.loads(said.replace("'", '"')))
    # UCX crashes on the memory that it shares with a process which dies; without, such a peer is one that does not answer.
    os.environ.setdefault("UCX_TLS", "^shm")
    mpi4py.rc.finalize = False  # it would wait for the dead
    from mpi4py import MPI

    for name in PMI:  # not for our children
        os.environ.pop(name, None)
    _unlink_memory()
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise RunError(f'weights.transport = "mpi" needs MPI_THREAD_MULTIPLE: {MPI.Get_library_version()} lacks it')
    MPI.COMM_SELF.Set_errhandler(MPI.ERRORS_RETURN)
    return job


def _unlink_memory() -> None:
    """Take the names from memory that MPICH shares with its job, which is this process: nobody would when it is killed."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/dev/shm/mpich_shm_")
        if path[1] and "(deleted)" not in line:
            Path(path[1] + path[2]).unlink(missing_ok=True)


class MpiGroup:
    """The sender's connections to all receivers, or a receiver's to the sender. See relax_hpc.weights.wire.Group."""

    def __init__(self, peers: Sequence[Any], sends: bool, timeout_s: float, given_up: Callable[[], bool]) -> None:
        self._peers, self._sends, self._timeout_s, self._given_up = peers, sends, timeout_s, given_up
        for peer in peers:
            peer.Set_errhandler(mpi().ERRORS_RETURN)

    def broadcast(self, tensors: Sequence[Tensor], timeout_s: float | None = None) -> None:
        MPI = mpi()
        views = [as_bytes(tensor) for tensor in tensors if tensor.numel()]
        try:
            requests = [
                (peer.Isend if self._sends else peer.Irecv)([view, MPI.BYTE], 0, 0)
                for view in views
                for peer in self._peers
            ]
            self._wait(requests, views, timeout_s or self._timeout_s)
        except MPI.Exception as error:
            raise GroupError(str(error)) from error

    def _wait(self, requests: list[Any], views: list[Any], timeout_s: float) -> None:
        MPI = mpi()
        began = looked = time.monotonic()
        while not MPI.Request.Testall(requests):
            now = time.monotonic()
            if now - began > SPIN_S and timeout_s == IDLE_S:
                time.sleep(IDLE_POLL_S)
            if now - began > timeout_s or (now - looked > LOOK_S and self._given_up()):
                _pending.append((requests, views))
                raise GroupError(f"a transfer did not end within {now - began:.1f} s")
            if now - looked > LOOK_S:
                looked = now

    def close(self) -> None:
        """Its connections stay: to free one waits for the other side."""


class MpiMeeting:
    """See relax_hpc.weights.collective.Meeting. `via`: the trainer's folder; a worker has none."""

    def __init__(self, run: RunDir, timeout_s: float, via: Path | None = None) -> None:
        self._run, self._timeout_s, self._via = run, timeout_s, via
        mpi()

    def form(self, names: frozenset[str]) -> tuple[MpiGroup, frozenset[str]]:
        assert self._via is not None
        MPI, group_id = mpi(), uuid.uuid4().hex
        for old in self._run.weights.glob("group-*"):
            shutil.rmtree(old, ignore_errors=True)
        (answers := self._answers(group_id)).mkdir()
        call(self._run, self._via, group_id, names)
        ports: dict[str, str] = {}
        deadline = time.monotonic() + CHECK_IN_S
        while ports.keys() != names and time.monotonic() < deadline:
            for name in names - ports.keys():
                answer = read_json(answers / name)
                if answer is not None:
                    ports[name] = answer["port"]
            time.sleep(POLL_S)
        leave_out(self._run, names - ports.keys())
        replace(answers / "connected.json", to_json(sorted(ports)), durable=False)
        if not ports:
            raise GroupError(f"nobody answered within {CHECK_IN_S:.0f} s")
        info = MPI.Info.Create({"timeout": str(int(CHECK_IN_S))})
        peers: dict[str, Any] = {}
        for name, port in ports.items():
            try:
                peers[name] = MPI.COMM_SELF.Connect(port, info)
            except MPI.Exception:
                leave_out(self._run, [name])
        if not peers:
            raise GroupError(f"none of {sorted(ports)} accepted a connection")
        return MpiGroup(list(peers.values()), True, self._timeout_s, lambda: False), frozenset(peers)

    def join(self, group: Called, name: str, given_up: Callable[[], bool]) -> MpiGroup:
        MPI = mpi()
        answers = self._answers(group.id)
        port = MPI.Open_port()
        try:
            replace(answers / name, to_json({"port": port}), durable=False)
            while (connected := read_json(answers / "connected.json")) is None:
                if given_up():
                    raise GroupError("another group was called meanwhile")
                time.sleep(POLL_S)
            if name not in connected:
                raise GroupError("answered too late, and was left out")
            peer = MPI.COMM_SELF.Accept(port)
        except MPI.Exception as error:
            raise GroupError(str(error)) from error
        finally:
            MPI.Close_port(port)
        return MpiGroup([peer], False, self._timeout_s, given_up)

    def _answers(self, group_id: str) -> Path:
        return self._run.weights / f"group-{group_id}"
