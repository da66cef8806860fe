"""The next request of a worker: guessed while it generates one, so that its prompts' media are decoded meanwhile.

open requests ──the one behind those that the other workers will claim──► its prompts are read ahead ──► claimed by preference
               └──gone (another worker has it)? another is guessed

A wrong guess costs time and nothing else: requests of one batch may be claimed in any order, older batches come first.
"""

from __future__ import annotations

import time

from relax_hpc.data.ahead import PromptLoader
from relax_hpc.spool.queue import RequestQueue

LOOK_EVERY_S = 0.5
"""Seconds between two looks at the open requests; most of them cost one stat."""


class NextRequest:
    """A worker's guess of the request that it will claim next."""

    def __init__(self, queue: RequestQueue, loader: PromptLoader, workers: int) -> None:
        """workers: of the run, which claim from one queue."""
        self._queue, self._loader, self._workers = queue, loader, workers
        self.id, self._looked = "", float("-inf")
        """The request's; empty while there is none."""

    def read_ahead(self) -> None:
        """Have the next request's prompts made, if one is open."""
        if not self._loader.reads_ahead or time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        if self.id and self._queue.is_open(self.id):
            return
        request = self._queue.upcoming(self._workers - 1)
        self.id = request.id if request else ""
        if request is not None:
            self._loader.expect(request.prompts)

    def begun(self) -> None:
        """Forget the guess: a request was claimed."""
        self.id, self._looked = "", float("-inf")
