"""Samples that begin alike -> a tree of segments, each of tokens that several samples have in common, or one alone.

    prompt ──turn 1──┬──turn 2──┬──turn 3        samples 0
                     │          └──turn 3'               1
                     └──turn 2'                          2

A model computes each segment once. Segments stand depth first in a row, so that what a token is seen by lies behind it
without a gap: its own segment and all that grew from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from relax_hpc.records import Media, Rollouts

Tree = tuple[int, ...]
"""Samples that are computed together, by index; most often one."""

SHORTEST_SHARED = 64
"""The fewest tokens behind the prompt that make a segment. Answers often have a few first words in common by chance."""


class Segment(NamedTuple):
    """Tokens `first` to `last` of what the model is given of `sample`, and of the others that go through here."""

    sample: int
    first: int
    last: int
    parent: int
    """Number of the segment before it; -1 at the root."""

    @property
    def tokens(self) -> int:
        return self.last - self.first


@dataclass(frozen=True, slots=True)
class Trie:
    """The segments of a tree, depth first."""

    segments: list[Segment]
    leaves: list[int]
    """Of each sample, in the tree's order, the segment that it ends with; one without tokens of its own has an empty one."""
    deep: bool
    """Whether samples share more than a prompt."""

    @property
    def tokens(self) -> int:
        return sum(segment.tokens for segment in self.segments)

    def path(self, segment: int) -> list[int]:
        """Segments from the root to this one."""
        found: list[int] = []
        while segment >= 0:
            found.append(segment)
            segment = self.segments[segment].parent
        return found[::-1]


def prompt_of(rollouts: Rollouts, sample: int) -> NDArray[np.int32]:
    return rollouts.prompt_tokens[slice(*rollouts.prompt_offsets[sample : sample + 2])]


def inputs_of(rollouts: Rollouts, sample: int) -> NDArray[np.int32]:
    """[n] the tokens of a sample that the model is given: all but the last, which predicts nothing."""
    begin, end = rollouts.offsets[sample : sample + 2]
    return np.concatenate([prompt_of(rollouts, sample), rollouts.tokens[begin : end - 1]])


def media_of(rollouts: Rollouts, sample: int) -> Media | None:
    """Return what a sample's prompt shows beside its text."""
    return rollouts.media[sample] if rollouts.media else None


def shows_later(rollouts: Rollouts, sample: int) -> bool:
    """Return True if a sample's environment showed more than its prompt."""
    return rollouts.shown_later is not None and bool(rollouts.shown_later[sample])


def recorded_of(rollouts: Rollouts, sample: int) -> NDArray[np.integer[Any]]:
    """[n, layers, K] the experts that a sample's tokens were sent to."""
    assert rollouts.routed_experts is not None
    end = int((rollouts.lengths()[: sample + 1] - 1).sum())
    return rollouts.routed_experts[end - int(rollouts.lengths()[sample]) + 1 : end]


def grow(rollouts: Rollouts, tree: Tree) -> Trie:
    """Find the segments of samples that begin alike. Experts that are replayed are compared too."""
    keys = [_keys(rollouts, sample) for sample in tree]
    if len(tree) == 1:
        return Trie([Segment(tree[0], 0, len(keys[0]), -1)], [0], deep=False)
    order, alike = _sorted(keys)
    prompts = {prompt_of(rollouts, sample).tobytes() for sample in tree}
    prompt = len(prompt_of(rollouts, tree[0])) if len(prompts) == 1 else 0
    segments: list[Segment] = []
    leaves, deep = [0] * len(tree), False
    ahead = [(0, len(tree), -1)]  # (from, to) in `order`, segment before
    while ahead:
        begin, end, parent = ahead.pop()
        first, one = segments[parent].last if segments else 0, order[begin]
        last = min(alike[begin : end - 1], default=len(keys[one]))
        if end - begin == 1:
            leaves[one] = len(segments)
        elif parent < 0 and last - prompt < SHORTEST_SHARED:
            last = min(prompt, last) if prompt else last
        segments.append(Segment(tree[one], first, last, parent))
        if end - begin > 1:
            deep |= last > prompt
            # in the order of the tree's samples, the next one last
            onward = sorted(_onward(alike, begin, end, last), key=lambda c: -min(order[c[0] : c[1]]))
            ahead += [(*part, len(segments) - 1) for part in onward]
    return Trie(segments, leaves, deep)


def _onward(alike: list[int], begin: int, end: int, first: int) -> list[tuple[int, int]]:
    """Samples `begin` to `end`, which have `first` tokens in common: parts of them with a segment more, or of one sample."""
    found, ahead = [], [(begin, end)]
    while ahead:
        begin, end = ahead.pop()
        last = min(alike[begin : end - 1], default=first)
        if end - begin == 1 or last - first >= SHORTEST_SHARED:
            found.append((begin, end))
        else:
            ahead += pairwise([begin, *(i + 1 for i in range(begin, end - 1) if alike[i] == last), end])
    return found


def tries(rollouts: Rollouts, samples: Sequence[int]) -> list[Tree]:
    """Join samples of a group that begin alike to trees; none where they have no more in common than their prompt."""
    kinds: dict[Any, list[int]] = {}
    for sample in samples:
        kinds.setdefault(_kind(rollouts, sample), []).append(sample)
    trees: list[Tree] = []
    for members in kinds.values():
        order, alike = _sorted([_keys(rollouts, sample) for sample in members])
        cuts = [0, *(i + 1 for i, count in enumerate(alike) if count < SHORTEST_SHARED), len(members)]
        trees += [tuple(sorted(members[i] for i in order[a:b])) for a, b in pairwise(cuts)]
    return sorted(trees) if any(grow(rollouts, tree).deep for tree in trees) else []


def split(rollouts: Rollouts, tree: Tree, most: int) -> list[Tree]:
    """Split a tree of more than `most` tokens: each part has its own copy of what its samples share."""
    trie = grow(rollouts, tree)
    if trie.tokens <= most or not trie.deep:
        return [tree]
    parts: list[list[int]] = []
    held: set[int] = set()
    for one in sorted(range(len(tree)), key=trie.leaves.__getitem__):
        path = set(trie.path(trie.leaves[one]))
        if not parts or sum(trie.segments[s].tokens for s in held | path) > most:
            parts.append([])
            held = set()
        parts[-1].append(tree[one])
        held |= path
    return [tuple(part) for part in parts]


def _kind(rollouts: Rollouts, sample: int) -> Any:
    """Equal for samples that may share tokens: those whose prompts show the same, or nothing."""
    if shows_later(rollouts, sample):
        return sample  # what was shown belongs to the tokens of this sample alone
    if (media := media_of(rollouts, sample)) is None:
        return None
    return media.digest, prompt_of(rollouts, sample).tobytes()


def _keys(rollouts: Rollouts, sample: int) -> NDArray[np.uint8]:
    """[n, bytes] equal where a token, and what a sample replays of it, is the same."""
    tokens = inputs_of(rollouts, sample)
    keys = tokens.astype(np.int32)[:, None].view(np.uint8)
    if rollouts.routed_experts is None:
        return keys
    routed = np.ascontiguousarray(recorded_of(rollouts, sample).reshape(len(tokens), -1))
    return np.concatenate([keys, routed.view(np.uint8)], 1)


def _sorted(keys: list[NDArray[np.uint8]]) -> tuple[list[int], list[int]]:
    """(order in which those that begin alike stand together, tokens that each has in common with the next)."""
    order = sorted(range(len(keys)), key=lambda i: keys[i].tobytes())
    return order, [_alike(keys[a], keys[b]) for a, b in pairwise(order)]


def _alike(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> int:
    count = min(len(a), len(b))
    differ = (a[:count] != b[:count]).any(1)
    return int(differ.argmax()) if differ.any() else count
