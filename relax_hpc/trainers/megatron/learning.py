"""A model that learns under Megatron: its chunks, summed gradients, AdamW whose state data-parallel processes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import relax_hpc.trainers.megatron.checkpoint.moments as moments
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.trainer import ADAM_EPS
from relax_hpc.trainers.megatron.head import Policy

PartOf = Callable[[str], str]


class Learning:
    """A model that learns. reduced: the chunks for a forward with gradients; `config`, which sums these, is theirs alone."""

    def __init__(
        self, chunks: list[Policy], config: TransformerConfig, recipe: Recipe, part_of: PartOf = lambda name: "whole"
    ) -> None:
        """part_of: parameter's name -> the part of the model, by which freeze and learning_rates name it."""
        self.chunks, self.recipe = chunks, recipe
        named = [(name, parameter) for chunk in chunks for name, parameter in chunk.named_parameters()]
        for name, parameter in named:
            parameter.requires_grad_(part_of(name) not in recipe.trainer.freeze)
        self.reduced = self._reduced(config)
        of_optimizer = _optimizer_config(recipe)
        groups = get_standard_config_overrides(of_optimizer)
        for part, rate in recipe.trainer.learning_rates.items():
            mine = {id(parameter) for name, parameter in named if part_of(name) == part}
            is_mine = ParamPredicate(name=part, fn=lambda parameter, mine=mine: id(parameter) in mine)
            groups[ParamKey(predicate=is_mine)] = ParamGroupOverride(max_lr=rate)
        self.optimizer = get_megatron_optimizer(of_optimizer, self.reduced, groups, use_gloo_process_groups=False)
        self.begin()

    def begin(self, steps: int = 0) -> None:
        """Set the moments to zero and the number of steps to `steps`. Master weights stay as they are."""
        self.steps = steps
        for optimizer in self.optimizers():
            moments.fresh(optimizer, steps)

    def optimizers(self) -> list[Any]:
        return [o for o in getattr(self.optimizer, "chained_optimizers", [self.optimizer]) if not o.is_stub_optimizer]

    def zero(self) -> None:
        for chunk in self.reduced:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def norm(self) -> float:
        """The norm of the gradients, over the whole model."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def update(self, norm: float, rate: float) -> None:
        """Clip gradients of this norm, and make one step with learning rate `rate`; parts have theirs in proportion."""
        config = self.recipe.trainer
        for optimizer in self.optimizers():
            clip_grad_by_total_norm_fp32(optimizer.get_parameters(), config.clip_grad_norm, norm)
            for group in optimizer.param_groups:
                group["lr"] = rate * group["max_lr"] / config.learning_rate
                group["weight_decay"] = config.weight_decay * group["wd_mult"]
        self.optimizer.step_with_ready_grads()
        self.steps += 1

    def _reduced(self, model: TransformerConfig) -> list[Any]:
        """Wrap the chunks so that gradients are summed over the processes that hold the same parameters."""
        overlap = self.recipe.trainer.parallel.overlap
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=overlap
        )
        reduced = [
            DistributedDataParallel(model, config, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(self.chunks)
        ]
        model.finalize_model_grads_func = _finalize
        if overlap:
            model.no_sync_func = [c.no_sync for c in reduced] if len(reduced) > 1 else reduced[0].no_sync
        return reduced


def _finalize(chunks: list[Any], tokens: Tensor | None, **options: Any) -> None:
    """Sum gradients over processes; they are divided by the number of tokens already."""
    finalize_model_grads(chunks, None, **options)


def _optimizer_config(recipe: Recipe) -> OptimizerConfig:
    config = recipe.trainer
    dtype = getattr(torch, config.dtype)
    return OptimizerConfig(
        optimizer="adam",
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=ADAM_EPS,
        clip_grad=config.clip_grad_norm,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
