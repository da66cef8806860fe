"""Memory of a trainer process: weights, gradients, AdamW, what the forward pass keeps for the backward, the output layer.

megatron   weights in trainer.dtype, gradients in float32; AdamW's moments (and, in bfloat16, master weights) are shared
           by the data-parallel processes: of dense parameters by all that hold them, of experts by all that hold those
torch      all of it in float32 on every process; in bfloat16 autocast's copies of the matrices besides

Of a critic there are weights, gradients and AdamW too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from relax_hpc.planning.sizing.model import Count, Shape, parameters, shape_in, stage_layers, stage_parameters
from relax_hpc.recipe.schema import CRITIC_KEY, TEACHER_KEY, Recipe
from relax_hpc.recipe.tables.trainer import LOGITS_PER_CHUNK, Lora

FLOAT = 4
ELEMENT = {"float32": 4, "bfloat16": 2}
LOGIT_BYTES = 20
"""Bytes for a logit: in trainer.dtype, in float32, its exponential, and the gradients of two of them."""


class Kept(NamedTuple):
    """Bytes that the forward pass keeps for the backward: a token, a layer, and a column of what each field names."""

    hidden: float
    """For a column of the residual stream: norms, inputs of matrices."""
    heads: float
    """For a column of queries and of the output of attention."""
    kv_heads: float
    mlp: float
    experts: float
    """For a column of the experts that a token is routed to."""
    sent: float
    """For a column of the residual stream, once for each expert that a token is sent to."""
    ends: float
    """For a column of the residual stream before the first layer and after the last."""


KEPT = {
    ("megatron", "float32"): Kept(30, 20, 18, 20, 24, 5, 14),
    ("megatron", "bfloat16"): Kept(22, 14, 12, 10, 12, 2, 12),
    ("torch", "float32"): Kept(24, 16, 16, 16, 16, 8, 14),
    ("torch", "bfloat16"): Kept(27, 10, 11, 8, 16, 8, 12),
}
"""Fitted to tensors that autograd saved on a CPU; kernels that fuse norms and activations (Transformer Engine's) keep less."""


class KeptByEncoder(NamedTuple):
    """Bytes that an encoder keeps for the backward: a patch or frame, a layer, and a column of what each field names."""

    hidden: float
    mlp: float


KEPT_BY_ENCODER = {"float32": KeptByEncoder(41, 8), "bfloat16": KeptByEncoder(22, 4.2)}
"""Fitted likewise. Both backends have transformers' own encoders."""


@dataclass(frozen=True, slots=True)
class Step:
    """The numbers of samples and tokens that a training step reads."""

    samples: int
    longest: int
    """Most tokens of a sample, prompt and answer."""
    tokens: int
    """Tokens of all samples, the prompt counted with each."""
    shown: float = 0.0
    """Share of the tokens that stand for media, at most."""


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes on the device of a process of one pipeline stage."""

    stage: int
    parameters: int
    """Parameters that the process holds."""
    weights: float
    gradients: float
    optimizer: float
    frozen: float
    """Bytes of reference and teacher weights."""
    activations: float
    head: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.frozen + self.activations + self.head


def beside(recipe: Recipe, key: str, policy: Shape) -> Shape | None:
    """The shape of the model that the trainer holds by `key`; None where it holds none.

    Where its config.json is not on this machine, the policy's shape stands in.
    """
    folder = recipe.models_held.get(key)
    return None if folder is None else shape_in(folder) or policy


def _critic(recipe: Recipe, policy: Shape) -> Shape | None:
    """The shape of the critic that the trainer holds; None where it holds none."""
    return beside(recipe, CRITIC_KEY, policy) or policy if recipe.trains_critic else None


def replicas(recipe: Recipe) -> int:
    """Number of data-parallel processes; those that share a sequence count once."""
    plan = recipe.trainer.parallel
    return recipe.trainer.processes // (plan.tensor * plan.pipeline * plan.context)


def micro_batches(recipe: Recipe, step: Step) -> int:
    """Micro-batches of one process in a step."""
    return max(1, math.ceil(step.tokens / replicas(recipe) / (micro_batch_tokens(recipe, step) * _shared(recipe))))


def micro_batch_tokens(recipe: Recipe, step: Step) -> int:
    """Tokens of one forward pass on one process: the budget, or the longest sample if larger, and at most the whole
    step.
    """
    share = _shared(recipe)
    budget = max(recipe.trainer.tokens_per_micro_batch, math.ceil(step.longest / share))
    return min(budget, math.ceil(step.tokens / replicas(recipe) / share))


def trainer_memory(recipe: Recipe, shape: Shape, step: Step) -> list[TrainerMemory]:
    """Compute the memory of a trainer process, for each pipeline stage."""
    if recipe.trainer.backend == "torch":
        return [_torch(recipe, shape, step)]
    return [_megatron(recipe, shape, step, stage) for stage in range(recipe.trainer.parallel.pipeline)]


def scorer_weights(recipe: Recipe, shape: Shape) -> float:
    """Most bytes of weights that a scorer's process holds."""
    folder, plan = recipe.models_beside.get(TEACHER_KEY), recipe.trainer.parallel
    teacher = (shape_in(folder) if folder else None) or shape
    models = [teacher if name == "teacher" else shape for name in recipe.scored]
    if not recipe.scores_together:
        return FLOAT * sum(parameters(model).all for model in models)
    of_stages = (sum(stage_parameters(model, plan, stage).all for model in models) for stage in range(plan.pipeline))
    return ELEMENT[recipe.trainer.dtype] * max(of_stages)


def adapter_parameters(lora: Lora, shape: Shape) -> int:
    """Parameters of an adapter on the language model's linear layers that `lora` names, without experts."""
    queries, pairs = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = {"q_proj": queries, "k_proj": pairs, "v_proj": pairs, "o_proj": queries}
    mlp = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), shape.intermediate)
    named = {target.rpartition(".")[2] for target in lora.targets} or {*attention, *mlp}
    sides = [
        shape.hidden + width
        for sparse in shape.sparse
        for name, width in (attention if sparse else attention | mlp).items()
        if name in named
    ]
    return lora.rank * sum(sides)


def learned(recipe: Recipe, shape: Shape, count: Count, first: bool) -> Count:
    """The learning ones of a process's parameters `count`; first: it holds the encoders."""
    if recipe.trainer.lora:
        return Count(adapter_parameters(recipe.trainer.lora, shape), 0)
    freeze = recipe.trainer.freeze
    encoders = shape.encoders.all * first
    frozen = sum(shape.encoders.parameters.get(part, 0) for part in freeze) * first
    return Count(encoders - frozen, 0) if "language" in freeze else Count(count.dense - frozen, count.experts)


def checkpoint_bytes(recipe: Recipe, shape: Shape) -> float:
    """Bytes of a checkpoint: weights, reference, AdamW's moments, those of a critic; megatron also keeps master
    weights.
    """
    count, critic = parameters(shape).all, _critic(recipe, shape)
    frozen = count * recipe.holds_reference(recipe.algorithm.needs)
    if recipe.trainer.lora:  # the base is kept once, not with each checkpoint
        count, frozen = adapter_parameters(recipe.trainer.lora, shape), 0
    learning = count + (parameters(critic, critic=True).all if critic else 0)
    if recipe.trainer.backend == "torch":
        return FLOAT * (3 * learning + frozen)
    return FLOAT * 3 * learning + ELEMENT[recipe.trainer.dtype] * (learning + frozen)


def _encoder_bytes(recipe: Recipe, shape: Shape) -> float:
    """Bytes that encoders keep for a token of media, of the modality of which they keep most."""
    shown = {"audio" if modality == "audio" else "vision" for source in recipe.sources for modality in source.shown}
    element, kept = ELEMENT[recipe.trainer.dtype], KEPT_BY_ENCODER[recipe.trainer.dtype]
    found = [0.0]
    for part, tower in shape.encoders.towers.items():
        if part not in shown or part in recipe.trainer.freeze:
            continue
        layer = kept.hidden * tower.hidden + kept.mlp * tower.intermediate
        if recipe.trainer.parallel.recompute == "full":
            layers = layer + tower.layers * tower.hidden * element
        else:
            layers = tower.layers * layer
        found.append(tower.rows * layers + 2 * element * tower.beside)
    return max(found)


def _shared(recipe: Recipe) -> int:
    return recipe.trainer.parallel.context


def _torch(recipe: Recipe, shape: Shape, step: Step) -> TrainerMemory:
    count = parameters(shape).all
    critic, teacher = _critic(recipe, shape), beside(recipe, TEACHER_KEY, shape)
    learning = count + (parameters(critic, critic=True).all if critic else 0)
    dtype, tokens = recipe.trainer.dtype, micro_batch_tokens(recipe, step)
    kept = KEPT["torch", dtype]
    layers = sum(_layer_bytes(shape, kept, recipe, layer) for layer in range(shape.layers))
    cast = count * ELEMENT[dtype] if dtype == "bfloat16" else 0
    trained = learning - count + learned(recipe, shape, parameters(shape), True).all
    holds_reference = recipe.holds_reference(recipe.algorithm.needs) and not recipe.trainer.lora
    return TrainerMemory(
        stage=0,
        parameters=count,
        weights=learning * FLOAT + cast,
        gradients=trained * FLOAT,
        optimizer=trained * FLOAT * 2,
        frozen=(count * holds_reference + (parameters(teacher).all if teacher else 0)) * FLOAT,
        activations=tokens * (layers + kept.ends * shape.hidden + step.shown * _encoder_bytes(recipe, shape)),
        head=_head_bytes(shape, tokens, 1),
    )


def _megatron(recipe: Recipe, shape: Shape, step: Step, stage: int) -> TrainerMemory:
    plan, dtype, processes = recipe.trainer.parallel, recipe.trainer.dtype, recipe.trainer.processes
    count, critic = stage_parameters(shape, plan, stage), _critic(recipe, shape)
    learning = count.plus(stage_parameters(critic, plan, stage, critic=True)) if critic else count
    states = FLOAT * (2 if dtype == "float32" else 3)
    sharing = (
        processes // (plan.tensor * plan.pipeline),
        processes // (plan.expert * plan.expert_tensor * plan.pipeline),
    )
    tokens = micro_batch_tokens(recipe, step)
    first, last = stage == 0, stage == plan.pipeline - 1
    trained = learned(recipe, shape, count, first)
    if critic:
        trained = trained.plus(stage_parameters(critic, plan, stage, critic=True))
    encoded = step.shown * _encoder_bytes(recipe, shape) * first
    teacher = beside(recipe, TEACHER_KEY, shape)
    of_teacher = stage_parameters(teacher, plan, stage).all if teacher else 0
    return TrainerMemory(
        stage=stage,
        parameters=count.all,
        weights=learning.all * ELEMENT[dtype],
        gradients=trained.all * FLOAT,
        optimizer=states * (trained.dense / sharing[0] + trained.experts / sharing[1]),
        frozen=(count.all * recipe.holds_reference(recipe.algorithm.needs) + of_teacher) * ELEMENT[dtype],
        activations=tokens * (_kept_by_stage(recipe, shape, step, stage) + encoded),
        head=_head_bytes(shape, tokens, plan.tensor) if last else 0,
    )


def _kept_by_stage(recipe: Recipe, shape: Shape, step: Step, stage: int) -> float:
    """Bytes a token that are in flight when the first backward pass of a stage begins."""
    plan, kept = recipe.trainer.parallel, KEPT["megatron", recipe.trainer.dtype]
    rows = shape.hidden / (plan.tensor if plan.sequence else 1)
    each = [_layer_bytes(shape, kept, recipe, layer) for layer in stage_layers(shape, plan, stage)]
    working = 0.0
    if plan.recompute == "full":  # kept: the input of each layer, and one whole layer at a time
        working = max(each)
        each = [rows * ELEMENT[recipe.trainer.dtype]] * len(each)
    count = micro_batches(recipe, step)
    ahead = plan.pipeline - stage
    in_flight = float(min(ahead, count))
    if plan.virtual_pipeline > 1:  # in chunks of layers
        chunks = 2 * (ahead - 1) + (plan.virtual_pipeline - 1) * plan.pipeline + 1
        in_flight = min(chunks, count * plan.virtual_pipeline) / plan.virtual_pipeline
    ends = kept.ends * rows if stage in (0, plan.pipeline - 1) else 0
    return in_flight * sum(each) + working + ends


def _layer_bytes(shape: Shape, kept: Kept, recipe: Recipe, layer: int) -> float:
    """Bytes for one token in one layer, for tokens that the process has after context parallelism."""
    plan = recipe.trainer.parallel
    rows = 1 / (plan.tensor if plan.sequence else 1)
    queries = shape.heads * shape.head_dim / plan.tensor
    pairs = shape.kv_heads * shape.head_dim / plan.tensor
    # every process of a sequence gathers all its keys and values
    gathered = 2 * ELEMENT[recipe.trainer.dtype] * pairs * (plan.context - 1)
    total = kept.hidden * shape.hidden * rows + kept.heads * queries + kept.kv_heads * pairs + gathered
    if not shape.sparse[layer]:
        return total + kept.mlp * shape.intermediate / plan.tensor
    sent = shape.chosen * rows
    columns = kept.experts * shape.expert_intermediate
    return total + sent * (columns + kept.sent * shape.hidden * plan.expert_tensor)


def _head_bytes(shape: Shape, tokens: int, tensor: int) -> float:
    return min(tokens * shape.vocabulary / tensor, LOGITS_PER_CHUNK) * LOGIT_BYTES
