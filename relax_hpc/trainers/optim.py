"""A model with its AdamW. Gradients lie in flat buckets; the learning rate is a function of the step, and not saved."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from relax_hpc.files.tensor_files import split
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
    """A model that learns: its parameters (tied ones once), their gradients, AdamW."""

    def __init__(self, model: torch.nn.Module, config: Trainer) -> None:
        self.model, self.config = model, config
        self.parameters = dict(model.named_parameters())
        self.gradients = FlatGradients(list(self.parameters.values()))
        self.begin()

    def begin(self) -> None:
        """Make a fresh optimizer."""
        config = self.config
        matrices = [p for p in self.parameters.values() if p.ndim > 1]
        vectors = [p for p in self.parameters.values() if p.ndim <= 1]  # norms and biases do not decay
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=config.learning_rate, betas=config.betas, eps=ADAM_EPS, fused=True
        )

    def update(self, norm: float, rate: float) -> None:
        """Clip gradients of this norm, and make one step with learning rate `rate`."""
        self.gradients.clip(norm, self.config.clip_grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
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
