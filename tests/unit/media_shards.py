"""Shards with media, made for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_hpc.records import Finish, Group, Media, Prompt, Sample
from relax_hpc.spool.shard_writer import encode

ROOT = Path(__file__).parents[2]
SAMPLES = 4


def media(seed: int, patches: int = 24, seconds: float = 0.0) -> Media:
    """A picture of so many patches, and a sound where `seconds` says so."""
    random = np.random.default_rng(seed)
    tensors: dict[str, NDArray[Any]] = {
        "pixel_values": random.normal(size=(patches, 12)).astype(np.float32),
        "image_grid_thw": np.array([[1, 4, patches // 4]], np.int64),
    }
    if seconds:
        mask = np.arange(30)[None] < seconds * 10
        tensors |= {"input_features": random.normal(size=(1, 8, 30)).astype(np.float32), "feature_attention_mask": mask}
    return Media.of(tensors)


def group(index: int, shown: Media | None, samples: int = SAMPLES) -> Group:
    tokens = np.arange(index + 3, dtype=np.int32)
    mask = np.ones(len(tokens), np.uint8)
    sample = Sample(tokens, mask, -tokens.astype(np.float32), [(0, 3)], Finish.STOP, extra={"format": 0.5})
    prompt = Prompt(0, index, "", np.arange(5, dtype=np.int32), "1", media=shown)
    return Group(prompt, [replace(sample, reward=float(i)) for i in range(samples)])


def write(path: Path, groups: list[Group], request: str = "r000001-000", **options: Any) -> Path:
    path.write_bytes(b"".join(encode(request, groups, {"version": 3, "run": "mine"}, **options)))
    return path


def equal(found: Media | None, expected: Media | None) -> bool:
    if found is None or expected is None:
        return found is expected
    same: Mapping[str, bool] = {
        n: a.dtype == expected.tensors[n].dtype and a.shape == expected.tensors[n].shape and bool((a == expected.tensors[n]).all())
        for n, a in found.tensors.items()
    }  # fmt: skip
    return found.digest == expected.digest and same.keys() == expected.tensors.keys() and all(same.values())


MIXED = [
    media(0),
    None,
    media(1, 8, 1.5),
    media(0),
    media(2, 40, 3.0),
    Media.of({"input_ids": np.zeros((0, 3), np.int32)}),
]
"""Two groups show the same; one shows nothing; shapes differ; one tensor is empty."""
