"""Our side of the spool benchmark: a process that publishes shards, or one that reads them, and the raw file beside them.

`python ours.py` serves requests (see child.py); `python ours.py --traced N --root DIR` writes, publishes and reads one request
of N samples between two marker calls, for strace to count what lies between them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import child
import numpy as np
import payload
from numpy.typing import NDArray

from relax_hpc.files.node_cache import NodeCache
from relax_hpc.files.publish import publish, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.files.watch import FolderWatch, backoff
from relax_hpc.records import Finish, Group, Prompt, Sample
from relax_hpc.spool import checked
from relax_hpc.spool.checked import Rows
from relax_hpc.spool.index import Index
from relax_hpc.spool.publisher import ShardPublisher
from relax_hpc.spool.queue import Claim, RequestFile
from relax_hpc.spool.request import Request
from relax_hpc.spool.shard import Shard
from relax_hpc.spool.shard_writer import encode

GROUP = 8
PROMPT_TOKENS = 64


def groups_of(data: payload.Payload) -> list[Group]:
    """The payload as a rollout worker holds it: groups of 8 samples with arrays of their own (and a prompt, on top)."""
    cuts = list(zip(data.offsets[:-1].tolist(), data.offsets[1:].tolist(), strict=True))
    samples = [
        Sample(
            data.tokens[a:b].copy(),
            data.loss_mask[a:b].copy(),
            data.logprobs[a:b].copy(),
            [(0, 7)],
            Finish.STOP,
            float(r),
            float(r),
        )
        for (a, b), r in zip(cuts, data.rewards, strict=True)
    ]
    prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)
    return [
        Group(Prompt(0, i, "a question", prompt, "42"), samples[i : i + GROUP]) for i in range(0, len(samples), GROUP)
    ]


class Side:
    """Producer or consumer; `root` is the folder that both use, each has its own copy of the payload."""

    def __init__(self) -> None:
        self.root = self.folder = Path()
        self.run = RunDir("")

    def prepare(self, root: str, samples: int, batch: int) -> int:
        """Make the payload and cut it into requests of `batch` samples; returns its bytes."""
        self.root = Path(root)
        self.run = RunDir(root)
        self.run.create()
        (self.run.claimed_requests / "producer").mkdir(exist_ok=True)
        self.folder = self.run.shards / "0000"  # there already, as it is for all but the first of dozens of requests
        self.folder.mkdir(exist_ok=True)
        data = payload.make(samples)
        groups = groups_of(data)
        per_request = batch // GROUP
        self.requests = [groups[i : i + per_request] for i in range(0, len(groups), per_request)]
        self.expected = data.sums()
        self.flat = b"".join(a.tobytes() for a in (data.tokens, data.logprobs, data.loss_mask, data.rewards))
        self.split = np.cumsum([data.tokens.nbytes, data.logprobs.nbytes, data.loss_mask.nbytes])
        return int(data.nbytes)

    def put(self, number: int) -> float:
        """Seconds from per-sample arrays to shards that are durable and visible under their names."""
        return self.publish(self.claim_all(number))

    def publish(self, claims: list[Claim]) -> float:
        publisher = ShardPublisher(self.run, "producer", NodeCache(self.run, None))
        begin = time.perf_counter()
        for claim, groups in zip(claims, self.requests, strict=True):
            publisher.put(claim, encode(claim.request.id, groups, {"attempt": 1, "version": 7}), {})
            for publication in publisher.ended():
                publisher.finish(publication)
        publisher.close()
        for publication in publisher.ended():
            publisher.finish(publication)
        return time.perf_counter() - begin

    def claim_all(self, number: int) -> list[Claim]:
        """Claims on all requests, as a worker holds them."""
        claims = []
        for i in range(len(self.requests)):
            request_file = RequestFile(f"r{number:06d}-{i:03d}", 0, 7)
            path = self.run.claimed_requests / "producer" / request_file.name
            path.write_bytes(b"{}")
            claims.append(Claim(Request(request_file.request_id, (), GROUP, 0, 7), request_file, path))
        return claims

    def get(self, check: bool = True) -> tuple[float, float]:
        """Seconds, and those of this process's CPU, from listing the folder to having read and summed every value of every shard in it.

        Without `check`, nothing is compared with a checksum, and no index with its bounds.
        """
        with contextlib.nullcontext() if check else without_checks():
            return self._get()

    def _get(self) -> tuple[float, float]:
        sums = np.zeros(4)
        begin, cpu_begin = time.perf_counter(), time.process_time()
        for name in sorted(FolderWatch(self.folder).names()):
            sums += read(self.folder / name)
        seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        if not payload.agree(sums.tolist(), self.expected):
            raise AssertionError(f"read {sums.tolist()}, expected {self.expected}")
        return seconds

    def remove(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()

    def raw_put(self, number: int) -> float:
        """Seconds to write the payload's bytes, flat already, into one file and fsync it."""
        begin = time.perf_counter()
        write_file(self.root / f"raw-{number:04d}", self.flat)
        return time.perf_counter() - begin

    def raw_get(self, number: int) -> float:
        """Seconds to read that file and sum its values."""
        path = self.root / f"raw-{number:04d}"
        begin = time.perf_counter()
        tokens, logprobs, mask, rewards = np.split(np.fromfile(path, np.uint8), self.split)
        sums = [tokens.view(np.int32).sum(dtype=np.int64), mask.sum(dtype=np.int64),
                logprobs.view(np.float32).sum(dtype=np.float64), rewards.view(np.float32).sum(dtype=np.float64)]  # fmt: skip
        seconds = time.perf_counter() - begin
        path.unlink()
        if not payload.agree([float(s) for s in sums], self.expected):
            raise AssertionError(f"read {sums}, expected {self.expected}")
        return seconds

    def publish_stream(self, count: int, mean_wait_s: float) -> dict[str, float]:
        """Publish `count` shards at random moments; the clock's time at the beginning of each publishing, by name."""
        random = np.random.default_rng(0)
        image = encode("s000000-000", self.requests[0], {"attempt": 1, "version": 7})
        begun = {}
        for i in range(count):
            time.sleep(random.exponential(mean_wait_s))
            name = f"s{i:06d}-000.h5"
            begun[name] = time.monotonic()
            publish(self.folder / name, image)
        return begun

    def read_stream(self, count: int) -> dict[str, float]:
        """Poll as the trainer does, read what is new; the clock's time when each shard's values were read, by name."""
        watch, read_at = FolderWatch(self.folder), dict[str, float]()
        waits = backoff()
        while len(read_at) < count:
            if new := watch.names() - read_at.keys():
                for name in sorted(new):
                    read(self.folder / name)
                    read_at[name] = time.monotonic()
                waits = backoff()
            else:
                time.sleep(next(waits))
        self.remove()
        return read_at


@contextlib.contextmanager
def without_checks() -> Iterator[None]:
    """Shards are read as they are, each column in one piece: what the price of checking is measured against."""

    def whole(self: checked.Checked, pieces: Sequence[Rows]) -> NDArray[Any]:
        array, done = np.empty(sum(end - begin for begin, end in pieces), self._dtype), 0
        for begin, end in pieces:
            self._dataset.read(begin, array[done : done + end - begin])
            done += end - begin
        return array

    with patch.object(checked.Checked, "read", whole), patch.object(Index, "__post_init__", lambda self: None):
        yield


def read(path: Path) -> list[float]:
    """The sums over tokens, loss mask, logprobs and rewards of a shard: every value is touched."""
    with Shard(path) as shard:
        rollouts = shard.rollouts()
        return [float(rollouts.tokens.sum(dtype=np.int64)), float(rollouts.loss_mask.sum(dtype=np.int64)),
                float(rollouts.logprobs.sum(dtype=np.float64)), float(rollouts.rewards.sum(dtype=np.float64))]  # fmt: skip


def traced(root: str, samples: int) -> None:
    """One request after a first one that warms up imports and caches; only the second lies between the markers."""
    side = Side()
    side.prepare(root, samples, samples)
    for number in (0, 1):
        claims = side.claim_all(number)
        os.access(payload.MARKER_BEGIN if number else "/", os.F_OK)
        side.publish(claims)
        side.get()
        os.access(payload.MARKER_END if number else "/", os.F_OK)
        side.remove()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--traced", type=int, metavar="N")
    arguments.add_argument("--root")
    given = arguments.parse_args()
    if given.traced:
        traced(given.root, given.traced)
        return
    side = Side()
    names = ("prepare", "put", "get", "remove", "raw_put", "raw_get", "publish_stream", "read_stream")
    handlers: dict[str, Callable[..., Any]] = {name: getattr(side, name) for name in names}
    child.serve(handlers)


if __name__ == "__main__":
    main()
