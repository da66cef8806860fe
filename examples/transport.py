"""A transport of one's own: weights broadcast over Unix sockets, trainer and workers on one machine.

What a group does not bring goes by files, and what came is compared with the manifest: CollectivePublisher and CollectiveReceiver do that
for every group. So a new kind of group needs two classes only: how its members find each other, and how bytes go to all of them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from relax_hpc.weights.groups.protocol import Arrived, Group, GroupError
from relax_hpc.weights.groups.rendezvous import CHECK_IN_S, Called, Rendezvous, leave_out

POLL_S = 0.02
NAME_BYTES = 256


class SocketGroup(Group):
    """The trainer has a socket for each worker, a worker has one."""

    def __init__(self, sockets: Sequence[socket.socket], timeout_s: float, *, sends: bool) -> None:
        self._sockets, self._timeout_s, self._sends = sockets, timeout_s, sends

    def broadcast(
        self, tensors: Sequence[Tensor], timeout_s: float | None = None, arrived: Arrived = lambda _: None
    ) -> None:
        with _as_group_errors():
            for place, tensor in enumerate(tensors):
                data = tensor.view(torch.uint8).numpy().data
                for each in self._sockets:
                    each.settimeout(timeout_s or self._timeout_s)
                    each.sendall(data) if self._sends else _receive(each, data)
                arrived(place)

    def close(self) -> None:
        for each in self._sockets:
            each.close()


class SocketRendezvous(Rendezvous):
    """Forms groups that are connected by sockets of this machine."""

    def form(self, names: frozenset[str]) -> tuple[Group, frozenset[str]]:
        """Name the group in the run directory; those who connect and say their name in time are in it."""
        group_id, here = uuid.uuid4().hex, dict[str, socket.socket]()
        with _as_group_errors(), _listening(_path(group_id)) as door:
            if not self.call(group_id, names).local:
                raise GroupError("sockets reach this machine only")
            deadline = time.monotonic() + CHECK_IN_S
            while here.keys() != names and (left := deadline - time.monotonic()) > 0:
                door.settimeout(left)
                with contextlib.suppress(TimeoutError):
                    came, _ = door.accept()
                    came.settimeout(self._timeout_s)
                    here[_name(came)] = came
        leave_out(self._run, names - here.keys())
        if not here:
            raise GroupError(f"nobody answered within {CHECK_IN_S:.0f} s")
        return SocketGroup(list(here.values()), self._timeout_s, sends=True), frozenset(here)

    def join(self, group: Called, name: str, given_up: Callable[[], bool]) -> Group:
        """Connect as soon as somebody listens."""
        mine = socket.socket(socket.AF_UNIX)
        while not given_up():
            try:
                mine.connect(str(_path(group.id)))
                with _as_group_errors():
                    mine.sendall(name.encode().ljust(NAME_BYTES))
                return SocketGroup([mine], self._timeout_s, sends=False)
            except (FileNotFoundError, ConnectionRefusedError):
                time.sleep(POLL_S)
        mine.close()
        raise GroupError("another group was called meanwhile")


def _path(group_id: str) -> Path:
    return Path(tempfile.gettempdir()) / f"relax-hpc-{group_id}.sock"


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """A door that is open to this user alone, and gone when the group is there."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        try:
            os.chmod(path, 0o600)
            door.listen()
            yield door
        finally:
            path.unlink()


def _name(came: socket.socket) -> str:
    said = memoryview(bytearray(NAME_BYTES))
    _receive(came, said)
    return bytes(said).decode().strip()


def _receive(from_: socket.socket, into: memoryview) -> None:
    while into:
        if not (count := from_.recv_into(into)):
            raise GroupError("the other side is gone")
        into = into[count:]


@contextlib.contextmanager
def _as_group_errors() -> Iterator[None]:
    """A member that is gone, or silent for too long."""
    try:
        yield
    except (ConnectionError, TimeoutError) as error:
        raise GroupError(str(error)) from error
