"""The layout of a shard: its columns, their types, and bytes for each token. Imports no HDF5."""

from __future__ import annotations

from typing import Any

import numpy as np

SAMPLE = np.dtype([("group", "<i4"), ("reward", "<f4"), ("raw_reward", "<f4"), ("finish", "u1"), ("turns", "<i2")])
GROUP = np.dtype([("source", "<i2"), ("index", "<i8"), ("failed", "u1")])
COLUMNS: dict[str, np.dtype[Any]] = {
    "prompt_tokens": np.dtype("<i4"), "prompt_offsets": np.dtype("<i8"), "tokens": np.dtype("<i4"), "offsets": np.dtype("<i8"),
    "loss_mask": np.dtype("u1"), "logprobs": np.dtype("<f4"), "span_start": np.dtype("<i8"), "span_version": np.dtype("<i4"),
    "samples": SAMPLE, "groups": GROUP, "meta": np.dtype("u1"),
}  # fmt: skip
"""Columns that every shard has; `extra/NAME` may follow."""
EXTRA = np.dtype("<f4")
"""Type of an `extra/NAME` column, [N]."""
ROUTED = "routed_experts"
"""An optional column: unsigned integers, [rows, layers, k] flattened; sample i has one row a token of its prompt and answer, less one."""
ROUTED_TYPES = (np.dtype("u1"), np.dtype("<u2"))
TOKEN_COLUMNS = ("tokens", "loss_mask", "logprobs")
"""Columns of length T: worth compressing, and read by slices."""
SCORE_BYTES = 4
"""Bytes for each token in a scorer's column: float32."""
