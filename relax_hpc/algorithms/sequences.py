"""Samples among flat tokens: sums and means over each one's tokens, and what a token weighs in the step's mean.

Sums are by segments, not by scattered additions, whose order a GPU does not keep.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relax_hpc.algorithms.base import LossInputs


def sums(values: Tensor, lengths: Tensor) -> Tensor:
    """[S] over each sample's tokens. values: [M], sample after sample; lengths: [S] int64, of sum M."""
    if not len(lengths):
        return values  # of length 0 too: segment_reduce refuses it
    return torch.segment_reduce(values, "sum", lengths=lengths)


def means(values: Tensor, lengths: Tensor) -> Tensor:
    """[S] over each sample's tokens."""
    return sums(values, lengths) / lengths


def spread(values: Tensor, lengths: Tensor) -> Tensor:
    """[M] each sample's value at all of its tokens. values: [S]."""
    return values[torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)]


def weights(aggregate: str, inputs: LossInputs) -> Tensor | None:
    """[M] times which the losses' sum over the step's token count is the mean wanted; None for `token`, where they are 1.

    `sequence`: of samples' means over their tokens; `constant`: of samples' sums over the most tokens they may have.
    """
    totals = inputs.totals
    if aggregate == "token":
        return None
    if aggregate == "sequence":
        return spread(totals.tokens / (totals.samples * inputs.lengths.to(inputs.logprobs.dtype)), inputs.lengths)
    return torch.full_like(inputs.advantages, totals.tokens / (totals.samples * totals.budget))
