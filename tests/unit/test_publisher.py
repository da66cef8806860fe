"""Shards that are published several at once: they wait for the disk together, and a kill loses none."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.files.node_cache import NodeCache
from relax_hpc.files.run_dir import RunDir
from relax_hpc.spool import publisher
from relax_hpc.spool.publisher import ShardPublisher
from relax_hpc.spool.queue import Claim, RequestQueue
from relax_hpc.spool.request import Request

WORKER = "w"
IMAGE = b"shard" * 1000
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    run.shard("r000000-000").parent.mkdir()
    return run


def claims(run: RunDir, count: int) -> Iterator[Claim]:
    queue = RequestQueue(run)
    queue.open_claim_dir(WORKER)
    queue.put(Request(f"r{k:06d}-000", ((0, k),), 4, k, 0) for k in range(count))
    while claim := queue.claim(WORKER, 0):
        yield claim


def put_all(run: RunDir, count: int, left: list[int]) -> None:
    """Publish `count` shards as a worker does; `left` gets how many are on their way each time that there is room for another."""
    made = ShardPublisher(run, WORKER, NodeCache(run, None))
    for claim in claims(run, count):
        made.put(claim, IMAGE, {})
        for publication in made.ended():
            made.finish(publication)
        left.append(len(made._on_the_way))
    made.close()
    for publication in made.ended():
        made.finish(publication)


def test_as_many_shards_as_there_are_threads_wait_for_the_disk_together(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is flushed before all of them are there to be flushed."""
    together, flush = threading.Barrier(publisher.THREADS), os.fsync

    def flushed_together(handle: int) -> None:
        together.wait(20)
        flush(handle)

    monkeypatch.setattr(os, "fsync", flushed_together)
    put_all(run, publisher.THREADS, [])
    assert len(list(run.shards.rglob("*.h5"))) == publisher.THREADS
    assert not list((run.claimed_requests / WORKER).iterdir())


@pytest.mark.parametrize("large_bytes, most", [(1 << 20, publisher.THREADS - 1), (2 * len(IMAGE), publisher.LARGE - 1)])
def test_fewer_large_shards_are_kept_in_memory(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, large_bytes: int, most: int
) -> None:
    monkeypatch.setattr(publisher, "LARGE_BYTES", large_bytes)
    may_flush, flush, left = threading.Event(), os.fsync, list[int]()

    def flush_late(handle: int) -> None:
        may_flush.wait(0.05)
        flush(handle)

    monkeypatch.setattr(os, "fsync", flush_late)
    put_all(run, 2 * publisher.THREADS, left)
    assert max(left) <= most


def publish_until_killed(root: Path, count: int, begun: Any) -> None:
    begun.set()
    put_all(RunDir(root), count, [])


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03])
def test_a_worker_that_is_killed_leaves_each_request_as_a_whole_shard_or_as_a_claim(
    run: RunDir, after_s: float
) -> None:
    count, begun = 200, FORK.Event()
    process = FORK.Process(target=publish_until_killed, args=(run.root, count, begun))
    process.start()
    begun.wait()
    while not list(run.shards.rglob("r*.h5")):
        time.sleep(0.001)
    time.sleep(after_s)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    shards = {path.stem: path.read_bytes() for path in run.shards.rglob("r*.h5")}
    assert {*shards.values()} == {IMAGE}
    assert {*shards} | {*RequestQueue(run).in_progress()} == {f"r{k:06d}-000" for k in range(count)}
