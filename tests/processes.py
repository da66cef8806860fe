"""Processes for tests that need several: forked from one that has imported what they use, which takes seconds each."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

IMPORTED = ["relax_hpc.trainers.torch", "relax_hpc.trainers.megatron.trainer"]


def context() -> ForkServerContext:
    """Where Process and Queue come from. The environment of the first call is that of all."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(IMPORTED)
    return found
