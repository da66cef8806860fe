"""One process of the weights benchmark, the trainer's or a worker's: `python weights.py` serves requests (see child.py)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import child
import psutil
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from relax_hpc.files.publish import replace
from relax_hpc.files.run_dir import RunDir
from relax_hpc.files.tensor_files import as_bytes
from relax_hpc.weights import (
    RENDEZVOUS,
    CollectivePublisher,
    CollectiveReceiver,
    FilePublisher,
    FileReceiver,
    Publisher,
    Receiver,
    WeightsError,
)
from relax_hpc.weights.groups.mpi_process import begin

LIMIT_S = 30.0
LAYERS, EMBEDDING = 24, 0.2
"""A language model's proportions: so many layers of seven matrices and two vectors, and the embedding's share of the bytes."""
VECTOR = 1024
POLL_S = 0.002
SPEAKS = {"collective": "gloo", "mpi": "mpi"}


def model(megabytes: float, seed: int) -> dict[str, Tensor]:
    """So many bytes of bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    total = int(megabytes * 1e6) // 2
    sizes = {"embedding": int(total * EMBEDDING)}
    matrix = int(total * (1 - EMBEDDING)) // (LAYERS * 7) - 2 * VECTOR // 7
    for layer in range(LAYERS):
        sizes |= {f"layer.{layer}.{i}": matrix if i < 7 else VECTOR for i in range(9)}
    return {name: torch.randn(size, generator=generator).bfloat16() for name, size in sizes.items()}


class RawGloo:
    """One broadcast of torch.distributed's."""

    def __init__(self, store: str, rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", store=FileStore(store, 2), rank=rank, world_size=2)

    def broadcast(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, 0)


@dataclass
class RawMpi:
    """One Isend, one Irecv, in the process that has the bytes."""

    peer: Any
    mpi: Any
    sends: bool
    job: subprocess.Popen[str]

    def broadcast(self, tensors: list[Tensor]) -> None:
        move = self.peer.Isend if self.sends else self.peer.Irecv
        for request in [move([as_bytes(tensor), self.mpi.BYTE], 0, 0) for tensor in tensors]:
            while not request.Test():
                pass


class Side:
    """The trainer has a model and publishes it; a worker has an engine's weights, into which it takes what comes."""

    def prepare(self, root: str, name: str, megabytes: float) -> None:
        self.run, self.name = RunDir(root), name
        self.tensors = model(megabytes, seed=0)
        self.flat = torch.empty(sum(t.nbytes for t in self.tensors.values()), dtype=torch.uint8)
        self.flat.fill_(1)
        self.publisher: Publisher | None = None
        self.receiver: Receiver | None = None
        self.raw: Any = None

    def open_trainer(self, transport: str, options: dict[str, Any]) -> None:
        (commit_dir := self.run.root / f"via-{transport}").mkdir(exist_ok=True)
        node_cache = Path(options.pop("node_cache")) if "node_cache" in options else None
        if transport in SPEAKS:
            rendezvous = RENDEZVOUS[SPEAKS[transport]](self.run, LIMIT_S, commit_dir)
            publisher = CollectivePublisher(self.run, commit_dir, 1, rendezvous, **options)
            while publisher.line is None:
                publisher.wanted()
                time.sleep(POLL_S)
            self.publisher = publisher
        else:
            self.publisher = FilePublisher(self.run, commit_dir, 1, node_cache=node_cache, **options)

    def open_worker(self, transport: str, node_cache: str | None = None) -> None:
        if transport in SPEAKS:
            self.receiver = CollectiveReceiver(self.run, self.name, RENDEZVOUS[SPEAKS[transport]](self.run, LIMIT_S))
        else:
            self.receiver = FileReceiver(self.run, Path(node_cache) if node_cache else None)

    def close(self) -> None:
        for each in (self.publisher, self.receiver):
            if each is not None:
                each.close()
        self.publisher = self.receiver = self.raw = None

    def change(self, share: float, seed: int) -> None:
        """As a step does: so many of the weights get other bits."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.tensors.values():
            count = max(1, int(tensor.numel() * share))
            at = torch.randint(tensor.numel(), (count,), generator=generator)
            tensor.view(torch.int16)[at] ^= 1

    def publish(self, number: int) -> tuple[float, float]:
        """When it began and when the trainer could go on."""
        assert self.publisher is not None
        began = time.perf_counter()
        self.publisher.publish(number, self.tensors.items)
        return began, time.perf_counter()

    def hold(self, number: int) -> float:
        """When version `number` was there, verified, for the engine to take."""
        assert self.receiver is not None
        while (newest := self.receiver.newest()) is None or newest.number < number:
            time.sleep(POLL_S / 10)
        while True:
            with contextlib.suppress(WeightsError), self.receiver.fetch(newest) as tensors:
                there = time.perf_counter()
                for name, tensor in tensors:
                    self.tensors[name].copy_(tensor)
                return there
            time.sleep(POLL_S)

    def raw_gloo(self, rank: int, store: str) -> None:
        self.raw = RawGloo(store, rank)

    def raw_mpi(self, rank: int, store: str) -> None:
        """Connected by a port, like ours: the worker accepts."""
        port, (mpi, job) = Path(store), begin()
        if rank:
            replace(port, (name := mpi.Open_port()).encode())
            peer = mpi.COMM_SELF.Accept(name)
        else:
            while not port.exists():
                time.sleep(POLL_S)
            peer = mpi.COMM_SELF.Connect(port.read_text())
        self.raw = RawMpi(peer, mpi, rank == 0, job)

    def raw_broadcast(self, verified: bool) -> tuple[float, float]:
        """The same bytes, flat already, in one call."""
        began = time.perf_counter()
        self.raw.broadcast([self.flat])
        self._verify(verified)
        return began, time.perf_counter()

    def _verify(self, verified: bool) -> None:
        if verified:
            xxhash.xxh3_128_digest(as_bytes(self.flat).data)

    def raw_write(self, path: str, verified: bool) -> tuple[float, float]:
        """The same bytes, flat already, into one file, and onto the disk."""
        began = time.perf_counter()
        self._verify(verified)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        view = memoryview(as_bytes(self.flat).data)
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
        os.close(handle)
        return began, time.perf_counter()

    def raw_read(self, path: str, verified: bool) -> float:
        with open(path, "rb", buffering=0) as file:
            view = memoryview(as_bytes(self.flat).data)
            while view and (count := file.readinto(view)):
                view = view[count:]
        os.unlink(path)
        self._verify(verified)
        return time.perf_counter()

    def peak_bytes(self, number: int) -> int:
        """Memory that publishing a version needs over what the process has; the export copies each tensor, as a trainer's does."""
        assert self.publisher is not None

        def export() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.tensors.items():
                yield name, tensor.clone()

        before = psutil.Process().memory_info().rss
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
        self.publisher.publish(number, export)
        status = Path("/proc/self/status").read_text()
        (high,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        return int(high * 1024 - before)


if __name__ == "__main__":
    torch.set_num_threads(1)
    side = Side()
    handlers: dict[str, Callable[..., Any]] = {
        name: getattr(side, name) for name in dir(Side) if not name.startswith("_")
    }
    child.serve(handlers)
