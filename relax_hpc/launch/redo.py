"""Failed groups once more, when a person has mended what they failed of: their orders go back to the open ones.

    shards/ORDER.h5 with failed groups, that no step took ──► aside/ (with the reason)
      "score":    orders/parts/ORDER.pN.h5 has its answers ──► open/ORDER.….pN: a worker reads them, and scores them only
      "generate": nothing else: the trainer misses the order, and asks for it again

Nothing of the run may be at work meanwhile. Killed in between, an order is generated again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relax_hpc.analysis.fates import Fates, read_entries
from relax_hpc.launch.create import Redo
from relax_hpc.recipe import Recipe
from relax_hpc.records import Part, Sample
from relax_hpc.run_dir import RunDir, RunError
from relax_hpc.spool import parts
from relax_hpc.spool.front import Front
from relax_hpc.spool.orders import Order
from relax_hpc.spool.queue import Queue, put_aside
from relax_hpc.spool.shard import Shard


def redo_failed(run: RunDir, recipe: Recipe, how: Redo) -> list[str]:
    """The orders whose failed groups are scored, or generated, again. Where answers are missing that could be scored, "score" generates too."""
    decided, redone = Fates(read_entries(run)).orders, []
    for path in sorted(run.shards.glob("*/*.h5")):
        if path.stem in decided:
            continue
        try:
            with Shard(path) as shard:
                if not shard.groups["failed"].any():
                    continue
                part, order = _whole(shard) if how == "score" else None, _order(shard)
                number, version = int(shard.meta.get("aborts", 0)) + 1, shard.first_version
        except RunError:  # a damaged one: who reads it to train says so
            continue
        if part is not None:
            parts.publish_part(run, order.id, number, version, part)
        Front(run, recipe.spool.front).remove(path.stem)
        put_aside(run, path, f"its failed groups were to be {'scored' if part else 'generated'} again")
        if part is not None:
            Queue(run).put([order], parts=number)
        redone.append(order.id)
    return redone


def _order(shard: Shard) -> Order:
    prompts = tuple((int(row["source"]), int(row["index"])) for row in shard.groups)
    return Order(shard.order, prompts, int(shard.meta["copies"]), int(shard.meta["seed"]), shard.first_version)


def _whole(shard: Shard) -> Part | None:
    """Its answers, with nothing left to generate; None where some of them are missing, or ended by a failure of their own."""
    if not all(reason.startswith("reward ") for reason in shard.meta["reasons"].values()):
        return None
    groups = [replace(shard.group(g), reason="", detail="") for g in range(len(shard.groups))]
    turns = [_begins(sample) for group in groups for sample in group.samples]
    samples = [sample for group in groups for sample in group.samples]
    if len(samples) != len(groups) * shard.meta["copies"] or any(
        len(t) != s.turns for t, s in zip(turns, samples, strict=True)
    ):
        return None
    return Part(groups, turns, cut=[])


def _begins(sample: Sample) -> list[int]:
    """The tokens at which its turns begin: the first, and each that comes after an observation."""
    return [0, *(np.flatnonzero(np.diff(sample.loss_mask.astype(np.int8)) == 1) + 1).tolist()]
