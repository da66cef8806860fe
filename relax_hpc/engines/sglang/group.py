"""A torch.distributed group for weights to a server that shares no folder with us: we are rank 0, it has the others.

    begin_update, its status checked ──► HTTP says what comes, gloo brings it, bucket by bucket ──► end_update

The group's store and gloo listen, without authentication, on the address by which we reach the server. Anybody who can
reach these ports can disturb a load.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed
import urllib3
from torch import Tensor

from relax_hpc.engines.base import EngineError
from relax_hpc.engines.sglang.client import Client
from relax_hpc.files.tensor_files import as_bytes, buckets

BUCKET_BYTES = 256 << 20
"""Bytes that are copied together, on both sides, to be sent as one."""
LIMIT_S = 60.0
"""Time limit in seconds for all to join, and for one bucket."""
POLL_S = 0.002
dist: Any = torch.distributed
c10d: Any = torch.distributed.distributed_c10d
"""A group without a default one has no public function in torch; this does the same as SGLang's own side."""


class UpdateGroup:
    """A group of this process and `ranks` processes of a server."""

    def __init__(self, client: Client, ranks: int) -> None:
        """Form the group. Raises EngineError."""
        self._client, self._name = client, f"relax_hpc-{uuid.uuid4().hex}"
        self._threads = ThreadPoolExecutor(1, "sglang-group")
        world, limit = 1 + ranks, datetime.timedelta(seconds=LIMIT_S)
        listener = _listener(client.address)
        host, port = listener.getsockname()[:2]
        store = dist.TCPStore(host, port, world, True, limit, False, master_listen_fd=listener.detach())
        joined = self._threads.submit(client.join_group, host, port, 1, world, self._name, "gloo")
        try:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = limit
            self._group, _ = c10d._new_process_group_helper(
                world, 0, [], dist.Backend("gloo"), dist.PrefixStore(self._name, store), self._name,
                backend_options=options, timeout=limit,
            )  # fmt: skip
            c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(world)}
            joined.result()
        except RuntimeError as error:
            said = joined.exception() if joined.done() else None
            raise EngineError(
                f"SGLang at {client.address} did not join a group at {host}:{port} within {LIMIT_S:.0f} s: {said or error}"
            ) from error

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Send a version between `begin_update` and `end_update`. Raises EngineError; the group is of no use then."""
        for bucket in buckets(tensors.items(), BUCKET_BYTES):
            names, parts = zip(*bucket, strict=True)
            flat = torch.from_numpy(np.concatenate([as_bytes(part) for part in parts]))
            dtypes, shapes = [str(part.dtype).removeprefix("torch.") for part in parts], [part.shape for part in parts]
            answer = self._threads.submit(self._client.receive, names, dtypes, shapes, self._name)
            try:
                work = dist.broadcast(flat, 0, self._group, async_op=True)
                while not work.is_completed():
                    if answer.done() and answer.exception() is not None:
                        break  # it takes nothing: gloo would wait for it
                    time.sleep(POLL_S)
                else:
                    work.wait()
                answer.result()
            except RuntimeError as error:
                raise EngineError(f"SGLang at {self._client.address} did not receive its weights: {error}") from error

    def close(self) -> None:
        with contextlib.suppress(EngineError):
            self._client.leave_group(self._name)
        dist.destroy_process_group(self._group)
        self._threads.shutdown(wait=False)


def _listener(address: str) -> socket.socket:
    """Open a socket that listens where the server at `address` can reach us, and nowhere else."""
    url = urllib3.util.parse_url(address)
    kind, _, _, _, target = socket.getaddrinfo(url.host, url.port or 80, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing
        host = probe.getsockname()[0]
    listener = socket.socket(kind)
    listener.bind((host, 0))
    listener.listen()
    return listener
