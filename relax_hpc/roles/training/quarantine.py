"""Quarantine of damaged shards: a shard that no step has taken is put aside and its request generated again. One that a
step takes cannot be replaced.

    SHARDS/REQUEST.h5 ──damaged, not in the ledger──► QUARANTINE/REQUEST.N.damaged, with its reason; the request is open again
                      └─in the ledger──► RunError, on every rank: the run stops
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import publish, sync_folder, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.spool.shard import DamagedShard

MOST = 3
"""Times that a request's shard may be damaged. More is not chance: another generation would end the same way."""


class Quarantine:
    """Rank 0's quarantine for damaged shards. `commit_dir`: the folder of our incarnation; a superseded trainer removes
    nothing."""

    def __init__(self, run: RunDir, commit_dir: Path, say: Callable[..., None]) -> None:
        """say: writes an event down."""
        self._run, self._commit_dir, self.say = run, commit_dir, say

    def put(self, request: str, damage: DamagedShard) -> None:
        """Move a request's published shard to quarantine. Raises RunError when that is in vain."""
        before = len(list(self._run.quarantine.glob(f"{request}.*.damaged")))
        if before >= MOST:
            raise RunError(
                f"{damage}; {before} shards of this request are in '{self._run.quarantine}' already, each damaged after it was written: look at "
                "the file system and at the memory of the nodes, then resume with `relax-hpc run RUN_DIR`"
            )
        quarantine, ours = self._run.quarantine / f"{request}.{before}.damaged", self._commit_dir / f"{request}.damaged"
        os.rename(self._run.shard(request), ours)
        sync_folder(self._run.shard(request).parent)
        os.rename(ours, quarantine)
        reason = {"request": request, "reason": str(damage), "time": time.time()}
        publish(quarantine.with_suffix(".reason.json"), to_json(reason), durable=False)
        logging.getLogger("trainer").warning(
            "the shard of request %s is damaged and in '%s' now: %s", request, quarantine, damage
        )
        self.say(kind="damaged_shard", request=request, times=before + 1, reason=str(damage))


@contextlib.contextmanager
def decided(step: int) -> Iterator[None]:
    """Guard the reading of shards that the ledger entry of `step` names. Raises RunError, which says what a person can
    do."""
    try:
        yield
    except DamagedShard as damage:
        raise RunError(
            f"step {step} trains on a shard that is damaged: {damage}. The ledger names it already, so nothing that is generated now can take "
            "its place: put the file back from a copy and resume, or begin a run of its own at the newest checkpoint "
            "with `relax-hpc run RUN_DIR --fork NAME`"
        ) from damage
