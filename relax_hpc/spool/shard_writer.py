"""Encode the groups of a request as the bytes of a shard.

    worker: list[Group] ──columns──► flat arrays and offsets ──HDF5, laid out in memory──► pieces, written and published at once

A file of a thousand samples is a dozen datasets, and leaves in one write: a kill in mid-write leaves a temporary name,
never a shard.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import xxhash

from relax_hpc.files.publish import Data
from relax_hpc.records import Group, offsets_of
from relax_hpc.spool import checked, hdf5, media
from relax_hpc.spool.layout import (
    ATTRIBUTES,
    COLUMNS,
    EXTRA,
    EXTRA_FOLDER,
    FORMAT,
    GROUP,
    ROLLOUT,
    ROLLOUT_TYPE,
    ROUTED,
    SAMPLE,
    SCHEMA,
    TOKEN_COLUMNS,
    TURN_REWARDS,
)

Compression = Literal["none", "lz4", "zstd"]


def columns(groups: Sequence[Group]) -> dict[str, hdf5.Column]:
    """Return the flat columns of `groups` (see docs/shard-format.md)."""
    samples = [s for g in groups for s in g.samples]
    of_group = np.repeat(np.arange(len(groups), dtype=np.int32), [len(g.samples) for g in groups])
    offsets = offsets_of([len(s.tokens) for s in samples])
    starts, versions = [], []
    for sample, begin in zip(samples, offsets[:-1].tolist(), strict=True):
        for start, version in sample.spans:
            starts.append(begin + start)
            versions.append(version)
    table = np.zeros(len(samples), SAMPLE)
    table["group"] = of_group
    for name in ("reward", "raw_reward", "finish", "turns"):
        table[name] = [getattr(s, name) for s in samples]
    parts: dict[str, list[Any]] = {
        "prompt_tokens": [g.prompt.tokens for g in groups],
        "prompt_offsets": [offsets_of([len(g.prompt.tokens) for g in groups])],
        "tokens": [s.tokens for s in samples],
        "offsets": [offsets],
        "loss_mask": [s.loss_mask for s in samples],
        "logprobs": [s.logprobs for s in samples],
        "span_start": [starts],
        "span_version": [versions],
        "samples": [table],
        "groups": [np.array([(g.prompt.source, g.prompt.index, bool(g.reason)) for g in groups], GROUP)],
    }
    flat = {name: hdf5.Column(of_column, COLUMNS[name]) for name, of_column in parts.items()}
    routed = [s.routed_experts for s in samples if s.routed_experts is not None]
    if routed and len(routed) == len(samples):
        flat[ROUTED] = hdf5.Column([part.reshape(-1) for part in routed], routed[0].dtype)
    if any(s.rollout is not None for s in samples):
        numbers = [i if s.rollout is None else s.rollout for i, s in enumerate(samples)]
        flat[ROLLOUT] = hdf5.Column([np.array(numbers)], ROLLOUT_TYPE)
    if any(s.turn_rewards is not None for s in samples):
        earned = [np.zeros(len(s.tokens)) if s.turn_rewards is None else s.turn_rewards for s in samples]
        flat[TURN_REWARDS] = hdf5.Column(earned, EXTRA)
    for name in dict.fromkeys(key for s in samples for key in s.extra):
        flat[EXTRA_FOLDER + name] = hdf5.Column([np.array([s.extra.get(name, np.nan) for s in samples])], EXTRA)
    return flat


def encode(
    request: str,
    groups: Sequence[Group],
    meta: dict[str, Any],
    compression: Compression = "none",
    kept: media.Kept = "tensors",
) -> Data:
    """Return the bytes of a shard, in pieces. Raises Damaged if media are not those that the engine was given.

    meta: more about the request, JSON-like (attempt, worker, versions, …); kept: what of its media is.
    """
    flat, (shown, about_media) = columns(groups), media.columns(groups, kept)
    flat |= shown
    reasons = {str(i): g.reason for i, g in enumerate(groups) if g.reason}
    details = {str(i): g.detail for i, g in enumerate(groups) if g.detail}
    prompts = [{"answer": g.prompt.answer, "metadata": g.prompt.metadata} for g in groups]
    about = {**meta, "request": request, "reasons": reasons, "details": details, "prompts": prompts}
    about["checksums"] = {name: checked.checksums(column) for name, column in flat.items()}
    if ROUTED in flat:
        experts = (s.routed_experts for g in groups for s in g.samples)
        about[ROUTED] = next(found.shape[1:] for found in experts if found is not None)
    if about_media is not None:
        about[media.KEY] = about_media
    text = json.dumps(about, ensure_ascii=False, default=str).encode()
    flat["meta"] = hdf5.Column([np.frombuffer(text, np.uint8)], np.uint8)
    root = dict[str, str | int](zip(ATTRIBUTES, (FORMAT, SCHEMA, xxhash.xxh3_64_intdigest(text)), strict=True))
    return hdf5.image(flat, root, {} if compression == "none" else dict.fromkeys(TOKEN_COLUMNS, compression))
