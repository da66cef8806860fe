"""Publishing beside the work: while a shard goes to the disk, its worker plays the next order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from relax_hpc.run_dir import Data, RunDir
from relax_hpc.spool.front import Front
from relax_hpc.spool.queue import Claim, publish_shard

IN_FLIGHT = 2
"""Shards on their way to the disk: each is in memory as long."""


@dataclass(slots=True)
class Publication:
    """A shard on its way."""

    claim: Claim
    image: Data
    about: dict[str, Any]
    seconds: Future[float]
    """What it took; or the error, such as a full disk."""


class ShardPublisher:
    """Publishes a worker's shards in one thread, in order. The claim stays until the shard is there: a kill loses nothing."""

    def __init__(self, run: RunDir, worker: str, front: Front) -> None:
        self._run, self._worker, self._front = run, worker, front
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._on_the_way: deque[Publication] = deque()

    def put(self, claim: Claim, image: Data, about: dict[str, Any]) -> None:
        """Begin to publish. `about`: whatever the caller wants to know when it ended."""
        self._on_the_way.append(Publication(claim, image, about, self._thread.submit(self._publish, claim, image)))

    def ended(self) -> Iterator[Publication]:
        """What ended since the last call, in order; waits until fewer than IN_FLIGHT are on their way."""
        while self._on_the_way and (self._on_the_way[0].seconds.done() or len(self._on_the_way) >= IN_FLIGHT):
            yield self._on_the_way.popleft()

    def finish(self, publication: Publication) -> float:
        """Seconds that the publishing took. Raises OSError where there was no room; the next call tries again."""
        try:
            return publication.seconds.result()
        except OSError:
            publication.seconds = self._thread.submit(self._publish, publication.claim, publication.image)
            raise

    def _publish(self, claim: Claim, image: Data) -> float:
        began = time.perf_counter()
        if publish_shard(self._run, claim, image, self._worker):
            self._front.put(claim.order.id, image)
        return time.perf_counter() - began

    def close(self) -> None:
        """Wait for what is on its way."""
        self._thread.shutdown()
