"""Where the segments of trees stand in a micro-batch's rows, and what each of them sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from relax_hpc.trainers.trees.segments import Trie


class Block(NamedTuple):
    """Tokens of one segment, from `begin` to `end`, and the stretches of tokens before them that they see."""

    begin: int
    end: int
    before: tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Shared:
    """How a micro-batch with samples that have turns in common is computed."""

    blocks: list[Block]
    """All segments, in the flattened [R * L]."""
    asked: NDArray[np.int64]  # [U] of the M predictions, one of each that differ in place or token
    of: NDArray[np.int64]  # [M] which of the U each prediction is


def starts_of(trie: Trie, begin: int) -> NDArray[np.int64]:
    """[S + 1] where each segment starts in a row, and the last one ends."""
    starts: NDArray[np.int64] = begin + np.cumsum([0, *(segment.tokens for segment in trie.segments)])
    return starts


def ends_of(trie: Trie, starts: NDArray[np.int64]) -> list[int]:
    """Of each segment, the end of all that grew from it."""
    ends: list[int] = starts[1:].tolist()
    for number in range(len(ends) - 1, 0, -1):
        if (parent := trie.segments[number].parent) >= 0:
            ends[parent] = max(ends[parent], ends[number])
    return ends


def places(trie: Trie, starts: NDArray[np.int64], leaf: int) -> NDArray[np.int64]:
    """[n] where each token of a sample that ends with the segment `leaf` stands."""
    return np.concatenate([np.arange(starts[s], starts[s + 1]) for s in trie.path(leaf)])


def blocks_of(trie: Trie, starts: NDArray[np.int64]) -> list[Block]:
    """Return a tree's segments as attention takes them."""
    found = []
    for number, segment in enumerate(trie.segments):
        before: list[slice] = []
        for s in trie.path(segment.parent):
            begin, end = int(starts[s]), int(starts[s + 1])
            if before and before[-1].stop == begin:
                before[-1] = slice(before[-1].start, end)
            else:
                before.append(slice(begin, end))
        if segment.tokens:
            found.append(Block(int(starts[number]), int(starts[number + 1]), tuple(before)))
    return found


def shared_of(blocks: Sequence[Block], predictors: NDArray[np.int64], tokens: NDArray[np.int32]) -> Shared:
    """Find the predictions that differ. predictors, tokens: [M] where each is made, and what it is asked for."""
    _, asked, of = np.unique(np.stack([predictors, tokens]), axis=1, return_index=True, return_inverse=True)
    return Shared(list(blocks), asked, of.ravel())
