"""A group of torch.distributed over gloo, between processes that come and go.

The store by which they find each other is a file in the run directory, so nothing listens for it (the file system must
have flock). Gloo itself listens: it opens a port on every member, on the interface that GLOO_SOCKET_IFNAME names (on
loopback when all are on one host), without authentication. Anybody who can reach these ports can disturb a broadcast; a
version cannot be forged, since its checksum is in the manifest.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed
from torch import Tensor

from relax_hpc.weights.groups.protocol import Arrived, Group, GroupError, pieces
from relax_hpc.weights.groups.rendezvous import CHECK_IN_S, Called, Rendezvous, leave_out

POLL_S = 0.02
IN_FLIGHT, MESSAGE_BYTES = 8, 4 << 20
"""Messages on their way at once, and bytes of each. A receiver waits for all of them from the same moment on, so that a
time limit is for this many bytes, whatever the tensors' sizes."""
dist: Any = torch.distributed
"""torch.distributed without types: it has none for process groups that are made by hand."""


@contextlib.contextmanager
def _as_group_errors() -> Iterator[None]:
    """Raise torch's errors as GroupError: a store whose file is gone, a member that does not connect."""
    try:
        yield
    except RuntimeError as error:
        raise GroupError(str(error)) from error


class GlooGroup(Group):
    """A gloo group, of which rank 0 sends."""

    def __init__(self, store: Any, rank: int, world: int, timeout_s: float, local: bool) -> None:
        self._timeout = datetime.timedelta(seconds=timeout_s)
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options._threads = self._timeout, IN_FLIGHT
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        if interface:
            device = dist.ProcessGroupGloo.create_device(interface=interface.split(",")[0])
        elif local:
            device = dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        else:
            device = dist.ProcessGroupGloo.create_default_device()
        options._devices = [device]
        self._group = dist.ProcessGroupGloo(store, rank, world, options)

    @_as_group_errors()
    def broadcast(
        self, tensors: Sequence[Tensor], timeout_s: float | None = None, arrived: Arrived = lambda _: None
    ) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = datetime.timedelta(seconds=timeout_s) if timeout_s else self._timeout
        works = [
            [self._group.broadcast([piece], options) for piece in pieces(tensor, MESSAGE_BYTES)] for tensor in tensors
        ]
        for place, under_way in enumerate(works):
            for work in under_way:
                work.wait()
            arrived(place)

    def close(self) -> None:
        del self._group


class GlooRendezvous(Rendezvous):
    """Forms gloo groups, through a file of torch's store."""

    @_as_group_errors()
    def form(self, names: frozenset[str]) -> tuple[Group, frozenset[str]]:
        group_id = uuid.uuid4().hex
        store = self._store(group_id)
        for old in self._run.weights.glob("group-*"):
            if old.name != f"group-{group_id}":
                old.unlink(missing_ok=True)
        group = self.call(group_id, names)
        here: frozenset[str] = frozenset()
        deadline = time.monotonic() + CHECK_IN_S
        while here != names and time.monotonic() < deadline:
            here |= {name for name in names - here if store.check([f"here/{name}"])}
            time.sleep(POLL_S)
        leave_out(self._run, names - here)
        store.set("go", json.dumps(sorted(here)))
        if not here:
            raise GroupError(f"nobody answered within {CHECK_IN_S:.0f} s")
        return self._connected(store, 0, len(here), group), here

    @_as_group_errors()
    def join(self, group: Called, name: str, given_up: Callable[[], bool]) -> Group:
        store = self._store(group.id)
        store.set(f"here/{name}", "")
        while not store.check(["go"]):
            if given_up():
                raise GroupError("another group was called meanwhile")
            time.sleep(POLL_S)
        members = json.loads(store.get("go"))
        if name not in members:
            raise GroupError("answered too late, and was left out")
        return self._connected(store, 1 + members.index(name), len(members), group)

    def _connected(self, store: Any, rank: int, workers: int, group: Called) -> Group:
        return GlooGroup(dist.PrefixStore("gloo", store), rank, 1 + workers, self._timeout_s, group.local)

    def _store(self, group_id: str) -> Any:
        store = dist.FileStore(str(self._run.weights / f"group-{group_id}"))
        store.set_timeout(datetime.timedelta(seconds=self._timeout_s))
        return store
