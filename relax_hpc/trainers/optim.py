"""A model with its AdamW. Gradients lie in flat buckets; the learning rate is a function of the step, and not saved.

Parts of a model with media may have a learning rate of their own, or be frozen: then they have neither gradients nor
moments. Where a model has an adapter (LoRA), it alone learns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from relax_hpc.files.tensor_files import split
from relax_hpc.huggingface.lora import FACTORS
from relax_hpc.recipe.tables.trainer import ADAM_EPS, Trainer

BUCKET_BYTES = 64 * 2**20
NORM_EPS = 1e-6
"""Added to the norm in clipping, as in torch.nn.utils.clip_grad_norm_."""


def learning_rate(config: Trainer, step: int, steps: int) -> float:
    """The learning rate of step `step` (from 0) of `steps`: it rises over lr_warmup_steps, then falls to the minimum."""
    peak, floor, rising = config.learning_rate, config.min_learning_rate, config.lr_warmup_steps
    if step < rising:
        return peak * (step + 1) / rising
    done = min(1.0, (step - rising) / max(1, steps - rising))
    if config.schedule == "linear":
        return peak + (floor - peak) * done
    if config.schedule == "cosine":
        return floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2
    return peak


class Learning:
    """A model that learns: its parameters (tied ones once, frozen ones not at all), their gradients, AdamW."""

    def __init__(
        self, model: torch.nn.Module, config: Trainer, part_of: Callable[[str], str] = lambda name: "whole"
    ) -> None:
        """part_of: parameter's name -> the part of the model, by which freeze and learning_rates name it."""
        self.model, self.config, self._part_of = model, config, part_of
        adapted = any(name.endswith(FACTORS) for name, _ in model.named_parameters())
        for name, parameter in model.named_parameters():
            learns = part_of(name) not in config.freeze and not (adapted and not name.endswith(FACTORS))
            parameter.requires_grad_(learns)
            parameter.grad = None  # of what learned before its adapter
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.gradients = FlatGradients(list(self.parameters.values()))
        self.begin()

    def begin(self) -> None:
        """Make a fresh optimizer."""
        config, own_rates = self.config, {str(part): rate for part, rate in self.config.learning_rates.items()}
        groups: dict[tuple[float, float], list[Parameter]] = {}
        for name, parameter in self.parameters.items():
            decay = config.weight_decay if parameter.ndim > 1 else 0.0  # norms and biases do not decay
            rate = own_rates.get(self._part_of(name), config.learning_rate)
            groups.setdefault((decay, rate / config.learning_rate), []).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": those, "weight_decay": decay, "scale": scale} for (decay, scale), those in groups.items()],
            lr=config.learning_rate,
            betas=config.betas,
            eps=ADAM_EPS,
            fused=True,
        )

    def update(self, norm: float, rate: float) -> None:
        """Clip gradients of this norm, and make one step with learning rate `rate`; parts have theirs in proportion."""
        self.gradients.clip(norm, self.config.clip_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        self.optimizer.step()


class FlatGradients:
    """Every parameter's gradient is a view into one of a few flat buffers, which are zeroed, reduced and scaled whole."""

    def __init__(self, parameters: Sequence[Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
        self.buffers: list[Tensor] = []
        for bucket in split(parameters, lambda parameter: parameter.nbytes, bucket_bytes):
            sizes = [parameter.numel() for parameter in bucket]
            self.buffers.append(torch.zeros(sum(sizes), dtype=bucket[0].dtype, device=bucket[0].device))
            for parameter, flat in zip(bucket, self.buffers[-1].split(sizes), strict=True):
                parameter.grad = flat.view_as(parameter)

    def zero(self) -> None:
        for buffer in self.buffers:
            buffer.zero_()

    def all_reduce(self) -> None:
        """Sum the gradients over the processes."""
        for work in [dist.all_reduce(buffer, async_op=True) for buffer in self.buffers]:
            work.wait()

    def norm(self) -> float:
        """The global L2 norm of the gradients."""
        return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(b) for b in self.buffers])))

    def clip(self, norm: float, limit: float) -> None:
        """Scale all gradients so that their global norm, which is `norm`, is at most `limit`."""
        if norm > limit:
            for buffer in self.buffers:
                buffer.mul_(limit / (norm + NORM_EPS))
