"""Per-sample operations on flat tokens: sums and means over each sample's tokens, and each token's weight in the step's
mean.

Sums are by segments, not by scattered additions, whose order is not fixed on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax_hpc.algorithms.base import LossInputs


def sums(values: Tensor, lengths: Tensor) -> Tensor:
    """[S] sums over each sample's tokens. values: [M], sample after sample; lengths: [S] int64, of sum M."""
    if not len(lengths):
        return values  # of length 0 too: segment_reduce refuses it
    return torch.segment_reduce(values, "sum", lengths=lengths)


def means(values: Tensor, lengths: Tensor) -> Tensor:
    """[S] means over each sample's tokens."""
    return sums(values, lengths) / lengths


def highest(values: Tensor, lengths: Tensor) -> Tensor:
    """[S] the greatest value among each sample's tokens."""
    return torch.segment_reduce(values, "max", lengths=lengths) if len(lengths) else values


def spread(values: Tensor, lengths: Tensor) -> Tensor:
    """[M] each sample's value at all of its tokens. values: [S]."""
    return values[torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)]


def weights(aggregate: str, inputs: LossInputs) -> Tensor | None:
    """[M] factors on the losses, with which their sum over the step's token count is the mean wanted; None for `token`,
    where they are 1.

    `sequence`: the mean over samples of their means over tokens; `prompt`: the mean over groups of their means over
    tokens; `constant`: the mean over samples of their sums over the most tokens that they may have.
    """
    totals = inputs.totals
    if aggregate == "token":
        return None
    if aggregate == "sequence":
        return spread(totals.tokens / (totals.samples * inputs.lengths.to(inputs.logprobs.dtype)), inputs.lengths)
    if aggregate == "prompt":
        return spread(totals.tokens / (totals.groups * inputs.group_tokens.to(inputs.logprobs.dtype)), inputs.lengths)
    return torch.full_like(inputs.advantages, totals.tokens / (totals.samples * totals.budget))
