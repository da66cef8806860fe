"""Megatron-core's trainer against the torch trainer on one CPU thread: seconds of a step, in interleaved rounds.

    the same samples, the same weights ──► torch ──► megatron ──► megatron, padded ──► torch ──► …

megatron_over_torch: seconds over seconds, above 1 where Megatron-core is slower; packed on both sides. padded_over_packed: what it
costs Megatron-core's trainer when each sample is as long as the longest, filled with tokens that are not in the loss. Both are
medians of rounds with the lowest and highest, for models of about 1 M and 7 M parameters; lengths of answers are lognormal.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from relax_hpc.algorithms import make_algorithm
from relax_hpc.recipe import Recipe
from relax_hpc.records import Rollouts
from relax_hpc.trainers import make_trainer
from relax_hpc.trainers.build import materialise
from tools.bench.common import Ratio, finish, interleave, parse, parser, progress, ratio

MODELS = {
    "1 M": {"hidden_size": 128, "intermediate_size": 384, "layers": 5, "heads": 4, "kv_heads": 2},
    "7 M": {"hidden_size": 320, "intermediate_size": 960, "layers": 6, "heads": 8, "kv_heads": 4},
}
CONTEXT, PROMPT, GROUP = 256, 24, 8
MEAN_ANSWER, SIGMA = 48, 0.7
TOKENS = 4096
"""Of a micro-batch."""
TOKEN_IDS = (3, 50)


def recipe_of(model: str, backend: str) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"name": "tiny", "context": CONTEXT, **MODELS[model]},
            "algorithm": {"name": "grpo", "group_size": GROUP},
            "trainer": {
                "backend": backend, "device": "cpu", "tokens_per_micro_batch": TOKENS, "learning_rate": 1e-6,
            },
            "rollout": {"max_new_tokens": CONTEXT - PROMPT},
            "source": [{"task": "chain_sum"}],
        }
    )  # fmt: skip


def samples(count: int) -> Rollouts:
    """Random tokens."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(MEAN_ANSWER), SIGMA, count).astype(int), 1, CONTEXT - PROMPT)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    return Rollouts(
        ids=[f"o/{i}" for i in range(count)],
        group=np.arange(count) // GROUP,
        rewards=random.normal(size=count).astype(np.float32),
        raw_rewards=np.zeros(count, np.float32),
        prompt_tokens=random.integers(*TOKEN_IDS, count * PROMPT).astype(np.int32),
        prompt_offsets=np.arange(count + 1) * PROMPT,
        tokens=random.integers(*TOKEN_IDS, total).astype(np.int32),
        offsets=offsets,
        loss_mask=np.ones(total, np.uint8),
        logprobs=np.full(total, -4, np.float32),
        versions=np.zeros(total, np.int32),
        finish=np.zeros(count, np.uint8),
    )


def padded(rollouts: Rollouts) -> Rollouts:
    """Each answer as long as the longest."""
    lengths = np.diff(rollouts.offsets)
    longest = int(lengths.max())
    real = (np.arange(longest) < lengths[:, None]).reshape(-1)

    def spread(values: np.ndarray[Any, Any], fill: int) -> np.ndarray[Any, Any]:
        wide = np.full(len(real), fill, values.dtype)
        wide[real] = values
        return wide

    return dataclasses.replace(
        rollouts,
        tokens=spread(rollouts.tokens, TOKEN_IDS[0]),
        offsets=np.arange(len(lengths) + 1) * longest,
        loss_mask=spread(rollouts.loss_mask, 0),
        logprobs=spread(rollouts.logprobs, 0),
        versions=spread(rollouts.versions, 0),
    )


def stepper(trainer: Any, recipe: Recipe, rollouts: Rollouts) -> Callable[[int], float]:
    """A step on `rollouts`, and its seconds."""
    algorithm = make_algorithm(recipe.algorithm)

    def step(number: int) -> float:
        began = time.perf_counter()
        trainer.step(rollouts, algorithm, number)
        return time.perf_counter() - began

    return step


def compare(model: str, folder: Path, count: int, rounds: int, done: Callable[[], None]) -> dict[str, Any]:
    """The figures of one model."""
    recipes = {backend: recipe_of(model, backend) for backend in ("torch", "megatron")}
    materialise(recipes["torch"].model, folder, 0)
    trainers = {backend: make_trainer(recipe, folder, 0, 1) for backend, recipe in recipes.items()}
    packed = samples(count)
    wide = padded(packed)
    sides = {
        "torch": stepper(trainers["torch"], recipes["torch"], packed),
        "megatron": stepper(trainers["megatron"], recipes["megatron"], packed),
        "padded": stepper(trainers["megatron"], recipes["megatron"], wide),
    }
    seen = interleave(sides, rounds, 1, done)
    return {
        "parameters": sum(tensor.numel() for _, tensor in trainers["torch"].export()),
        "tokens": int(packed.lengths().sum()),
        "padded_tokens": int(wide.lengths().sum()),
        "step_s": {name: round(statistics.median(seconds), 3) for name, seconds in seen.items()},
        "megatron_over_torch": words(ratio(seen["torch"], seen["megatron"])),
        "padded_over_packed": words(ratio(seen["megatron"], seen["padded"])),
    }


def words(found: Ratio) -> dict[str, float]:
    return {name: round(value, 3) for name, value in dataclasses.asdict(found).items()}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=5, help="interleaved rounds, after one that warms up")
    arguments.add_argument("--samples", type=int, default=128, help="of a step (default: %(default)s)")
    given = parse(arguments)
    if given.samples < GROUP or given.samples % GROUP:
        raise SystemExit(f"--samples {given.samples}: groups have {GROUP} samples, so give a multiple of {GROUP}")
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    with progress("megatron: rounds", len(MODELS) * (given.rounds + 1)) as done:
        for model in MODELS:
            with tempfile.TemporaryDirectory() as folder:
                result[model] = compare(model, Path(folder), given.samples, given.rounds, done)
    finish(result, given.json)


if __name__ == "__main__":
    main()
