"""The layout of a shard: its columns, their types, and bytes for each token. Imports no HDF5."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

FORMAT = "relax_hpc.shard"
SCHEMA = 3
ATTRIBUTES = ("format", "schema", "meta_checksum")
"""Root attributes. HDF5 keeps checksums of its own metadata, attributes included, so the checksum of
`meta`, which holds those of all columns, is one of them."""
SAMPLE = np.dtype([("group", "<i4"), ("reward", "<f4"), ("raw_reward", "<f4"), ("finish", "u1"), ("turns", "<i2")])
GROUP = np.dtype([("source", "<i2"), ("index", "<i8"), ("failed", "u1")])
COLUMNS: dict[str, np.dtype[Any]] = {
    "prompt_tokens": np.dtype("<i4"), "prompt_offsets": np.dtype("<i8"), "tokens": np.dtype("<i4"), "offsets": np.dtype("<i8"),
    "loss_mask": np.dtype("u1"), "logprobs": np.dtype("<f4"), "span_start": np.dtype("<i8"), "span_version": np.dtype("<i4"),
    "samples": SAMPLE, "groups": GROUP, "meta": np.dtype("u1"),
}  # fmt: skip
"""Columns that every shard has; `extra/NAME` and `media/NAME` may follow."""
EXTRA = np.dtype("<f4")
"""Type of an `extra/NAME` column, [N]."""
EXTRA_FOLDER = "extra/"
ROUTED = "routed_experts"
"""An optional column: unsigned integers, [rows, layers, k] flattened; sample i has one row a token of its prompt and answer, less one."""
ROUTED_TYPES = (np.dtype("u1"), np.dtype("<u2"))
ROLLOUT = "rollout"
"""An optional column, [N]: which attempt of its group a sample is of, where an attempt may have several samples."""
ROLLOUT_TYPE = np.dtype("<i4")
TURN_REWARDS = "turn_rewards"
"""An optional column, [T]: rewards given before a sample's end, each at the last token of its turn."""
TOKEN_COLUMNS = ("tokens", "loss_mask", "logprobs")
"""Columns of length T: worth compressing, and read by slices."""
SCORE_BYTES = 4
"""Bytes for each token in a scorer's column: float32."""


def checked_meta(meta: Any) -> dict[str, Any]:
    """Return `meta` if it has all that a shard must say. Raises ValueError, KeyError or TypeError."""
    tables = [meta[name] for name in ("reasons", "details", "checksums")]
    if not all(isinstance(table, dict) for table in tables):
        raise TypeError("its reasons, details or checksums are no JSON objects")
    texts = [meta["request"], *(text for table in tables for pair in table.items() for text in pair)]
    if not all(isinstance(text, str) for text in texts) or not meta["checksums"].keys() >= {*COLUMNS} - {"meta"}:
        raise ValueError("it lacks a request, reasons that are texts, or the checksum of a column")
    if not all(isinstance(prompt, dict) and {"answer", "metadata"} <= prompt.keys() for prompt in meta["prompts"]):
        raise ValueError("a prompt lacks its answer or metadata")
    if ROUTED in meta:
        layers, k = meta[ROUTED]
        if not (isinstance(layers, int) and isinstance(k, int) and min(layers, k) > 0):
            raise ValueError(f"{ROUTED} is {meta[ROUTED]}, expected [layers, k]")
    return cast(dict[str, Any], meta)
