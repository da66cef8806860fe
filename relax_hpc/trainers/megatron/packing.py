"""Packing for Megatron: sequences end to end in one row, as many micro-batches on every data-parallel rank.

    samples ──balance──► a share a rank ──balance──► micro-batches under the token budget ──pack──► this rank's tokens

Every rank must make the same number of forward passes, since experts and pipeline stages meet in them. With context
parallelism over C processes each sequence is cut into 2C chunks, and process c holds chunks c and 2C - 1 - c.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from numpy.typing import NDArray
from torch import Tensor

from relax_hpc.media.families import TEXT, Family
from relax_hpc.records import Rollouts
from relax_hpc.trainers import packing
from relax_hpc.trainers.megatron.shown import Among, Shown, shown_by
from relax_hpc.trainers.packing import balance, in_loss, rounded, tree_length, units_of


@dataclass(frozen=True, slots=True)
class Layout:
    """The padding that sequences need under the plan, and the chunks of them that this process holds."""

    context: int
    context_rank: int
    tensor: int
    """Processes over which sequence parallelism spreads the tokens; 1 without it."""
    tensor_rank: int

    @property
    def unit(self) -> int:
        """Every sequence's length is a multiple of this."""
        return 2 * self.context if self.context > 1 else 1


@dataclass(frozen=True, slots=True)
class Block:
    """B sequences of like length, for one call of attention."""

    queries: Tensor  # [B, Lq] index of this process's tokens
    keys: Tensor  # [B, Lk] index of all tokens
    mask: Tensor | None  # [B, 1, Lq, Lk] bool; None is causal
    real: Tensor  # index of what is no padding, in [B * Lq]


@dataclass(frozen=True, slots=True)
class AttentionLayout:
    blocks: list[Block]
    order: Tensor  # [t] where each of this process's tokens is, in the blocks' outputs
    gathered: Tensor  # [T] where each token is, among those gathered over the context-parallel processes


@dataclass
class Packed(PackedSeqParams):  # type: ignore[misc]
    """A micro-batch's sequences in the form that Megatron-core and Transformer Engine take, and our own attention too."""

    lengths: NDArray[np.int64] | None = None  # [n] of the filled-up sequences
    layout: Layout | None = None
    shown: Shown | None = None  # the media; None where none are encoded
    routed: Tensor | None = (
        None  # [t / tensor, layers, K] experts of the tokens that this process routes; None: the router's
    )

    @cached_property
    def attention(self) -> AttentionLayout:
        """The layout for our own attention, computed once a micro-batch for all layers."""
        assert self.lengths is not None and self.layout is not None
        return _attention_layout(self.lengths, self.layout, self.cu_seqlens_q.device)


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """This process's part of a MicroBatch: the input of one forward. T tokens in all, t of them here; M tokens that
    enter the loss, m of them predicted here."""

    tokens: Tensor  # [1, t] int64
    positions: Tensor  # [1, t] int64 within the sequence; [3, 1, T] float32, of all tokens, where they have three axes
    packed: Packed
    targets: NDArray[np.int64]  # [M] the tokens in the loss, by their index in rollouts.tokens
    predictors: Tensor  # [m] where, among the t tokens here, a token in the loss is predicted
    mine: Tensor  # [m] which of the M tokens those are


def plan(
    rollouts: Rollouts, ranks: int, budget: int, multiple: int, whole_groups: bool = False
) -> list[list[list[int]]]:
    """Plan the micro-batches of samples for each data-parallel rank; equally many, a multiple of `multiple`, some maybe
    empty.

    Samples without a token in the loss are left out; a sample above the budget stands alone. whole_groups: samples of a
    group stay together, and a group above the budget stands alone.
    """
    used = in_loss(rollouts)
    units = [used[unit] for unit in units_of(rollouts.group[used], whole_groups)]
    lengths = np.array([(rollouts.lengths()[unit] - 1).sum() for unit in units], np.int64)
    shares = balance(lengths, ranks)
    count = max(1, math.ceil(max(sum(int(lengths[i]) for i in share) for share in shares) / budget))
    while True:
        count = math.ceil(count / multiple) * multiple
        parts = [balance(lengths[share], count) for share in shares]
        sums = [
            int(lengths[share][part].sum())
            for share, cut in zip(shares, parts, strict=True)
            for part in cut
            if len(part) > 1
        ]
        if max(sums, default=0) <= budget:
            return [
                [[int(sample) for i in part for sample in units[share[i]]] for part in cut]
                for share, cut in zip(shares, parts, strict=True)
            ]
        count += max(1, count // 8)


def pack(
    rollouts: Rollouts,
    samples: list[int],
    layout: Layout,
    device: torch.device,
    family: Family = TEXT,
    config: Any = None,
    among: Among | None = None,
) -> LocalBatch:
    """Make this process's part of one micro-batch: one row of samples, one behind the other. among: the processes that
    encode its media; None where this one does not."""
    rows: packing.Rows = [[(sample,) for sample in samples]]
    whole = packing.place(rollouts, rows, layout.unit, layout.unit * layout.tensor, family, config)
    each = [rounded(tree_length(rollouts, (sample,)), layout.unit) for sample in samples]
    # padding goes behind the last sequence: causal attention does not see it
    lengths = np.array(each or [0], np.int64)
    lengths[-1] += whole.tokens.shape[1] - lengths.sum()
    starts = np.cumsum([0, *lengths[:-1]])
    held = _held(lengths, layout, layout.context_rank)
    mine_only = np.array_split(held, layout.tensor)[layout.tensor_rank]  # equal parts
    here = np.full(int(lengths.sum()), -1)
    here[held] = np.arange(len(held))
    chosen = here[whole.predictors]
    mine = np.flatnonzero(chosen >= 0)
    to = partial(_tensor, device=device)
    packed = _packed(lengths, layout, device)
    if (experts := rollouts.routed_experts) is not None:
        recorded = np.cumsum([0, *(rollouts.lengths() - 1)])
        routed = [_routes(experts[slice(*recorded[s : s + 2])], n) for s, n in zip(samples, each, strict=True)]
        every = np.concatenate([experts[:0], *routed])
        packed.routed = to(_routes(every, int(lengths.sum()))[mine_only].astype(np.int64))
    if among is not None:
        packed.shown = shown_by(rollouts, samples, starts, mine_only, family, config, device, among)
    within = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    return LocalBatch(
        tokens=to(whole.tokens[0, held])[None],
        positions=to(whole.positions if family.axes > 1 else within[held][None]),
        packed=packed,
        targets=whole.targets,
        predictors=to(chosen[mine]),
        mine=to(mine),
    )


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _routes(experts: NDArray[np.integer[Any]], length: int) -> NDArray[np.integer[Any]]:
    """[length, layers, K]: the experts with padding, which goes to the first experts; nothing depends on it."""
    layers, chosen = experts.shape[1:]
    padding = np.broadcast_to(np.arange(chosen, dtype=experts.dtype), (length - len(experts), layers, chosen))
    return np.concatenate([experts, padding])


def _packed(lengths: NDArray[np.int64], layout: Layout, device: torch.device) -> Packed:
    bounds = torch.from_numpy(np.cumsum([0, *lengths])).to(device, torch.int32)
    longest = int(lengths.max())
    return Packed(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=lengths,
        layout=layout,
    )


def _held(lengths: NDArray[np.int64], layout: Layout, rank: int) -> NDArray[np.int64]:
    """[t] indices of the tokens, all sequences end to end, that context-parallel process `rank` holds."""
    if layout.context == 1:
        return np.arange(int(lengths.sum()))
    parts = []
    for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        chunks = (start + np.arange(length)).reshape(2 * layout.context, -1)
        parts += [chunks[rank], chunks[-1 - rank]]
    return np.concatenate(parts)


def _attention_layout(lengths: NDArray[np.int64], layout: Layout, device: torch.device) -> AttentionLayout:
    starts = np.cumsum([0, *lengths])[:-1]
    share = lengths // layout.context  # tokens of each sequence that are here
    here = np.cumsum([0, *share])[:-1]
    held = _held(lengths, layout, layout.context_rank)
    classes: dict[int, list[int]] = {}
    for i, length in enumerate(lengths.tolist()):
        classes.setdefault((length - 1).bit_length(), []).append(i)
    to = partial(_tensor, device=device)
    blocks, taken = [], []
    for members in classes.values():
        n, q, k = np.array(members), int(share[members].max()), int(lengths[members].max())
        queries = here[n, None] + np.minimum(np.arange(q), share[n, None] - 1)
        keys = starts[n, None] + np.minimum(np.arange(k), lengths[n, None] - 1)
        real = np.flatnonzero(np.arange(q) < share[n, None])
        mask = None
        if layout.context > 1:  # a query sees the keys up to its own place in the sequence
            places = held[queries] - starts[n, None]
            mask = to(np.arange(k) <= places[:, :, None])[:, None]
        blocks.append(Block(to(queries), to(keys), mask, to(real)))
        taken.append(queries.ravel()[real])
    order = np.argsort(np.concatenate(taken))
    everyone = np.concatenate([_held(lengths, layout, rank) for rank in range(layout.context)])
    return AttentionLayout(blocks, to(order), to(np.argsort(everyone)))
