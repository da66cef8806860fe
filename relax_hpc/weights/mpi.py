"""A group over MPI, between processes that come and go: each has a child that speaks MPI (see mpi_process.py) and may crash.

    worker:  weights/group-ID/NAME        the port it opened          trainer: weights/group-ID.json    who is connected to
    trainer ──Connect──► worker (Accept), one after the other; then a broadcast is one Issend to each

MPICH over UCX crashes a sender whose receiver was killed in mid-transfer, and reports nothing where a peer just does not
answer. Both break the group, within the time limit: the child is killed, the version goes by files, and the next
group has a child of its own. One whose group was given up in good order is used again.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from relax_hpc.run_dir import RunDir, RunError, read_json, replace, to_json
from relax_hpc.tensor_files import as_bytes
from relax_hpc.weights.meeting import CHECK_IN_S, Called, call, leave_out
from relax_hpc.weights.mpi_process import MESSAGE_BYTES, SLOT_BYTES, SLOTS
from relax_hpc.weights.wire import IDLE_S, GroupError

POLL_S = 0.02
LOOK_S = 0.5
"""Between two looks whether another group was called, while nothing comes."""
START_S = 60.0
PROGRAM = Path(__file__).with_name("mpi_process.py")

_lock = threading.Lock()
_ready: list[MpiProcess] = []
"""Not in a group."""


class MpiProcess:
    """The child, as its parent sees it. Raises GroupError where the child does not do what it is asked to."""

    def __init__(self) -> None:
        """Raises RunError when there is no MPI to speak."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = os.memfd_create("relax_hpc-mpi")
        os.ftruncate(memory, SLOTS * SLOT_BYTES)
        mapped = mmap.mmap(memory, SLOTS * SLOT_BYTES)
        self.slots = [np.frombuffer(mapped, np.uint8, SLOT_BYTES, i * SLOT_BYTES) for i in range(SLOTS)]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), str(theirs.fileno()), str(memory), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), memory),
            )
        os.close(memory)
        try:
            self.hear(START_S)
        except GroupError as error:
            self.kill()
            raise RunError(str(error)) from error

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """With all that MPI holds, and all that waits there for the dead."""
        self.process.kill()
        self.process.wait()
        self._channel.close()

    def call(self, what: str, limit_s: float, given_up: Callable[[], bool] = lambda: False, **arguments: Any) -> Any:
        self.say(what, **arguments)
        return self.hear(limit_s, given_up)

    def say(self, what: str, **arguments: Any) -> None:
        with contextlib.suppress(OSError):  # it died: that is heard
            self._channel.send(json.dumps({"call": what, **arguments}).encode())

    def hear(self, limit_s: float, given_up: Callable[[], bool] = lambda: False) -> Any:
        """The next answer. A child that gives none within the limit, or before it is `given_up`, is killed."""
        began = time.monotonic()
        while not select.select([self._channel], [], [], min(LOOK_S, limit_s))[0]:
            waited_s = time.monotonic() - began
            if waited_s > limit_s or given_up():
                self.kill()
                raise GroupError(f"MPI did not end what it was asked to within {waited_s:.1f} s")
        try:
            data = self._channel.recv(MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            self.process.wait()
            self.kill()
            code = self.process.returncode
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise GroupError(f"the process that speaks MPI was ended by {how}")
        said = json.loads(data)
        if "error" in said:
            raise GroupError(said["error"])
        return said["value"]


def take_process() -> MpiProcess:
    """One that is in no group. Raises RunError when MPI does not work here."""
    while True:
        with _lock:
            process = _ready.pop() if _ready else None
        if process is None:
            return MpiProcess()
        with contextlib.suppress(GroupError):  # it died meanwhile
            process.call("begin", START_S)
            return process


def give_back(process: MpiProcess) -> None:
    with _lock:
        _ready.append(process)


class MpiGroup:
    """The sender's connections to all receivers, or a receiver's to the sender. See relax_hpc.weights.wire.Group."""

    def __init__(self, process: MpiProcess, sends: bool, timeout_s: float, given_up: Callable[[], bool]) -> None:
        self.process, self._sends, self._timeout_s, self._given_up = process, sends, timeout_s, given_up

    def broadcast(self, tensors: Sequence[Tensor], timeout_s: float | None = None) -> None:
        limit_s = timeout_s or self._timeout_s
        deadline = time.monotonic() + limit_s
        pieces = [piece for tensor in tensors for piece in _pieces(as_bytes(tensor))]
        under_way: deque[int] = deque()

        def end_one() -> None:
            self.process.hear(max(0.0, deadline - time.monotonic()), self._given_up)
            number = under_way.popleft()
            if not self._sends:
                pieces[number][:] = self.process.slots[number % SLOTS][: len(pieces[number])]

        try:
            for number, piece in enumerate(pieces):
                if len(under_way) == SLOTS:
                    end_one()
                if self._sends:
                    self.process.slots[number % SLOTS][: len(piece)] = piece
                self.process.say(
                    "move", slot=number % SLOTS, size=len(piece), sends=self._sends, idle=limit_s == IDLE_S
                )
                under_way.append(number)
            while under_way:
                end_one()
        except GroupError:
            self.process.kill()  # it may hold requests that never end
            raise

    def close(self) -> None:
        if self.process.alive:
            give_back(self.process)


def _pieces(data: np.ndarray[Any, np.dtype[np.uint8]]) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """No longer than a slot; the same on both sides."""
    return [data[begin : begin + SLOT_BYTES] for begin in range(0, len(data), SLOT_BYTES)]


class MpiMeeting:
    """See relax_hpc.weights.collective.Meeting. `via`: the trainer's folder; a worker has none."""

    def __init__(self, run: RunDir, timeout_s: float, via: Path | None = None) -> None:
        self._run, self._timeout_s, self._via = run, timeout_s, via
        give_back(take_process())  # that there is an MPI is found now, and the first group is quick

    def form(self, names: frozenset[str]) -> tuple[MpiGroup, frozenset[str]]:
        assert self._via is not None
        process, group_id = _process(), uuid.uuid4().hex
        try:
            ports = self._ports(group_id, names)
            connected = self._connect(process, ports)
        except BaseException:
            if process.alive:
                give_back(process)
            raise
        return MpiGroup(process, True, self._timeout_s, lambda: False), connected

    def _ports(self, group_id: str, names: frozenset[str]) -> dict[str, str]:
        """Of those who answer. A worker whose MPI is not there yet answers at once, and says its port later."""
        assert self._via is not None
        for old in self._run.weights.glob("group-*"):
            shutil.rmtree(old, ignore_errors=True)
        (answers := self._answers(group_id)).mkdir()
        call(self._run, self._via, group_id, names)
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

    def _connect(self, process: MpiProcess, ports: dict[str, str]) -> frozenset[str]:
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
            if process.alive:
                give_back(process)
            raise
        return MpiGroup(process, False, self._timeout_s, given_up)

    def _answers(self, group_id: str) -> Path:
        return self._run.weights / f"group-{group_id}"


def _process() -> MpiProcess:
    """MPI worked here when the meeting was made: what is wrong now may pass."""
    try:
        return take_process()
    except RunError as error:
        raise GroupError(str(error)) from error
