"""Estimates the times of a run that nobody has made, from recipe, model size and what the person says.

A training step costs arithmetic, a token of an answer costs reading weights and cache, weights and checkpoints cost
bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from relax_hpc.files.errors import RunError
from relax_hpc.planning.simulation.times import Lognormal, Times
from relax_hpc.planning.sizing.engine import engine_memory
from relax_hpc.planning.sizing.estimate import PROMPT_TOKENS
from relax_hpc.planning.sizing.model import Shape, parameters
from relax_hpc.planning.sizing.traffic import traffic
from relax_hpc.planning.sizing.trainer import ELEMENT, checkpoint_bytes
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.weights import FileWeights

DEVICE_FLOPS = 989e12
"""Floating-point operations a second of a device: an H100's, dense bfloat16."""
MODEL_FLOPS_SHARE = 0.3
"""Share of DEVICE_FLOPS that training reaches."""
DEVICE_BYTES_S = 3.35e12
"""Bytes a second of a device's memory: an H100's."""
DECODING_SHARE = 0.5
"""Share of DEVICE_BYTES_S that generating reaches."""
TOKEN_FLOOR_S = 0.005
"""Least seconds from token to token, however small the model."""
STEP_FLOOR_S = 0.1
"""Least seconds of a step: reading shards, packing, optimizer, metrics."""
REQUEST_BASE_S = 0.2
"""Seconds of a request beside generating: reading prompts, scoring rewards."""
SHARD_S = 0.05
ANSWER_SHARE = 0.25
"""Mean length of an answer, as a share of the longest."""
SIGMA = 0.8
RESTART_S = 180.0
BANDWIDTH = 2e9


@dataclass(frozen=True, slots=True)
class Asked:
    """Times that a person states, in place of assumptions or measurements; None where nothing is said."""

    answer_tokens: float | None = None
    sigma: float | None = None
    token_s: float | None = None
    train_s: float | None = None
    publish_s: float | None = None
    fetch_s: float | None = None
    checkpoint_s: float | None = None
    restart_s: float | None = None
    bandwidth: float | None = None
    """Bytes a second."""


def assumed(recipe: Recipe, shape: Shape, asked: Asked) -> tuple[Times, list[str]]:
    """(times, what was assumed for them). Raises RunError for answers that cannot be that long."""
    most = min(recipe.rollout.max_new_tokens * recipe.rollout.max_turns, shape.context - 1)
    mean = asked.answer_tokens or max(1.0, ANSWER_SHARE * most)
    if mean > most:
        raise RunError(
            f"--answer-tokens {mean:g}: an answer has {most} tokens at most (rollout.max_new_tokens, the model's context)"
        )
    sigma = SIGMA if asked.sigma is None else asked.sigma
    prompt = max(1, min(PROMPT_TOKENS, shape.context - most))
    bandwidth = asked.bandwidth or BANDWIDTH
    moved = traffic(recipe, shape, prompt, round(mean), bandwidth)
    a_version = moved.weights_bytes / bandwidth
    train_s = _or(asked.train_s, _train_s(recipe, shape, moved.samples * (prompt + mean)))
    token_s = _or(asked.token_s, _token_s(recipe, shape, prompt, round(mean)))
    publish_s = _or(asked.publish_s, a_version * (1 if isinstance(recipe.weights, FileWeights) else moved.copies))
    fetch_s = _or(asked.fetch_s, a_version)
    saving_s = 0.0 if recipe.run.async_checkpoints else checkpoint_bytes(recipe, shape) / bandwidth
    checkpoint_s = _or(asked.checkpoint_s, saving_s)
    restart_s = _or(asked.restart_s, RESTART_S)
    samples = recipe.rollout.groups_per_request * recipe.algorithm.group_size
    times = Times(
        requests=Lognormal(mean, sigma, most, samples, REQUEST_BASE_S, token_s),
        train=np.array([train_s]),
        publish=np.array([publish_s]),
        fetch_s=fetch_s,
        shard_s=SHARD_S,
        checkpoint_s=checkpoint_s,
        restart_s=restart_s,
        worker_lost_s=recipe.supervision.node_agent_silent_s,
        worker_restart_s=restart_s,
    )
    notes = [
        f"answers of {mean:g} tokens on average (--answer-tokens), lognormal with sigma {sigma:g} (--sigma), cut at {most}",
        f"{token_s * 1e3:.3g} ms from token to token (--token-s)"
        + _why(asked.token_s, "an H100 at half its bandwidth"),
        f"a request of {samples} answers lasts as long as its longest one",
        f"{train_s:.3g} s a training step (--train-s)" + _why(asked.train_s, "H100s at 30 % of their arithmetic"),
        f"{publish_s:.3g} s to publish weights to {recipe.rollout.workers} workers (--publish-s), {fetch_s:.3g} s to take them "
        f"(--fetch-s), {checkpoint_s:.3g} s for a checkpoint (--checkpoint-s), from {bandwidth / 1e9:g} GB/s (--bandwidth) where they "
        "are not given",
        f"{restart_s:.3g} s until a lost trainer or node is back (--restart-s), besides what the trainer repeats",
    ]
    return times, notes


def _train_s(recipe: Recipe, shape: Shape, tokens: float) -> float:
    """Seconds of a step: forward, backward at twice its cost, and forward again where activations are recomputed."""
    whole = parameters(shape)
    active = whole.dense + (whole.experts * shape.chosen / shape.experts if shape.experts else 0)
    operations = (8 if recipe.trainer.parallel.recompute == "full" else 6) * active * tokens
    return max(STEP_FLOOR_S, operations / (recipe.trainer.processes * DEVICE_FLOPS * MODEL_FLOPS_SHARE))


def _token_s(recipe: Recipe, shape: Shape, prompt: int, answer: int) -> float:
    """Seconds from token to token of a whole request: a device reads its weights, and the cache at half its length."""
    ours, asked = recipe.rollout.engine == "torch", recipe.rollout.sglang
    tensor, copies = (1, 1) if ours else (asked.tensor_parallel, asked.copies)
    weights = engine_memory(recipe, shape, 0.0, prompt, answer).weights
    samples = recipe.rollout.groups_per_request * recipe.algorithm.group_size / copies
    cache = samples * (prompt + answer / 2) * shape.kv_bytes(ELEMENT[recipe.trainer.dtype], tensor)
    return max(TOKEN_FLOOR_S, (weights + cache) / (DEVICE_BYTES_S * DECODING_SHARE))


def _or(said: float | None, otherwise: float) -> float:
    return otherwise if said is None else said


def _why(said: float | None, why: str) -> str:
    return "" if said is not None else f": {why}"
