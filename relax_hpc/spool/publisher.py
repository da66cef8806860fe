"""Publish shards in the background: while they go to the disk, their worker generates the next requests.

    worker ──put──► THREADS threads, a shard each: write, flush, link, flush of the folder ──► `ended`, in the order of `put`

Publishing waits for the disk twice and hardly needs the core. Flushes that several threads ask for at once reach the
file system's journal, or its server, together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from relax_hpc.files.node_cache import NodeCache
from relax_hpc.files.publish import Data
from relax_hpc.files.run_dir import RunDir
from relax_hpc.spool.queue import Claim, publish_shard

THREADS = 4
"""Most shards on their way to the disk at once; each is in memory until it is there."""
LARGE_BYTES = 16 << 20
"""Bytes of all shards on their way, from which on at most LARGE shards may be: they give the disk enough to do."""
LARGE = 2


@dataclass(slots=True)
class Publication:
    """A shard on its way to the disk."""

    claim: Claim
    image: Data
    bytes: int
    about: dict[str, Any]
    seconds: Future[float]
    """Seconds that publishing took; or its error, such as a full disk."""


class ShardPublisher:
    """Publishes a worker's shards, several at once. A claim stays until its shard is there, so a kill loses nothing."""

    def __init__(self, run: RunDir, worker: str, node_cache: NodeCache) -> None:
        self._run, self._worker, self._node_cache = run, worker, node_cache
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="publish")
        self._on_the_way: deque[Publication] = deque()

    def put(self, claim: Claim, image: Data, about: dict[str, Any]) -> None:
        """Begin to publish a claim's shard. `about`: anything that the caller wants back when it ended."""
        size = len(image) if isinstance(image, bytes) else sum(map(len, image))
        seconds = self._threads.submit(self._publish, claim, image)
        self._on_the_way.append(Publication(claim, image, size, about, seconds))

    def ended(self) -> Iterator[Publication]:
        """Yield the publications that ended since the last call, in order; wait until there is room for another."""
        while self._on_the_way and (self._on_the_way[0].seconds.done() or self._is_full()):
            yield self._on_the_way.popleft()

    def _is_full(self) -> bool:
        large = sum(publication.bytes for publication in self._on_the_way) >= LARGE_BYTES
        return len(self._on_the_way) >= (LARGE if large else THREADS)

    def finish(self, publication: Publication) -> float:
        """Return the seconds that publishing took. Raises OSError, such as for a full disk; the next call tries
        again."""
        try:
            return publication.seconds.result()
        except OSError:
            publication.seconds = self._threads.submit(self._publish, publication.claim, publication.image)
            raise

    def _publish(self, claim: Claim, image: Data) -> float:
        began = time.perf_counter()
        if publish_shard(self._run, claim, image, self._worker):
            self._node_cache.put(claim.request.id, image)
        return time.perf_counter() - began

    def close(self) -> None:
        """Wait for all shards that are on their way."""
        self._threads.shutdown()
