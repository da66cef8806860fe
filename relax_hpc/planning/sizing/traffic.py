"""Traffic of a step: tokens, bytes of shards, bytes and seconds of a version of the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from relax_hpc.planning.sizing.model import Shape, parameters
from relax_hpc.planning.sizing.trainer import ELEMENT, Step, adapter_parameters
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.weights import CollectiveWeights, FileWeights
from relax_hpc.spool.layout import COLUMNS, SCORE_BYTES, TOKEN_COLUMNS

FILE_BYTES = 5000
"""Bytes of a shard beside tokens: HDF5's own, and the request's part of `meta`."""
COLUMN_FILE_BYTES = 800
"""Bytes of a scorer's column file beside tokens."""
PROMPT_META_BYTES = 100
"""Bytes of a prompt's answer and metadata in `meta`; sources that say much take more."""
MEDIA_TOKEN_BYTES = 4 * 16 * 16 * 3 * 2 * 4
"""Bytes of tensors behind one token of a picture: four patches of 16 × 16 pixels, three colors and two frames in float32, as
Qwen3-VL has them. Sounds and other families have fewer."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The traffic of one training step, where nothing else is said."""

    samples: int
    prompt_tokens: int
    """Tokens of a prompt."""
    answer_tokens: int
    """Tokens of an answer, over all its turns."""
    trained_tokens: int
    """Tokens of all samples in the loss."""
    most_samples: int
    """Samples generated where dynamic sampling asks for all that it may; only `samples` of them enter the loss."""
    spool_bytes: int
    routed_bytes: int
    """The part of the spool's bytes that says to which experts tokens were routed."""
    media_bytes: int
    """The part of the spool's bytes that are images, video and audio, if prompts consist of them."""
    most_spool_bytes: int
    """Bytes in the spool for `most_samples`."""
    run_spool_bytes: int
    """Bytes of all steps at most, where spool.keep = "all"; of all that may exist at a time, where it is "needed"."""
    weights_bytes: int
    """Bytes of a version of the weights."""
    copies: int
    """How often a version crosses the slowest link."""
    sync_s: float


def traffic(recipe: Recipe, shape: Shape, prompt: int, answer: int, bandwidth: float) -> Traffic:
    """Compute a step's traffic. `prompt`, `answer`: tokens of a sample; `bandwidth`: bytes/s of a link or of files."""
    groups, size = recipe.trainer.prompts_per_step, recipe.algorithm.group_size
    samples = groups * size
    requests, most_requests = recipe.requests_per_step, recipe.most_requests_per_step
    in_request = recipe.rollout.groups_per_request
    a_request = _shard_bytes(in_request, size, prompt, answer) + FILE_BYTES
    a_request += len(recipe.columns) * (in_request * size * answer * SCORE_BYTES + COLUMN_FILE_BYTES)
    routed = _routed_bytes(shape, prompt, answer) * in_request * size if recipe.rollout.routed_experts else 0
    media = in_request * prompt_media_bytes(recipe, prompt)
    a_request += media
    lora, sent = recipe.trainer.lora, parameters(shape).all
    if lora and lora.sync == "adapter":
        sent = adapter_parameters(lora, shape)
    weights = sent * ELEMENT[recipe.trainer.dtype]
    copies = _copies(recipe)
    steps = recipe.run.steps
    if recipe.spool.keep == "needed":  # steps that the oldest checkpoint replays, and those in progress
        steps = min(steps, recipe.run.checkpoint_every * recipe.run.keep_checkpoints + recipe.async_.max_staleness + 1)
    return Traffic(
        samples=samples,
        most_samples=most_requests * recipe.rollout.groups_per_request * size,
        prompt_tokens=prompt,
        answer_tokens=answer,
        trained_tokens=samples * answer,
        spool_bytes=(a_request + routed) * requests,
        routed_bytes=routed * requests,
        media_bytes=media * requests,
        most_spool_bytes=(a_request + routed) * most_requests,
        run_spool_bytes=(a_request + routed) * most_requests * steps,
        weights_bytes=weights,
        copies=copies,
        sync_s=weights * copies / bandwidth,
    )


def step_of(recipe: Recipe, shape: Shape, prompt: int, answer: int) -> Step:
    """The numbers of samples and tokens that the trainer reads in a step."""
    samples = recipe.trainer.prompts_per_step * recipe.algorithm.group_size
    generated = recipe.rollout.max_new_tokens * recipe.rollout.max_turns
    longest = min(prompt + (answer if recipe.supervised else generated), shape.context)
    shown = prompt / (prompt + answer) if any(source.shows for source in recipe.sources) else 0.0
    return Step(samples, longest, samples * (prompt + answer), shown)


def prompt_media_bytes(recipe: Recipe, prompt: int) -> int:
    """Bytes that a shard keeps of the media of a prompt of so many tokens, at most; 0 where prompts are text alone.

    Files, where shards keep those, are smaller than the tensors that are made of them.
    """
    return prompt * MEDIA_TOKEN_BYTES if any(source.shows for source in recipe.sources) else 0


def _shard_bytes(groups: int, size: int, prompt: int, answer: int) -> int:
    """Bytes of the columns of `groups` groups of `size` samples, each sample one span."""
    of = {name: dtype.itemsize for name, dtype in COLUMNS.items()}
    a_token = sum(of[name] for name in TOKEN_COLUMNS)
    a_sample = sum(of[name] for name in ("samples", "offsets", "span_start", "span_version"))
    a_group = prompt * of["prompt_tokens"] + of["prompt_offsets"] + of["groups"] + PROMPT_META_BYTES
    return groups * (size * (answer * a_token + a_sample) + a_group)


def _routed_bytes(shape: Shape, prompt: int, answer: int) -> int:
    """Bytes of routing for one sample."""
    if not shape.experts:
        return 0
    one = np.min_scalar_type(shape.experts - 1).itemsize
    return (prompt + answer - 1) * shape.layers * shape.chosen * one


def _copies(recipe: Recipe) -> int:
    """How often a version crosses the slowest link.

    Files are written once, and read by each worker, or once on a node that has a copy in memory. MPI sends to one
    worker after the other; a broadcast leaves process 0 as a tree.
    """
    workers = recipe.rollout.workers
    if isinstance(recipe.weights, FileWeights):
        return 1 + (recipe.rollout.nodes if recipe.weights.node_cache else workers)
    return math.ceil(math.log2(workers + 1)) if isinstance(recipe.weights, CollectiveWeights) else workers
