"""Load a step's batch: the samples that its ledger entry lets into the loss, from shards and columns. Trainer and
critic both use it.

    every rank: take ──a shard is damaged on one──► repaired from a rank that reads it whole ──► take once more
                                                  └─whole on none──► Damaged, on every rank: the run stops
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from relax_hpc.files.errors import Damaged
from relax_hpc.files.run_dir import RunDir
from relax_hpc.records import Finish, Rollouts, concatenate, mask_old
from relax_hpc.roles.common.columns import read_columns
from relax_hpc.roles.common.quarantine import Quarantine, decided
from relax_hpc.roles.common.ranks import gathered, together
from relax_hpc.spool.ledger import Entry
from relax_hpc.spool.reading import Shards
from relax_hpc.spool.shard import Shard


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's batch, as it was read."""

    rollouts: Rollouts
    masked: int
    """Tokens kept out of the loss for their age (async.on_stale = "mask")."""
    generated: list[NDArray[np.float32]]
    """[samples] raw rewards of each group that was generated, also of those that a filter kept out."""


def load(
    read: Callable[[], Batch], entry: Entry, shard_reader: Shards, quarantine: Quarantine, rank: int, world: int
) -> Batch:
    """Return what `read`, this rank's `load_batch` of `entry`, returns; collective. Raises Damaged or RunError, on every
    rank."""
    while True:
        try:
            return together(read, world)
        except Damaged:
            if not repair(entry, shard_reader, quarantine, rank, world):
                raise


def repair(entry: Entry, shard_reader: Shards, quarantine: Quarantine, rank: int, world: int) -> bool:
    """Put back each shard of a step that one rank finds damaged and another reads whole, as from a copy in its node's
    memory; collective. Return True if there was one, RunError if that is in vain.
    """
    requests = sorted({taken.request for taken in entry.take} | {name.rpartition("/")[0] for name in entry.reused})
    everyone = gathered({request: shard_reader.damage(request) for request in requests}, world)

    def put_back() -> bool:
        found = False
        for request in requests if shard_reader.run == quarantine.run else ():
            said = [f"rank {other}: {damage[request]}" for other, damage in enumerate(everyone) if damage[request]]
            whole = [other for other, damage in enumerate(everyone) if not damage[request]]
            if said and whole:
                found = True
                if rank == whole[0]:
                    quarantine.replace(request, shard_reader, said[0])
        return found

    return together(put_back, world)


def load_batch(
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
        generated = which & (shard.samples["finish"] != Finish.FAILED)
        return shard.rollouts(np.flatnonzero(generated), routed, read_columns(run, shard, columns))

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
