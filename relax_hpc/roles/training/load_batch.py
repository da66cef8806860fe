"""Load a step's batch: the samples that its ledger entry lets into the loss, from shards and columns. Trainer and
critic both use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from relax_hpc.files.run_dir import RunDir
from relax_hpc.records import Rollouts, mask_old
from relax_hpc.roles.training.columns import read_columns
from relax_hpc.roles.training.quarantine import decided
from relax_hpc.roles.training.step_metrics import Batch
from relax_hpc.spool.ledger import Entry
from relax_hpc.spool.reading import Shards
from relax_hpc.spool.shard import Shard, concatenate


def take(
    entry: Entry,
    run: RunDir,
    shard_reader: Shards,
    columns: Sequence[str],
    routed: bool = False,
    oldest: int | None = None,
) -> Batch:
    """Load the samples, in the order of their ids. Raises DamagedColumn if one of `columns` is gone, RunError if a
    shard is damaged.

    run: where the columns are; routed: with the experts that tokens were routed to; oldest: tokens of earlier versions
    are masked.
    """

    def of(shard: Shard, which: NDArray[np.bool_]) -> Rollouts:
        return shard.rollouts(np.flatnonzero(which), routed, read_columns(run, shard, columns))

    def taken_from(shard: Shard) -> tuple[Rollouts, list[NDArray[np.float32]]]:
        out = [g for g in range(len(shard.groups)) if f"{shard.request}/{g}" in entry.filtered]
        return of(shard, ~np.isin(shard.samples["group"], out)), shard.raw_rewards()

    def group_of(group: int, shard: Shard) -> Rollouts:
        return of(shard, shard.samples["group"] == group)

    with decided(entry.step):
        taken = [shard_reader.read(each.request, taken_from) for each in entry.take]
        reused = [
            shard_reader.read(request, partial(group_of, int(group)))
            for request, _, group in (name.rpartition("/") for name in entry.reused)
        ]
    rollouts = concatenate([*(part for part, _ in taken), *reused])
    generated = [rewards for _, groups in taken for rewards in groups]
    if oldest is None:
        return Batch(rollouts, 0, generated)
    return Batch(*mask_old(rollouts, oldest), generated)
