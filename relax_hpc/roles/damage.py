"""Damaged shards: one that no step has taken yet is put aside and its order played again; of one that a step takes, nothing can take the place.

SHARDS/ORDER.h5 ──damaged, not in the ledger──► ASIDE/ORDER.N.damaged, with its reason; the order is open again
                └─in the ledger──► RunError, on every rank: the run stops
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from relax_hpc.run_dir import RunDir, RunError, publish, sync_folder, to_json
from relax_hpc.spool.shard import DamagedShard

MOST = 3
"""Times that an order's shard may be damaged: then it is not chance, and playing it once more would end the same way."""


class Quarantine:
    """Where rank 0 puts damaged shards. `via`: the folder of our incarnation; a superseded trainer removes nothing."""

    def __init__(self, run: RunDir, via: Path, say: Callable[..., None]) -> None:
        """say: writes an event down."""
        self._run, self._via, self.say = run, via, say

    def put(self, order: str, damage: DamagedShard) -> None:
        """Put the published shard of an order aside. Raises RunError when that is in vain."""
        before = len(list(self._run.aside.glob(f"{order}.*.damaged")))
        if before >= MOST:
            raise RunError(
                f"{damage}; {before} shards of this order are in '{self._run.aside}' already, each damaged after it was written: look at "
                "the file system and at the memory of the nodes, then resume with `relax-hpc run RUN_DIR`"
            )
        aside, ours = self._run.aside / f"{order}.{before}.damaged", self._via / f"{order}.damaged"
        os.rename(self._run.shard(order), ours)
        sync_folder(self._run.shard(order).parent)
        os.rename(ours, aside)
        reason = {"order": order, "reason": str(damage), "time": time.time()}
        publish(aside.with_suffix(".reason.json"), to_json(reason), durable=False)
        logging.getLogger("trainer").warning(
            "the shard of order %s is damaged and in '%s' now: %s", order, aside, damage
        )
        self.say(kind="damaged_shard", order=order, times=before + 1, reason=str(damage))


@contextlib.contextmanager
def decided(step: int) -> Iterator[None]:
    """Whatever reads shards that the ledger's entry of `step` names. Raises RunError, which says what a person can do."""
    try:
        yield
    except DamagedShard as damage:
        raise RunError(
            f"step {step} trains on a shard that is damaged: {damage}. The ledger names it already, so nothing that is played now can take "
            "its place: put the file back from a copy and resume, or begin a run of its own at the newest checkpoint "
            "with `relax-hpc run RUN_DIR --fork NAME`"
        ) from damage
