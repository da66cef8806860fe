"""GMPO (arXiv 2507.20673): the geometric mean of a sample's token ratios, each of them clipped."""

from __future__ import annotations

import torch
from torch import Tensor

from relax_hpc.algorithms.base import LossAndMetrics, LossInputs
from relax_hpc.algorithms.common.losses import capped, exp_ratio
from relax_hpc.algorithms.common.sequences import means, spread
from relax_hpc.algorithms.grpo import GroupRelative
from relax_hpc.recipe.tables.algorithm import Gmpo


class GmpoAlgorithm(GroupRelative):
    config: Gmpo

    def surrogate(self, inputs: LossInputs, old: Tensor) -> LossAndMetrics:
        """-exp(mean of the clipped log ρ)·A at each token of a sample. A log ρ is clipped to [-low, high], on the side to
        which its advantage pushes (eq. 4, and the clip of section 3.3)."""
        log_ratio, advantages, (low, high) = inputs.logprobs - old, inputs.advantages, self.config.clip
        up = advantages > 0
        clipped = torch.where(up, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
        ratio = exp_ratio(spread(means(clipped, inputs.lengths), inputs.lengths))
        active = clipped != log_ratio
        metrics = {"clip_fraction": active, "clip_low": active & ~up, "clip_high": active & up}
        loss, metrics["clip_dual"] = capped(-ratio * advantages, advantages, self.config.dual_clip or None)
        return loss, {name: where.float() for name, where in metrics.items()}
