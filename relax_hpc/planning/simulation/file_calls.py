"""File-system calls a second of a run, all its processes together.

Fitted to the table of docs/benchmarks.md, "File operations of whole runs" (2, 8 and 32 workers, 2 requests a second,
and all of them waiting; strace, 2026-11-22). The fit gives that table back within 7 %: a test holds that. How often
waiting workers look is not fitted: it follows files.watch.
"""

from __future__ import annotations

import functools
import math
from itertools import islice

import numpy as np

from relax_hpc.files.watch import LOOKS, SHARED_PAUSE_S, backoff
from relax_hpc.monitor.status import LOOKED_AT

PER_REQUEST = 160.0
"""Calls for a request: released, claimed, published, taken, with its share of a step's weights, ledger and metrics."""
PER_LISTING = 6.0
"""Calls for a waiting worker to list `requests/open` anew after it changed."""
CHANGES = 1.2
"""Changes of `requests/open` for each request: several are released at a time, and claimed one by one."""
PER_WORKER_S = 0.45
"""Calls a second of each worker: its heartbeat."""
PER_LOOKED_AT_S = 2.05
"""Calls a second of the run's live view for each worker it reads; it reads a few at a time."""
PER_RUN_S = 17.3
"""Calls a second of the run itself: the supervisor and its lease."""
PAUSES = 400
"""More pauses than a worker takes until it looks as rarely as it ever does."""


@functools.lru_cache
def pauses(nodes: int) -> tuple[list[float], list[float]]:
    """(seconds looked before each pause, length of each pause) of the poll leader of a node."""
    each = list(islice(backoff(last_s=SHARED_PAUSE_S, watchers=nodes), PAUSES))
    return np.concatenate([[0.0], np.cumsum(each)[:-1]]).tolist(), each


def calls_per_second(workers: int, nodes: int, waiting: float, requests_s: float) -> float:
    """Return calls a second. waiting: mean number of idle workers; requests_s: requests a second."""
    longest_s, looking = pauses(nodes)[1][-1], min(waiting, nodes)
    pause_s = min(longest_s, looking / requests_s / LOOKS) if requests_s else longest_s
    looks = looking / pause_s if looking else 0.0
    listings = looks * -math.expm1(-CHANGES * requests_s * pause_s)
    at_rest = PER_RUN_S + PER_WORKER_S * workers + PER_LOOKED_AT_S * min(workers, LOOKED_AT)
    return at_rest + PER_REQUEST * requests_s + looks + PER_LISTING * listings
