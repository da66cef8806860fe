"""Models with media under the splits of test_megatron_splits.py, in the processes that it starts."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from relax_hpc.algorithms import make_algorithm
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.scoring import Scorer
from relax_hpc.records import Rollouts
from relax_hpc.trainers import make_scoring, make_trainer
from tests import omni, tiny

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"layers": 8, "deep": (0, 2)},
    "qwen3_omni": {"layers": 4, "deep": (0, 2)},
}
SPLITS: dict[str, tuple[str, dict[str, Any]]] = {
    "images, data": ("qwen3_vl", {"overlap": True}),
    "images, tensor": ("qwen3_vl", {"tensor": 2}),
    "images, tensor, spread": ("qwen3_vl", {"tensor": 2, "spread_encoders": True, "overlap": True}),
    "images, tensor, sequence": ("qwen3_vl", {"tensor": 2, "sequence": True, "recompute": "full"}),
    "images, pipeline": ("qwen3_vl", {"pipeline": 2}),
    "images, pipeline, virtual": ("qwen3_vl", {"pipeline": 2, "virtual_pipeline": 2}),
    "images, context": ("qwen3_vl", {"context": 2, "recompute": "selective"}),
    "images, tensor, sequence, context": (
        "qwen3_vl",
        {"tensor": 2, "sequence": True, "context": 2, "recompute": "full", "spread_encoders": True},
    ),
    "images, tensor, pipeline": ("qwen3_vl", {"tensor": 2, "pipeline": 2}),
    "sounds, expert": ("qwen3_omni", {"expert": 2}),
    "sounds, expert, tensor": ("qwen3_omni", {"expert": 2, "expert_tensor": 2, "tensor": 2, "sequence": True}),
    "sounds, expert, context, recomputed": ("qwen3_omni", {"expert": 4, "context": 2, "recompute": "full"}),
    "sounds, expert, pipeline": ("qwen3_omni", {"expert": 2, "pipeline": 2}),
    "sounds, expert, tensor apart": (
        "qwen3_omni",
        {"expert": 2, "tensor": 2, "sequence": True, "spread_encoders": True},
    ),
    "sounds, experts whole": ("qwen3_omni", {"expert_tensor": 2, "tensor": 2, "sequence": True}),
}
FEW = (
    "images, data",
    "images, tensor, sequence, context",
    "images, pipeline, virtual",
    "sounds, expert, pipeline",
)
TESTED = tuple(SPLITS) if os.environ.get("TESTS_EVERY_KIND") else FEW
"""Splits that are run; TESTS_EVERY_KIND=1 runs all."""
SCORED = ("images, tensor, sequence, context", "sounds, expert, pipeline")
"""Splits of which scorers are compared too."""
EACH = 2
"""Samples of each prompt."""
LONELY = 2
"""The step in which one prompt alone shows something."""


def recipe_of(kind: str, folder: Path, **trainer: Any) -> Recipe:
    algorithm = {"qwen3_vl": {"name": "ppo", "kl_coef": 0.3}, "qwen3_omni": {"name": "grpo", "kl_coef": 0.3}}[kind]
    return omni.recipe(
        folder / kind,
        trainer={"tokens_per_micro_batch": 60, "weight_decay": 0.1, "clip_grad_norm": 0.5, **trainer},
        algorithm={**algorithm, "group_size": EACH},
        rollout={"temperature": 0.8},
    )


def samples(kind: str, seed: int) -> Rollouts:
    """Samples of prompts of every modality and mixture, of which step LONELY has one, so that most processes have nothing
    to encode; where experts are replayed, with experts at random."""
    shown = omni.prompts(kind)
    if seed == LONELY:
        shown = [shown[0], *[next(one for one in shown if one.media is None)] * (len(shown) - 1)]
    answers = tiny.prompts(np.random.default_rng(seed).integers(1, 9, EACH * len(shown)).tolist(), seed)
    made = tiny.rollouts([s.tokens for s in shown for _ in range(EACH)], answers, EACH, seed, masked=0.2)
    made = replace(made, media=tuple(s.media for s in shown for _ in range(EACH)))
    return tiny.routed(made, SHAPES[kind]["layers"], 4, 2) if kind == "qwen3_omni" and seed else made


def folders(folder: Path) -> None:
    for kind, shape in SHAPES.items():
        omni.folder(kind, folder / kind, **shape)


def steps(name: str, folder: Path, rank: int, world: int) -> list[dict[str, float]]:
    """Step 0 of a split, then the others from the checkpoint that the split before it wrote between the two."""
    kind, parallel = SPLITS[name]
    recipe = recipe_of(kind, folder, backend="megatron", processes=world, parallel=parallel)
    trainer, algorithm = make_trainer(recipe, folder / kind, rank, world), make_algorithm(recipe.algorithm)
    said = [trainer.step(samples(kind, 0), algorithm, 0)]
    saved = folder / f"{kind}-checkpoint"
    if rank == 0:
        (folder / name).mkdir()
    dist.barrier()
    trainer.save(folder / name)
    if saved.exists():
        trainer.load(saved)
    dist.barrier()
    if rank == 0:
        saved.unlink(missing_ok=True)
        saved.symlink_to(folder / name)
    said += [trainer.step(samples(kind, step), algorithm, step) for step in range(1, LONELY + 1)]
    weights, exported = dict(trainer.export()), folder / f"{name}.safetensors"
    if rank == 0:
        save_file(weights, exported)
    dist.barrier()
    if name in SCORED:
        scores(recipe, folder / kind, trainer, exported, samples(kind, 1))
    return said


def scores(recipe: Recipe, model_dir: Path, trainer: Any, exported: Path, rollouts: Rollouts) -> None:
    """Scorers under the same split say what the trainer says."""
    from relax_hpc.trainers.megatron.cpu import supported

    world = dist.get_world_size()
    apart = recipe.model_copy(update={"scorer": Scorer(scores=["reference"], processes=world)})
    scoring = make_scoring(apart, model_dir, dist.get_rank(), world)
    scoring.load("recomputed", load_file(exported), exported)
    expected = supported(trainer._column)("recomputed", rollouts, recipe.rollout.temperature, lambda: None)
    assert expected[rollouts.loss_mask == 1].std() > 0.1
    np.testing.assert_allclose(scoring.logprobs("recomputed", rollouts), expected, atol=5e-6)


def alone(kind: str, folder: Path) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Metrics and weights of one process of the torch trainer; of Megatron where experts are replayed."""
    made = []
    for backend in ("torch", "megatron") if kind == "qwen3_omni" else ("torch",):
        recipe = recipe_of(kind, folder, backend=backend)
        trainer, algorithm = make_trainer(recipe, folder / kind, 0, 1), make_algorithm(recipe.algorithm)
        said = [trainer.step(samples(kind, step), algorithm, step) for step in range(LONELY + 1)]
        made.append((said, dict(trainer.export())))
    return [made[0][0][0], *made[-1][0][1:]], made[-1][1]
