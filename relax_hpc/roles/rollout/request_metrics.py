"""A generated request as its shard and the worker's metrics describe it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_hpc.records import Finish, Group, PartialRollout, Sample
from relax_hpc.spool.queue import Claim
from relax_hpc.weights import Version


def shard_meta(claim: Claim, held: Version) -> dict[str, Any]:
    """Return what the shard says about its request, and the version that it was begun with."""
    return {
        "version": held.number, "lineage": held.lineage, "weights": held.checksum, "attempt": claim.request_file.attempt,
        "seed": claim.request.seed, "samples_per_prompt": claim.request.samples_per_prompt, "aborts": claim.request_file.aborts,
    }  # fmt: skip


def request_metrics(
    claim: Claim,
    held: Version,
    groups: Sequence[Group],
    partial: PartialRollout | None,
    generate_s: float,
    devices: int,
) -> dict[str, Any]:
    """Return metrics of a request's samples. partial: where generation went on from; devices: those of the worker."""
    samples = [s for g in groups for s in g.samples]
    lengths, kept = [len(s.tokens) for s in samples], partial.samples if partial else []
    tokens = said_by_model(samples) - said_by_model(kept)
    return {
        "request": claim.request.id, "version": held.number, "samples": len(samples), "tokens": sum(lengths),
        "length_max": max(lengths, default=0), "turns_mean": mean([s.turns for s in samples]),
        "truncated": mean([s.finish is Finish.LENGTH for s in samples]),
        "longest_s": max((s.seconds for s in samples), default=0.0),
        "tokens_per_s": tokens / generate_s, "tokens_per_device_s": tokens / generate_s / devices,
        "reward": mean([s.raw_reward for g in groups for s in (g.samples if g.reason else g.generated)]),
        "failed": sum(bool(g.reason) for g in groups),
        "failed_samples": sum(len(g.samples) - len(g.generated) for g in groups if not g.reason),
        "aborts": claim.request_file.aborts, "continued_samples": len(partial.cut) if partial else 0,
        "kept_tokens": sum(len(s.tokens) for s in kept),
    }  # fmt: skip


def said_by_model(samples: Sequence[Sample]) -> int:
    """Return the number of tokens that the model itself generated."""
    return sum(int(sample.loss_mask.sum()) for sample in samples)


def mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)
