"""Quarantine of damaged shards: a shard that no step has taken is put aside and its request generated again. One that a
step takes can only be put back, as it was, from a node that has it whole.

    SHARDS/REQUEST.h5 ──damaged, not in the ledger──► QUARANTINE/REQUEST.N.damaged, with its reason; the request is open again
                      ├─in the ledger, whole for another rank──► the same, and that rank's copy takes its place
                      └─in the ledger──► Damaged, on every rank: the run stops
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from relax_hpc.files.errors import Damaged, RunError
from relax_hpc.files.publish import publish, sync_folder, to_json, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.spool.reading import Shards
from relax_hpc.spool.shard import DamagedShard, Shard

MOST = 3
"""Times that a request's shard may be damaged. More is not chance: another generation would end the same way."""


class Quarantine:
    """Quarantine for the damaged shards of a run. `commit_dir`: the folder of our incarnation; a superseded trainer
    removes nothing."""

    def __init__(self, run: RunDir, commit_dir: Path, say: Callable[..., None]) -> None:
        """say: writes an event down."""
        self.run, self._commit_dir, self.say = run, commit_dir, say

    def put(self, request: str, damage: DamagedShard) -> None:
        """Move a request's published shard to quarantine. Raises RunError when that is in vain."""
        quarantine, ours = self._next(request, str(damage)), self._commit_dir / f"{request}.damaged"
        os.rename(self.run.shard(request), ours)
        sync_folder(self.run.shard(request).parent)
        os.rename(ours, quarantine)
        self._say_why(quarantine, request, str(damage))

    def replace(self, request: str, shard_reader: Shards, damage: str) -> None:
        """Put what this process reads as a request's shard in the place of the published file, which goes to
        quarantine. Raises RunError when that is in vain."""
        quarantine, ours = self._next(request, damage), self._commit_dir / f"{request}.whole"
        with shard_reader.opened(request) as whole:
            write_file(ours, whole.path.read_bytes())
        with Shard(ours) as written:
            written.validate()
        with contextlib.suppress(FileExistsError):  # trainer and critic may do the same at the same moment
            os.link(self.run.shard(request), quarantine)
        # At no time is there no shard: nothing could be generated in its place.
        os.rename(ours, self.run.shard(request))
        sync_folder(self.run.shard(request).parent)
        self._say_why(quarantine, request, damage)

    def _next(self, request: str, damage: str) -> Path:
        """Return the quarantined name of a request's next damaged shard."""
        before = len(list(self.run.quarantine.glob(f"{request}.*.damaged")))
        if before >= MOST:
            raise RunError(
                f"{damage}; {before} shards of this request are in '{self.run.quarantine}' already, each damaged after it was written: look at "
                "the file system and at the memory of the nodes, then resume with `relax-hpc run RUN_DIR`"
            )
        return self.run.quarantine / f"{request}.{before}.damaged"

    def _say_why(self, quarantine: Path, request: str, damage: str) -> None:
        reason = {"request": request, "reason": damage, "time": time.time()}
        publish(quarantine.with_suffix(".reason.json"), to_json(reason), durable=False)
        logging.getLogger("trainer").warning(
            "the shard of request %s is damaged and in '%s' now: %s", request, quarantine, damage
        )
        times = int(quarantine.stem.rpartition(".")[2]) + 1
        self.say(kind="damaged_shard", request=request, times=times, reason=damage)


@contextlib.contextmanager
def decided(step: int) -> Iterator[None]:
    """Guard the reading of shards that the ledger entry of `step` names. Raises Damaged, which says what a person can
    do."""
    try:
        yield
    except DamagedShard as damage:
        raise Damaged(
            f"step {step} trains on a shard that is damaged: {damage}. The ledger names it already, so nothing that is generated now can take "
            "its place: put the file back from a copy and resume, or begin a run of its own at the newest checkpoint "
            "with `relax-hpc run RUN_DIR --fork NAME`"
        ) from damage
