"""Partial rollouts as files: what was generated of a request that is given back, so that another worker goes on from
it.

    claimed/W/REQUEST.a0.v5 ──publish──► partial/REQUEST.p1.h5 ──rename the claim──► open/REQUEST.a0.v5.p1 ──claim──► read, go on

The file is laid out, published and checked like a shard. The request file's name says which one to go on from (.p1), so
a request that was never given back costs nothing. Of the prompts' media it has the digests: whoever goes on makes the
prompts again, and is refused where they show something else by now. Any partial rollout of a request is a valid one, since all of a
request follows from its name: a worker that finds the number taken adopts that file. A missing or damaged one costs its
tokens only.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import names, publish
from relax_hpc.files.run_dir import RunDir
from relax_hpc.records import Failure, Group, PartialRollout, Prompt, with_experts
from relax_hpc.spool.queue import Claim, RequestFile, RequestQueue
from relax_hpc.spool.request import Request
from relax_hpc.spool.shard import Shard
from relax_hpc.spool.shard_writer import Compression, encode


def put_back(run: RunDir, queue: RequestQueue, claim: Claim, partial: PartialRollout, compression: Compression) -> bool:
    """Publish a claim's partial rollout and open the claim again. Return False if another worker's had been published
    before."""
    number = claim.request_file.aborts + 1
    mine = publish_part(run, claim.request.id, number, claim.request_file.version, partial, compression)
    if queue.put_back(claim, aborts=number) and claim.request_file.aborts:
        run.partial_rollout(claim.request.id, claim.request_file.aborts).unlink(missing_ok=True)
    return mine


def publish_part(
    run: RunDir, request_id: str, number: int, version: int, partial: PartialRollout, compression: Compression = "none"
) -> bool:
    """Publish a request's partial rollout, whose first token was made by `version`. Return False if another's had been
    published before."""
    failures = {str(i): [failure.reason, failure.detail] for i, failure in partial.failures.items()}
    environments = {str(i): text for i, text in partial.environments.items()}
    meta = {
        "run": run.read_id(), "version": version, "turns": partial.turns, "cut": partial.cut, "failures": failures,
        "environments": environments,
    }  # fmt: skip
    image = encode(request_id, with_experts(partial.groups), meta, compression, kept="digest")
    return publish(run.partial_rollout(request_id, number), image)


def read(
    run: RunDir, request: Request, request_file: RequestFile, prompts: Sequence[Prompt] | None = None
) -> PartialRollout | None:
    """Return a claimed request's partial rollout; None if it is generated from its beginning: none was kept, it is
    damaged, or it is of other media than the request's `prompts` show now."""
    if not request_file.aborts:
        return None
    try:
        with Shard(run.partial_rollout(request.id, request_file.aborts)) as shard:
            shard.check_owner(request.id, run.read_id())
            shard.validate()
            groups = [shard.group(g, media=False) for g in range(len(shard.groups))]
            failures = {int(i): Failure(*said) for i, said in shard.meta["failures"].items()}
            environments = {int(i): text for i, text in shard.meta.get("environments", {}).items()}
            partial = PartialRollout(groups, shard.meta["turns"], shard.meta["cut"], failures, environments)
        for group, prompt in zip(groups, prompts or (), strict=bool(prompts)):
            _show_again(group, prompt)
    except RunError as error:
        logging.getLogger("partial_rollouts").warning(
            "request %s is generated from its beginning: %s", request.id, error
        )
        return None
    return partial


def _show_again(group: Group, prompt: Prompt) -> None:
    """Give a group what its prompt shows. Raises RunError unless its answers were begun with the same."""
    before, now = (None if media is None else media.digest for media in (group.prompt.media, prompt.media))
    if before != now:
        raise RunError(
            f"source {prompt.source}, prompt {prompt.index}: its media had the digest {before} when the answers were begun, "
            f"and have {now} now: their file, or the processor, is another one"
        )
    group.prompt = replace(group.prompt, media=prompt.media)


def remove(run: RunDir, outstanding: Collection[str], before: int) -> None:
    """Remove the partial rollouts of requests that were released for batches before `before` and are no longer
    outstanding."""
    for name in names(run.partial_rollouts):
        request_id = name.partition(".")[0]
        if request_id not in outstanding and request_id[1:7].isdigit() and int(request_id[1:7]) < before:
            (run.partial_rollouts / name).unlink(missing_ok=True)
