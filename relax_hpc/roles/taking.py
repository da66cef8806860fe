"""What a step's ledger entry lets into the loss, read from shards and columns: by the trainer, and by a critic that learns from the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relax_hpc.records import mask_old
from relax_hpc.roles.columns import read_columns
from relax_hpc.roles.step_metrics import Batch
from relax_hpc.run_dir import RunDir
from relax_hpc.spool.front import Front
from relax_hpc.spool.ledger import Entry
from relax_hpc.spool.shard import Shard, concatenate


def take(
    entry: Entry, run: RunDir, front: Front, columns: Sequence[str], routed: bool = False, oldest: int | None = None
) -> Batch:
    """The samples, in the order of their ids. Raises DamagedColumn where one of `columns` is gone.

    run: where the columns are; routed: with the experts that tokens were routed to; oldest: tokens of earlier versions are masked.
    """
    parts, played = [], list[NDArray[np.float32]]()
    for taken in entry.take:
        with Shard(front.path(taken.order)) as shard:
            out = [g for g in range(len(shard.groups)) if f"{taken.order}/{g}" in entry.filtered]
            which = np.flatnonzero(~np.isin(shard.samples["group"], out))
            parts.append(shard.rollouts(which, routed, read_columns(run, shard, columns)))
            played += shard.raw_rewards()
    for name in entry.again:
        order, _, group = name.rpartition("/")
        with Shard(front.path(order)) as shard:
            which = np.flatnonzero(shard.samples["group"] == int(group))
            parts.append(shard.rollouts(which, routed, read_columns(run, shard, columns)))
    rollouts = concatenate(parts)
    if oldest is None:
        return Batch(rollouts, 0, played)
    return Batch(*mask_old(rollouts, oldest), played)
