"""Make failed groups once more, when a person has mended the cause: their requests become open again.

    shards/REQUEST.h5 with failed groups, that no step took ──► quarantine/ (with the reason)
      "score":    requests/partial/REQUEST.pN.h5 has its answers ──► open/REQUEST.….pN: a worker reads them, and scores them only
      "generate": nothing else: the trainer misses the request, and asks for it again

No process of the run may be at work meanwhile. Killed in between, a request is generated again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from relax_hpc.files.errors import RunError
from relax_hpc.files.node_cache import NodeCache
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch.resume import Redo
from relax_hpc.monitor.analysis.statuses import GroupStatuses, read_entries
from relax_hpc.recipe import Recipe
from relax_hpc.records import PartialRollout, Sample
from relax_hpc.spool import partial_rollouts
from relax_hpc.spool.queue import RequestQueue, move_to_quarantine
from relax_hpc.spool.request import Request
from relax_hpc.spool.shard import Shard


def redo_failed(run: RunDir, recipe: Recipe, how: Redo) -> list[str]:
    """Return the requests whose failed groups are scored, or generated, again. If answers to be scored are missing,
    "score" generates too."""
    decided, redone = GroupStatuses(read_entries(run)).requests, []
    for path in sorted(run.shards.glob("*/*.h5")):
        if path.stem in decided:
            continue
        try:
            with Shard(path) as shard:
                if not shard.groups["failed"].any():
                    continue
                partial, request = _whole(shard) if how == "score" else None, _request(shard)
                number, version = int(shard.meta.get("aborts", 0)) + 1, shard.first_version
        except RunError:  # damaged: the trainer reports it when it reads it
            continue
        if partial is not None:
            partial_rollouts.publish_part(run, request.id, number, version, partial)
        NodeCache(run, recipe.spool.node_cache).remove(path.stem)
        move_to_quarantine(run, path, f"its failed groups were to be {'scored' if partial else 'generated'} again")
        if partial is not None:
            RequestQueue(run).put([request], aborts=number)
        redone.append(request.id)
    return redone


def _request(shard: Shard) -> Request:
    prompts = tuple((int(row["source"]), int(row["index"])) for row in shard.groups)
    return Request(
        shard.request, prompts, int(shard.meta["samples_per_prompt"]), int(shard.meta["seed"]), shard.first_version
    )


def _whole(shard: Shard) -> PartialRollout | None:
    """Return the request's answers with nothing left to generate; None if some are missing, or ended by a failure of
    their own."""
    if not all(reason.startswith("reward ") for reason in shard.meta["reasons"].values()):
        return None
    groups = [replace(shard.group(g, media=False), reason="", detail="") for g in range(len(shard.groups))]
    turns = [_begins(sample) for group in groups for sample in group.samples]
    samples = [sample for group in groups for sample in group.samples]
    if len(samples) != len(groups) * shard.meta["samples_per_prompt"] or any(
        len(t) != s.turns for t, s in zip(turns, samples, strict=True)
    ):
        return None
    return PartialRollout(groups, turns, cut=[])


def _begins(sample: Sample) -> list[int]:
    """Return the indices of the tokens at which the sample's turns begin: the first, and each that comes after an
    observation."""
    return [0, *(np.flatnonzero(np.diff(sample.loss_mask.astype(np.int8)) == 1) + 1).tolist()]
