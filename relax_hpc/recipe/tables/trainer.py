"""[trainer]: the backend, its processes, and how it learns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from relax_hpc.recipe.tables.parallel import Parallel, misfit
from relax_hpc.recipe.tables.table import Key, Table, conflict, even_share

LOGITS_PER_CHUNK = 2**24
"""Logits that a trainer process holds at once, in numbers (64 MiB in float32)."""
ADAM_EPS = 1e-8
Decay = Annotated[float, Field(ge=0, lt=1)]


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
        16384, "Token budget of one forward and backward on one process.", resume=True
    )

    @model_validator(mode="after")
    def _spreads(self) -> Trainer:
        even_share("trainer.processes", self.processes, "trainer.nodes", self.nodes)
        if self.backend == "torch" and self.parallel != Parallel():
            raise conflict('[trainer.parallel] is for trainer.backend = "megatron": set that, or remove the table')
        wrong = misfit(self.parallel, self.processes, None)
        if wrong:
            raise conflict(wrong)
        return self
