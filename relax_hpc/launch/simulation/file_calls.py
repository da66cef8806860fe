"""File-system calls a second of a run, of all its processes together.

Fitted to the two tables of docs/benchmarks.md, "File operations of whole runs" (2, 8 and 32 workers, 2 orders a second, and all
of them waiting; strace, 2026-11-21), which it gives back within 7 %: a test holds that. How often workers that wait look is no
fit, but spool.watch itself.
"""

from __future__ import annotations

import functools
from itertools import islice

import numpy as np

from relax_hpc.spool.watch import backoff

PER_ORDER = 196.0
"""Released, claimed, published, taken, with its share of a step's weights, ledger entry and metrics."""
PER_LISTING = 4.5
"""A worker that waits lists `orders/open` anew after it changed."""
PER_WORKER_S = 1.9
"""A second: heartbeats, written and read, and listings in spite of an unchanged time."""
PER_RUN_S = 20.0
"""A second: the supervisor, its lease."""
PAUSES = 400
"""More than a worker takes to look as rarely as it ever does."""


@functools.lru_cache
def pauses(workers: int) -> tuple[list[float], list[float]]:
    """How long one of `workers` has waited before each of its pauses, and how long the pause is."""
    each = list(islice(backoff(watchers=workers), PAUSES))
    return np.concatenate([[0.0], np.cumsum(each)[:-1]]).tolist(), each


def calls_per_second(workers: int, waiting: float, orders_s: float) -> float:
    """waiting: how many of the workers have nothing to do, on average. orders_s: orders a second."""
    looks = waiting / pauses(workers)[1][-1]
    listings = min(waiting * orders_s, looks)
    return PER_RUN_S + PER_WORKER_S * workers + PER_ORDER * orders_s + looks + PER_LISTING * listings
