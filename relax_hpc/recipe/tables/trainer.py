"""[trainer], [trainer.parallel], [trainer.lora]: the backend, its processes, how a model is split over them, and how it learns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from relax_hpc.recipe.tables.table import Key, Table, conflict, even_share

LOGITS_PER_CHUNK = 2**24
"""Logits that a trainer process holds at once, in numbers (64 MiB in float32)."""
ADAM_EPS = 1e-8
Decay = Annotated[float, Field(ge=0, lt=1)]
Part = Literal["language", "vision", "projector", "audio"]
"""A part of a model with media: between an encoder and the language model there is a projector."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model that a parallel plan must divide."""

    heads: int
    kv_heads: int
    layers: int
    intermediate: int
    """Width of the MLP that tensor parallelism splits; 0 where every layer has experts instead."""
    experts: int
    """Experts of a layer; 0 for a dense model."""
    expert_intermediate: int


class Parallel(Table):
    """The parallel plan of the megatron backend, over trainer.processes; factors that are not named here are data
    parallel. Data-parallel processes share the optimizer's state."""

    tensor: PositiveInt = Key(1, "Processes that share every matrix; divides heads and key/value heads.", resume=True)
    sequence: bool = Key(
        False,
        "The tensor-parallel processes share the activations between the matrices too; experts need it.",
        resume=True,
    )
    pipeline: PositiveInt = Key(1, "Stages that the layers are spread over.", resume=True)
    virtual_pipeline: PositiveInt = Key(
        1,
        "Chunks of layers on each stage: more of them shorten the time in which stages wait for each other.",
        resume=True,
    )
    context: PositiveInt = Key(1, "Processes that share every sequence.", resume=True)
    expert: PositiveInt = Key(
        1, "Processes that the experts are spread over, among the data-parallel ones.", resume=True
    )
    expert_tensor: PositiveInt = Key(1, "Processes that share every expert's matrices.", resume=True)
    overlap: bool = Key(False, "Reduce gradients while the backward pass still runs.", resume=True)
    spread_encoders: bool = Key(
        False,
        "Of a model with media: the tensor-parallel processes encode a share of a micro-batch's media each and exchange the features; else each encodes all.",
        resume=True,
    )
    recompute: Literal["none", "selective", "full"] = Key(
        "none", "Activations computed again in the backward pass: none, those of attention, or all.", resume=True
    )


def misfit(plan: Parallel, processes: int, model: Sizes | None, role: str = "trainer") -> str | None:
    """Explain why `plan` does not fit a role's processes or the model; None where it fits. Without a model only the
    processes are checked."""
    together = plan.tensor * plan.pipeline * plan.context
    experts = plan.expert * plan.expert_tensor * plan.pipeline
    where = "[trainer.parallel]"
    if processes % together:
        return (
            f"{where} tensor = {plan.tensor}, pipeline = {plan.pipeline} and context = {plan.context} take "
            f"{together} processes together, which does not divide {role}.processes = {processes}: use a multiple of {together}"
        )
    if processes % experts:
        return (
            f"{where} expert = {plan.expert}, expert_tensor = {plan.expert_tensor} and pipeline = {plan.pipeline} take "
            f"{experts} processes together, which does not divide {role}.processes = {processes}: use a multiple of {experts}"
        )
    if plan.virtual_pipeline > 1 and plan.pipeline == 1:
        return f"{where} virtual_pipeline = {plan.virtual_pipeline} splits pipeline stages, but pipeline = 1: raise it or leave virtual_pipeline out"
    if plan.sequence and plan.tensor == 1:
        return (
            f"{where} sequence = true shares activations among tensor-parallel processes, but tensor = 1: leave it out"
        )
    if plan.spread_encoders and plan.tensor == 1:
        return (
            f"{where} spread_encoders = true shares media among tensor-parallel processes, but tensor = 1: leave it out"
        )
    return None if model is None else _misfit_of_model(plan, model)


def _misfit_of_model(plan: Parallel, model: Sizes) -> str | None:
    if not model.experts and plan.expert * plan.expert_tensor > 1:
        return f"[trainer.parallel] expert = {plan.expert}, expert_tensor = {plan.expert_tensor}: the model has no experts, leave them out"
    if model.experts and plan.tensor > 1 and not plan.sequence:
        return f"[trainer.parallel] tensor = {plan.tensor} with experts needs sequence = true"
    if model.experts and plan.expert == 1 and plan.expert_tensor != plan.tensor:
        # Megatron-core then sums the experts' gradients over too few processes
        return (
            f"[trainer.parallel] expert_tensor = {plan.expert_tensor} and tensor = {plan.tensor} must be equal where expert = 1: "
            f"set expert_tensor = {plan.tensor}, or raise expert"
        )
    stages = plan.pipeline * plan.virtual_pipeline
    divided = [
        ("tensor", plan.tensor, "attention heads", model.heads),
        ("tensor", plan.tensor, "key/value heads", model.kv_heads),
        ("tensor", plan.tensor, "columns of its MLP", model.intermediate),
        ("pipeline x virtual_pipeline", stages, "layers", model.layers),
        ("expert", plan.expert, "experts", model.experts),
        ("expert_tensor", plan.expert_tensor, "columns of an expert", model.expert_intermediate),
    ]
    for key, count, what, size in divided:
        if size % count:
            fitting = [d for d in range(1, size + 1) if size % d == 0 and d <= max(count * 2, 8)]
            return f"[trainer.parallel] {key} = {count} must divide the model's {size} {what}: use one of {fitting}"
    return None


class Lora(Table):
    """A low-rank adapter (LoRA) learns, and the model's own weights stay as they are. Its format in files is PEFT's."""

    rank: PositiveInt = Key(16, "Rank of the adapter's matrices: the smaller side of both.")
    alpha: PositiveFloat = Key(32.0, "What the adapter adds is scaled by alpha / rank.")
    targets: tuple[str, ...] = Key(
        (),
        "Ends of the names of the linear layers that get an adapter, such as `q_proj`; none: all of the language model's, without its output layer.",
    )
    dropout: float = Key(0.0, "Share of an adapter's inputs that is dropped while it learns.", ge=0, lt=1)
    sync: Literal["adapter", "merge"] = Key(
        "adapter",
        "What a version holds: `adapter`: the adapter alone, which the engine adds to a base that it read once; `merge`: the whole model, with the adapter added to its weights.",
    )


class Trainer(Table):
    """The trainer role: its backend, its processes, its optimizer."""

    backend: Literal["torch", "megatron"] = Key(
        "torch",
        "`torch`: Hugging Face transformers, data parallel; `megatron`: Megatron-core, every kind of parallelism ([trainer.parallel]).",
    )
    processes: PositiveInt = Key(
        1, "Processes, over all nodes: data parallel, except for the factors of [trainer.parallel].", resume=True
    )
    parallel: Parallel = Parallel()
    lora: Lora | None = None
    nodes: PositiveInt = Key(1, "Nodes that share the processes evenly (on a cluster).", resume=True)
    threads: PositiveInt = Key(1, "CPU threads of each process.", resume=True)
    device: Literal["auto", "cpu", "cuda"] = Key("auto", "Device of the model; `auto` takes a GPU where there is one.")
    data_workers: int = Key(
        0,
        "Processes with which each trainer process reads and tokenizes what it learns ahead of the steps (`sft`, [sft_warm_start]); 0: between them.",
        ge=0,
    )
    prompts_per_step: PositiveInt = Key(32, "Prompts (groups) a training step consumes.")
    updates_per_step: PositiveInt = Key(
        1, "Optimizer steps that a training step makes, each on its share of the groups; with 1 all are in one."
    )
    max_skipped_steps: PositiveInt = Key(
        20,
        "Steps in a row with a skipped update (its loss or gradient was not finite) before the run stops and says why.",
        resume=True,
    )
    learning_rate: PositiveFloat = Key(
        1e-6,
        "Peak learning rate of AdamW. A run that is resumed with another uses it from its newest checkpoint on: steps after that are made again.",
        resume=True,
    )
    learning_rates: dict[Part, PositiveFloat] = Key(
        {},
        "Peak learning rates of parts of a model with media (`language`, `vision`, `projector`, `audio`), in place of learning_rate; they rise and fall with it.",
        resume=True,
    )
    freeze: tuple[Part, ...] = Key(
        (), "Parts of a model with media that do not learn: they have no gradients and no optimizer state."
    )
    betas: tuple[Decay, Decay] = Key((0.9, 0.95), "AdamW's moment decays, each from 0 to below 1.")
    weight_decay: float = Key(0.0, "AdamW's decoupled weight decay.", ge=0)
    clip_grad_norm: PositiveFloat = Key(1.0, "Global gradient norm above which gradients are scaled down.")
    schedule: Literal["constant", "linear", "cosine"] = Key(
        "constant", "How the learning rate falls to min_learning_rate over run.steps."
    )
    min_learning_rate: float = Key(0.0, "Learning rate at which `linear` and `cosine` end.", ge=0, resume=True)
    lr_warmup_steps: int = Key(0, "Steps over which the learning rate rises from 0.", ge=0)
    dtype: Literal["float32", "bfloat16"] = Key(
        "float32", "Arithmetic of forward and backward, and type of published weights; master weights are float32."
    )
    tokens_per_micro_batch: PositiveInt = Key(
        16384,
        "Token budget of one forward and backward on one process; of pictures and sounds, what their encoders cost in tokens.",
        resume=True,
    )

    share_prefixes: bool = Key(
        True,
        "Compute what samples of a group have in common once: a prompt that is long beside its answers, and turns before rollouts branch. The gradients are the same.",
        resume=True,
    )

    @model_validator(mode="after")
    def _spreads(self) -> Trainer:
        even_share("trainer.processes", self.processes, "trainer.nodes", self.nodes)
        if self.backend == "torch" and self.parallel != Parallel():
            raise conflict('[trainer.parallel] is for trainer.backend = "megatron": set that, or remove the table')
        if self.lora and self.backend != "torch":
            raise conflict('[trainer.lora] is for trainer.backend = "torch": set that, or remove the table')
        if both := sorted({*self.freeze} & {*self.learning_rates}):
            raise conflict(f"trainer.freeze and trainer.learning_rates both name {both}: leave them out of one")
        if wrong := misfit(self.parallel, self.processes, None):
            raise conflict(wrong)
        return self
