"""Small recipes, models and rollouts for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Rollouts
from relax_hpc.trainers.build import materialise

SMALL = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "context": 64}
SPREAD = 0.15
"""Standard deviation of the weights: at transformers' 0.02 every distribution is flat, and a wrong mask goes unseen."""


def recipe(*, model: dict[str, Any] | None = None, **tables: Any) -> Recipe:
    """A recipe of a tiny model; `tables` are merged over defaults that suit it."""
    tables["rollout"] = {"max_new_tokens": 16} | tables.get("rollout", {})
    tables["trainer"] = {"learning_rate": 1e-3, "device": "cpu"} | tables.get("trainer", {})
    return Recipe.model_validate({"model": SMALL | (model or {}), "source": [{"task": "chain_sum"}], **tables})


def folder(made: Recipe, where: Path, seed: int = 0) -> Path:
    """The recipe's model in `where`, with weights wide enough for distributions with a shape."""
    from safetensors.torch import load_file, save_file

    materialise(made.model, where, seed)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(where / "model.safetensors")
    for tensor in weights.values():
        if tensor.ndim > 1:
            tensor.normal_(0, SPREAD, generator=generator)
    save_file(weights, where / "model.safetensors", metadata={"format": "pt"})
    return where


def prompts(lengths: Sequence[int], seed: int = 0) -> list[NDArray[np.int32]]:
    """Random prompts of characters."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 50, n).astype(np.int32) for n in lengths]


def rollouts(
    asked: Sequence[NDArray[np.int32]],
    answers: Sequence[NDArray[np.int32]],
    group_size: int,
    seed: int = 0,
    masked: float = 0.0,
) -> Rollouts:
    """Samples with random rewards and behavior logprobs; `masked`: the share of tokens that stay out of the loss."""
    rng = np.random.default_rng(seed)
    offsets = np.cumsum([0, *map(len, answers)])
    mask = (rng.random(offsets[-1]) >= masked).astype(np.uint8)
    return Rollouts(
        ids=[f"o/{i}" for i in range(len(answers))],
        group=np.arange(len(answers)) // group_size,
        rewards=rng.normal(size=len(answers)).astype(np.float32),
        raw_rewards=np.zeros(len(answers), np.float32),
        prompt_tokens=np.concatenate([np.zeros(0, np.int32), *asked]),
        prompt_offsets=np.cumsum([0, *map(len, asked)]),
        tokens=np.concatenate([np.zeros(0, np.int32), *answers]),
        offsets=offsets,
        loss_mask=mask,
        logprobs=(-4 + rng.normal(size=offsets[-1]) * 0.3).astype(np.float32) * mask,
        versions=np.zeros(offsets[-1], np.int32),
        finish=np.zeros(len(answers), np.uint8),
    )


def random_rollouts(samples: int, group_size: int = 4, seed: int = 0, masked: float = 0.2) -> Rollouts:
    """Samples of uneven lengths."""
    rng = np.random.default_rng(seed)
    asked = prompts(rng.integers(1, 12, samples).tolist(), seed)
    answers = prompts(rng.integers(1, 20, samples).tolist(), seed + 1)
    return rollouts(asked, answers, group_size, seed, masked)


def branching_rollouts(groups: int, each: int = 5, seed: int = 0, masked: float = 0.2) -> Rollouts:
    """Samples that go on from some place in an earlier one of their group, one in five excepted. Some are equal."""
    rng = np.random.default_rng(seed)
    answers: list[NDArray[np.int32]] = []
    for sample in range(groups * each):
        others, begun = answers[sample - sample % each :], np.zeros(0, np.int32)
        if others and rng.random() < 0.8:
            other = others[rng.integers(len(others))]
            begun = other[: rng.integers(len(other) + 1)]
        more = rng.integers(3, 50, rng.integers(0 if len(begun) else 1, 9)).astype(np.int32)
        answers.append(np.concatenate([begun, more]))
    asked = [p for p in prompts(rng.integers(2, 9, groups).tolist(), seed) for _ in range(each)]
    return rollouts(asked, answers, each, seed, masked)


def routed(made: Rollouts, layers: int, experts: int, chosen: int, seed: int = 0) -> Rollouts:
    """The same samples with recorded experts, at random: no router would choose them."""
    tokens = int((made.lengths() - 1).sum())
    order = np.random.default_rng(seed).random((tokens, layers, experts)).argsort(-1)
    return dataclasses.replace(made, routed_experts=order[..., :chosen].astype(np.uint8))
