"""Sampling: logits -> tokens and their logprobs."""

from __future__ import annotations

import torch
from torch import Tensor

from relax_hpc.engines.base import Sampling


def draw(logits: Tensor, sampling: Sampling, random: torch.Generator | Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token a row of `logits` [B, V]: ([B] int64 tokens, [B] float32 logprobs under softmax(logits / temperature)
    before top-p and top-k). Temperature 0 takes the likeliest token, the first of equals.

    random: a generator for the whole batch, or [B, 1] float64 numbers from 0 to below 1, one for each row.
    """
    scaled = logits.float()
    if sampling.temperature not in (0.0, 1.0):
        scaled = scaled / sampling.temperature
    probabilities = scaled.softmax(-1)
    if sampling.temperature == 0:
        tokens = probabilities.argmax(-1, keepdim=True)
    else:
        tokens = _sample(_truncate(probabilities, sampling.top_p, sampling.top_k), random)
    return tokens.squeeze(1), probabilities.gather(1, tokens).log_().squeeze(1)


def _truncate(probabilities: Tensor, top_p: float, top_k: int) -> Tensor:
    """Keep the probabilities of the k likeliest tokens, of these the smallest set with top_p of the whole; unnormalized."""
    if top_p >= 1 and not 0 < top_k < probabilities.shape[1]:
        return probabilities
    count = top_k if 0 < top_k < probabilities.shape[1] else probabilities.shape[1]
    values, indices = probabilities.topk(count, sorted=True)
    if top_p < 1:
        before = values.cumsum(-1) - values
        values = values.masked_fill(before >= top_p, 0.0)
    return torch.zeros_like(probabilities).scatter_(1, indices, values)


def _sample(weights: Tensor, random: torch.Generator | Tensor) -> Tensor:
    """[B, 1] one token a row, drawn with probability proportional to its weight."""
    if isinstance(random, torch.Generator):
        if weights.is_cuda:  # its cumulative sums differ from run to run; its multinomial does not
            return torch.multinomial(weights, 1, generator=random)
        # One uniform number a row. multinomial draws an exponential one for every token of the vocabulary: a fifth of a step.
        random = torch.rand(len(weights), 1, dtype=torch.float64, generator=random)
    # In float64, as 2^-24 is no resolution for the tail of a large vocabulary.
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, random * cumulative[:, -1:], right=True)
