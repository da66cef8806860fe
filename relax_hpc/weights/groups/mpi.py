"""A group over MPI, between processes that come and go: each has a child that speaks MPI (mpi_process.py), and may crash.

    worker:  weights/group-ID/NAME        the port it opened          trainer: weights/group-ID.json    who is connected to
    trainer ──Connect──► worker (Accept), one after the other; then a broadcast is one Issend to each

MPICH over UCX crashes a sender whose receiver was killed in mid-transfer, and reports nothing where a peer just does
not answer. Both break the group, within the time limit: the child is killed, the version goes by files, and the next
group has a new child. A child whose group was given up in good order is used again.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json, replace, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.weights.groups.backend_process import START_S, BackendProcess
from relax_hpc.weights.groups.protocol import IDLE_S, Arrived, Group, GroupError
from relax_hpc.weights.groups.rendezvous import CHECK_IN_S, Called, Rendezvous, leave_out
from relax_hpc.weights.groups.shared_buffers import SharedBufferPool

POLL_S = 0.02
PROGRAM = Path(__file__).with_name("mpi_process.py")

_lock = threading.Lock()
_ready: list[BackendProcess] = []
"""Children that are in no group."""


def borrow_process() -> BackendProcess:
    """Take a child that is in no group, or start one. Raises RunError when MPI does not work here."""
    while True:
        with _lock:
            process = _ready.pop() if _ready else None
        if process is None:
            return BackendProcess("MPI", PROGRAM)
        with contextlib.suppress(GroupError):  # it died meanwhile
            process.call("begin", START_S)
            return process


def give_back(process: BackendProcess) -> None:
    if process.alive:
        with _lock:
            _ready.append(process)


class MpiGroup(Group):
    """The sender's connections to all receivers, or a receiver's to the sender."""

    def __init__(
        self,
        process: BackendProcess,
        buffers: SharedBufferPool,
        sends: bool,
        timeout_s: float,
        given_up: Callable[[], bool],
    ) -> None:
        self.child, self._buffers, self._sends = process, buffers, sends
        self._timeout_s, self._given_up = timeout_s, given_up

    def broadcast(
        self, tensors: Sequence[Tensor], timeout_s: float | None = None, arrived: Arrived = lambda _: None
    ) -> None:
        self.child.move(tensors, self._sends, timeout_s or self._timeout_s, self._given_up, arrived, self._buffers)

    def close(self) -> None:
        give_back(self.child)


class MpiRendezvous(Rendezvous):
    """Forms groups of children that speak MPI."""

    buffers: SharedBufferPool

    def __init__(self, run: RunDir, timeout_s: float, commit_dir: Path | None = None) -> None:
        super().__init__(run, timeout_s, commit_dir)
        self.buffers = SharedBufferPool()
        give_back(borrow_process())  # that there is an MPI is found now, and the first group is quick

    def form(self, names: frozenset[str]) -> tuple[MpiGroup, frozenset[str]]:
        process, group_id = _process(), uuid.uuid4().hex
        try:
            ports = self._ports(group_id, names)
            connected = self._connect(process, ports)
        except BaseException:
            give_back(process)
            raise
        return MpiGroup(process, self.buffers, True, self._timeout_s, lambda: False), connected

    def _ports(self, group_id: str, names: frozenset[str]) -> dict[str, str]:
        """Call a group; returns name -> port of those that answer: at once, and with a port when their MPI is there."""
        for old in self._run.weights.glob("group-*"):
            shutil.rmtree(old, ignore_errors=True)
        (answers := self._answers(group_id)).mkdir()
        self.call(group_id, names)
        here: dict[str, str] = {}
        began = time.monotonic()
        while (waited_s := time.monotonic() - began) < self._timeout_s + CHECK_IN_S:
            read = {name: read_json(answers / name) for name in names}
            here = {name: answer["port"] for name, answer in read.items() if answer}
            if all(here.values()) and (here.keys() == names or waited_s > CHECK_IN_S):
                break
            time.sleep(POLL_S)
        ports = {name: port for name, port in here.items() if port}
        leave_out(self._run, names - ports.keys())
        replace(answers / "connected.json", to_json(sorted(ports)), durable=False)
        if not ports:
            raise GroupError(f"nobody answered within {waited_s:.0f} s")
        return ports

    def _connect(self, process: BackendProcess, ports: dict[str, str]) -> frozenset[str]:
        connected = set()
        for name, port in ports.items():
            try:
                process.call("connect", self._timeout_s + CHECK_IN_S, port=port, timeout_s=int(CHECK_IN_S))
                connected.add(name)
            except GroupError:
                leave_out(self._run, [name])
                if not process.alive:
                    raise
        if not connected:
            raise GroupError(f"none of {sorted(ports)} accepted a connection")
        return frozenset(connected)

    def join(self, group: Called, name: str, given_up: Callable[[], bool]) -> MpiGroup:
        answers = self._answers(group.id)
        replace(answers / name, to_json({"port": ""}), durable=False)
        process = _process()
        try:
            port = process.call("open", START_S)
            replace(answers / name, to_json({"port": port}), durable=False)
            while (connected := read_json(answers / "connected.json")) is None and not given_up():
                time.sleep(POLL_S)
            if name not in (connected or ()):
                raise GroupError("another group was called meanwhile, or this answer came too late")
            process.call("accept", IDLE_S, given_up)
        except BaseException:
            give_back(process)
            raise
        return MpiGroup(process, self.buffers, False, self._timeout_s, given_up)

    def _answers(self, group_id: str) -> Path:
        return self._run.weights / f"group-{group_id}"


def _process() -> BackendProcess:
    """Take a child for a group. MPI worked here when the rendezvous was made: an error now may pass, so a GroupError."""
    try:
        return borrow_process()
    except RunError as error:
        raise GroupError(str(error)) from error
