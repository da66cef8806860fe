"""A trainer of a model of half a gigabyte, whole or with an adapter: `python adapter.py whole|adapter MODEL` makes two steps.

Prints {"peak": …} in bytes: how far the process's resident memory rose at most since before the model was loaded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shard_memory import resident

from relax_hpc.algorithms import make_algorithm
from relax_hpc.recipe import Recipe
from relax_hpc.records import Rollouts
from relax_hpc.trainers import make_trainer

MODEL = {"hidden_size": 1024, "intermediate_size": 4096, "layers": 8, "heads": 16, "kv_heads": 8, "context": 128}
RANK, SAMPLES, LENGTH = 16, 4, 24


def recipe_of(lora: bool) -> Recipe:
    trainer: dict[str, Any] = {"device": "cpu", "learning_rate": 1e-4, "tokens_per_micro_batch": 64}
    return Recipe.model_validate(
        {
            "model": {"name": "tiny", **MODEL},
            "algorithm": {"name": "grpo", "group_size": SAMPLES},
            "trainer": trainer | ({"lora": {"rank": RANK}} if lora else {}),
            "rollout": {"max_new_tokens": LENGTH},
            "source": [{"task": "chain_sum"}],
        }
    )


def samples(seed: int) -> Rollouts:
    """Random tokens."""
    random = np.random.default_rng(seed)
    offsets = np.arange(SAMPLES + 1) * LENGTH
    asked, drawn = random.integers(3, 50, (2, SAMPLES * LENGTH)).astype(np.int32)
    return Rollouts(
        ids=[f"o/{i}" for i in range(SAMPLES)],
        group=np.zeros(SAMPLES, np.int64),
        rewards=random.normal(size=SAMPLES).astype(np.float32),
        raw_rewards=np.zeros(SAMPLES, np.float32),
        prompt_tokens=asked,
        prompt_offsets=offsets,
        tokens=drawn,
        offsets=offsets,
        loss_mask=np.ones(SAMPLES * LENGTH, np.uint8),
        logprobs=np.full(SAMPLES * LENGTH, -4, np.float32),
        versions=np.zeros(SAMPLES * LENGTH, np.int32),
        finish=np.zeros(SAMPLES, np.uint8),
    )


def main() -> None:
    what, folder = sys.argv[1:]
    torch.set_num_threads(1)
    recipe = recipe_of(what == "adapter")
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    trainer, algorithm = make_trainer(recipe, Path(folder), 0, 1), make_algorithm(recipe.algorithm)
    trainer.begin_training()
    for step in range(2):
        trainer.step(samples(step), algorithm, step)
    print(json.dumps({"peak": resident("VmHWM") - before}))


if __name__ == "__main__":
    main()
