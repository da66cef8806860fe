"""Samples -> micro-batches: balanced over data-parallel ranks, under a token budget, packed into rows with little padding.

    lengths ──balance──► a share of samples a rank ──cut──► micro-batches of rows of samples ──pack──► arrays

All of it depends on the lengths alone: every process computes the whole plan and takes its own share. A sequence goes in
without its last token, which predicts nothing.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relax_hpc.records import Rollouts

Rows = list[list[int]]
"""A micro-batch: rows of samples, by index."""

PADDING = -1
"""The segment of tokens that only fill a row."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward reads. R rows of L tokens, M tokens that enter the loss."""

    tokens: NDArray[np.int64]  # [R, L]
    positions: NDArray[np.int64]  # [R, L] each sample begins again at 0; padding counts on
    segments: NDArray[np.int64]  # [R, L] which sample of the row, PADDING after the last
    predictors: NDArray[np.int64]  # [M] where, in the flattened [R * L], the model predicts the token
    targets: NDArray[np.int64]  # [M] the token itself, by its index in rollouts.tokens

    @property
    def one_sample_a_row(self) -> bool:
        """Causal attention alone keeps the samples apart: what follows a row's only sample is padding."""
        return bool((self.segments < 1).all())

    def attention_mask(self) -> NDArray[np.bool_]:
        """[R, 1, L, L] True where a query (second last axis) may look: its own sample, not after itself."""
        same = self.segments[:, None, :, None] == self.segments[:, None, None, :]
        mask: NDArray[np.bool_] = same & np.tri(self.segments.shape[1], dtype=np.bool_)
        return mask


def balance(lengths: NDArray[np.int64], ranks: int) -> list[list[int]]:
    """Shares of samples, one a rank, of nearly equal tokens: the longest first, each to the rank with the fewest.

    Within 4/3 of the best possible largest share (R. L. Graham, 1969).
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for sample in np.argsort(-lengths, kind="stable").tolist():
        tokens, rank = heapq.heappop(load)
        shares[rank].append(sample)
        heapq.heappush(load, (tokens + int(lengths[sample]), rank))
    return shares


def cut(share: list[int], lengths: NDArray[np.int64], budget: int) -> list[Rows]:
    """Micro-batches of at most `budget` tokens, padding included; one sample beyond the budget stands alone.

    Rows are as long as the micro-batch's longest sample and filled first-fit decreasing.
    """
    if not share:
        return []
    ordered = sorted(share, key=lambda sample: (-int(lengths[sample]), sample))
    shortest = int(lengths[ordered[-1]])
    batches: list[Rows] = []
    width = 0
    open_rows: list[tuple[list[int], int]] = []  # (row, tokens that it has room for)
    for sample in ordered:
        length = int(lengths[sample])
        place = next((i for i, (_, room) in enumerate(open_rows) if room >= length), None)
        if place is not None:
            row, room = open_rows[place]
            row.append(sample)
            open_rows[place] = (row, room - length)
            if room - length < shortest:
                del open_rows[place]
            continue
        if not batches or (len(batches[-1]) + 1) * width > budget:
            batches.append([])
            open_rows, width = [], length
        row = [sample]
        batches[-1].append(row)
        if width - length >= shortest:
            open_rows.append((row, width - length))
    return batches


def plan(rollouts: Rollouts, ranks: int, budget: int) -> list[list[Rows]]:
    """Micro-batches of each rank; samples without a token in the loss are left out. Raises ValueError for an empty prompt."""
    if len(rollouts) and not np.diff(rollouts.prompt_offsets).all():
        empty = int(np.flatnonzero(np.diff(rollouts.prompt_offsets) == 0)[0])
        raise ValueError(f"sample {rollouts.ids[empty]} has no prompt tokens: nothing predicts its first token")
    counted = np.concatenate([[0], np.cumsum(rollouts.loss_mask, dtype=np.int64)])
    used = np.flatnonzero(counted[rollouts.offsets[1:]] > counted[rollouts.offsets[:-1]])
    lengths = rollouts.lengths() - 1
    shares = balance(lengths[used], ranks)
    return [cut([int(used[i]) for i in share], lengths, budget) for share in shares]


def pack(rollouts: Rollouts, rows: Rows) -> MicroBatch:
    """The arrays of one micro-batch."""
    lengths = rollouts.lengths() - 1
    width = max(sum(int(lengths[sample]) for sample in row) for row in rows)
    tokens = np.zeros((len(rows), width), np.int64)
    positions = np.tile(np.arange(width), (len(rows), 1))
    segments = np.full((len(rows), width), PADDING, np.int64)
    predictors, targets = [], []
    for r, row in enumerate(rows):
        start = 0
        for segment, sample in enumerate(row):
            prompt = rollouts.prompt_tokens[rollouts.prompt_offsets[sample] : rollouts.prompt_offsets[sample + 1]]
            first, last = int(rollouts.offsets[sample]), int(rollouts.offsets[sample + 1])
            end = start + int(lengths[sample])
            tokens[r, start : start + len(prompt)] = prompt
            tokens[r, start + len(prompt) : end] = rollouts.tokens[first : last - 1]
            positions[r, start:end] = np.arange(end - start)
            segments[r, start:end] = segment
            chosen = np.flatnonzero(rollouts.loss_mask[first:last])
            predictors.append(chosen + (r * width + start + len(prompt) - 1))
            targets.append(chosen + first)
            start = end
    return MicroBatch(tokens, positions, segments, np.concatenate(predictors), np.concatenate(targets))
