"""Samples -> micro-batches: balanced over data-parallel ranks, under a token budget, packed into rows with little
padding.

    samples ──join──► trees ──balance──► a share of trees a rank ──cut──► micro-batches of rows of trees ──pack──► arrays
    media of each tree's prompt ──compared with their digest──► one after the other, in the order of rows, once a tree

A tree is a prompt followed by several answers to it that are trained on behind one copy of it: where prompts are longer
than answers, that saves most of the work. Where answers of a group begin alike (turns of one rollout before it branches),
what they share is there once too (trees/segments.py). The whole plan depends on the samples alone: every process computes
it and takes its own share. An answer goes in without its last token, which predicts nothing.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_hpc.media.families import TEXT, Family
from relax_hpc.records import Media, Rollouts
from relax_hpc.trainers.trees.layout import Shared, blocks_of, ends_of, places, shared_of, starts_of
from relax_hpc.trainers.trees.segments import (
    Tree,
    Trie,
    grow,
    inputs_of,
    media_of,
    prompt_of,
    shows_later,
    split,
    tries,
)

Rows = list[list[Tree]]
"""A micro-batch: rows of trees."""

LONGEST_SHARED = 2048
"""The most tokens of a prompt with several answers that share nothing else: with a mask, attention costs the square of a
row's length, and separate answers have shorter rows."""

PADDING = -1
"""The segment of tokens that only fill a row."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward: R rows of L tokens, M tokens that enter the loss."""

    tokens: NDArray[np.int64]  # [R, L]
    positions: NDArray[Any]  # [R, L] each tree begins again at 0, each answer behind the prompt; padding counts on
    """[3, R, L] float32 for a model whose positions have three axes."""
    segments: NDArray[np.int64]  # [R, L] which tree of the row, PADDING after the last
    branches: NDArray[np.int64]  # [R, L] which segment of the tree, depth first; 0 is the root, the prompt most often
    until: NDArray[np.int64]  # [R, L] where in the row what sees the token ends
    predictors: NDArray[np.int64]  # [M] where, in the flattened [R * L], the model predicts the token
    targets: NDArray[np.int64]  # [M] the token itself, by its index in rollouts.tokens
    media: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Arguments of the forward by name: what the prompts show."""
    shared: Shared | None = None
    """How to compute only what differs; None where a causal row, or a mask, is the way."""

    @property
    def one_sample_a_row(self) -> bool:
        """True where each row has a single sample, so that causal attention alone keeps samples apart: all behind it is
        padding."""
        return bool((self.segments < 1).all() and (self.branches < 2).all())

    def attention_mask(self) -> NDArray[np.bool_]:
        """[R, 1, L, L] True where a query (second last axis) may look: at its ancestors in its tree, and itself."""
        places = np.arange(self.tokens.shape[1])
        mask: NDArray[np.bool_] = (places[:, None] >= places) & (places[:, None] < self.until[:, None, None, :])
        return mask


def join(rollouts: Rollouts, used: NDArray[np.int64]) -> list[Tree]:
    """Join the samples `used` to trees: those of a group that have turns in common, or else where the prompt alone saves
    enough. One whose environment showed more than its prompt stands alone."""
    groups: dict[int, list[int]] = {}
    trees: list[Tree] = []
    for sample in used.tolist():
        if shows_later(rollouts, sample):
            trees.append((sample,))
        else:
            groups.setdefault(int(rollouts.group[sample]), []).append(sample)
    for samples in groups.values():
        trees += tries(rollouts, samples) or _behind_prompt(rollouts, samples)
    return trees


def _behind_prompt(rollouts: Rollouts, samples: list[int]) -> list[Tree]:
    """Share a group's prompt where that saves at least as many tokens as its answers have."""
    prompts = [prompt_of(rollouts, s) for s in samples]
    shown = {media.digest if (media := media_of(rollouts, s)) else "" for s in samples}
    answers = sum(int(rollouts.offsets[s + 1] - rollouts.offsets[s]) - 1 for s in samples)
    saved = len(prompts[0]) * (len(samples) - 1)
    short = len(prompts[0]) + answers <= LONGEST_SHARED
    alike = len(shown) == 1 and all(np.array_equal(p, prompts[0]) for p in prompts)
    return [tuple(samples)] if saved >= max(answers, 1) and short and alike else [(sample,) for sample in samples]


def balance(costs: NDArray[Any], ranks: int) -> list[list[int]]:
    """Distribute trees over the ranks in shares of nearly equal cost: the dearest first, each to the rank with the least.

    Within 4/3 of the best possible largest share (R. L. Graham, 1969).
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0.0, rank) for rank in range(ranks)]
    for tree in np.argsort(-costs, kind="stable").tolist():
        total, rank = heapq.heappop(load)
        shares[rank].append(tree)
        heapq.heappush(load, (total + float(costs[tree]), rank))
    return shares


def cut(share: list[int], lengths: NDArray[np.int64], media: NDArray[np.float64], budget: int) -> list[list[list[int]]]:
    """Cut a share into micro-batches (rows of trees, by index) of at most `budget` tokens, padding and the cost of media
    included; a larger tree stands alone.

    Rows are as long as the micro-batch's longest tree and filled first-fit decreasing. media: what each tree's cost.
    """
    if not share:
        return []
    ordered = sorted(share, key=lambda tree: (-int(lengths[tree]), tree))
    shortest = int(lengths[ordered[-1]])
    batches: list[list[list[int]]] = []
    width, shown = 0, 0.0
    open_rows: list[tuple[list[int], int]] = []  # (row, tokens that it has room for)
    for tree in ordered:
        length, cost = int(lengths[tree]), float(media[tree])
        place = next((i for i, (_, room) in enumerate(open_rows) if room >= length), None)
        if place is not None and len(batches[-1]) * width + shown + cost <= budget:
            row, room = open_rows[place]
            row.append(tree)
            shown += cost
            open_rows[place] = (row, room - length)
            if room - length < shortest:
                del open_rows[place]
            continue
        if not batches or (len(batches[-1]) + 1) * width + shown + cost > budget:
            batches.append([])
            open_rows, width, shown = [], length, 0.0
        row = [tree]
        batches[-1].append(row)
        shown += cost
        if width - length >= shortest:
            open_rows.append((row, width - length))
    return batches


def plan(
    rollouts: Rollouts,
    ranks: int,
    budget: int,
    family: Family = TEXT,
    costs: Mapping[str, float] | None = None,
    share: bool = True,
    whole_groups: bool = False,
) -> list[list[Rows]]:
    """Plan the micro-batches of each rank, of the samples in the loss. costs: what a position of each encoder costs;
    share: compute what samples of a group have in common once; whole_groups: keep those of a group in one micro-batch."""
    rollouts, used = (
        replace(rollouts, routed_experts=None),
        in_loss(rollouts),
    )  # transformers' routers choose themselves
    trees = within(rollouts, join(rollouts, used), ranks, budget) if share else [(s,) for s in used.tolist()]
    lengths = np.array([tree_length(rollouts, tree) for tree in trees], np.int64)
    media = np.array([media_cost(family, media_of(rollouts, tree[0]), costs or {}) for tree in trees])
    units = units_of(rollouts.group[[tree[0] for tree in trees]], whole_groups)
    shares = balance(np.array([(lengths + media)[unit].sum() for unit in units]), ranks)
    made = [_cut_units([units[i] for i in share], lengths, media, budget) for share in shares]
    return [[[[trees[i] for i in row] for row in rows] for rows in batches] for batches in made]


def units_of(group: NDArray[np.int64], whole_groups: bool) -> list[list[int]]:
    """Indices of what stays together: those of one group, or each alone. group: [K]."""
    if not whole_groups:
        return [[i] for i in range(len(group))]
    return [np.flatnonzero(group == one).tolist() for one in np.unique(group)]


def _cut_units(
    units: list[list[int]], lengths: NDArray[np.int64], media: NDArray[np.float64], budget: int
) -> list[list[list[int]]]:
    """Cut a share into micro-batches that split none of its units; a unit above the budget stands alone."""
    if all(len(unit) == 1 for unit in units):
        return cut([tree for [tree] in units], lengths, media, budget)
    batches: list[list[int]] = []
    for unit in units:
        if batches and len(cut([*batches[-1], *unit], lengths, media, budget)) == 1:
            batches[-1] += unit
        else:
            batches.append([*unit])
    return [rows for batch in batches for rows in cut(batch, lengths, media, sys.maxsize)]


def within(rollouts: Rollouts, trees: list[Tree], ranks: int, budget: int) -> list[Tree]:
    """Split trees that would not fit into a micro-batch, or would keep other ranks waiting."""
    total = sum(tree_length(rollouts, tree) for tree in trees)
    return [part for tree in trees for part in split(rollouts, tree, min(budget, -(-total // ranks)))]


def in_loss(rollouts: Rollouts) -> NDArray[np.int64]:
    """Return the samples that have a token in the loss, by index. Raises ValueError for an empty prompt."""
    if len(rollouts) and not np.diff(rollouts.prompt_offsets).all():
        empty = int(np.flatnonzero(np.diff(rollouts.prompt_offsets) == 0)[0])
        raise ValueError(f"sample {rollouts.ids[empty]} has no prompt tokens: nothing predicts its first token")
    counted = np.concatenate([[0], np.cumsum(rollouts.loss_mask, dtype=np.int64)])
    return np.flatnonzero(counted[rollouts.offsets[1:]] > counted[rollouts.offsets[:-1]])


def rounded(tokens: int, unit: int) -> int:
    """Return `tokens`, or the next multiple of `unit`."""
    return tokens + -tokens % unit


def tree_length(rollouts: Rollouts, tree: Tree) -> int:
    """Tokens that a tree takes in a row."""
    if len(tree) > 1:
        return grow(rollouts, tree).tokens
    return int(rollouts.offsets[tree[0] + 1] - rollouts.offsets[tree[0]]) - 1 + len(prompt_of(rollouts, tree[0]))


def tree_positions(rollouts: Rollouts, tree: Tree, trie: Trie, family: Family, config: Any) -> NDArray[Any]:
    """[T] or [axes, T] positions of a tree's tokens: each answer goes on behind its prompt."""
    prompts: dict[bytes, NDArray[Any]] = {}
    found = []
    for sample, first, last, _ in trie.segments:
        media, key = media_of(rollouts, sample), prompt_of(rollouts, sample).tobytes()
        if shows_later(rollouts, sample):
            found.append(family.positions_onward(config, inputs_of(rollouts, sample), media)[..., first:last])
            continue
        if key not in prompts:
            prompts[key] = family.positions_onward(config, prompt_of(rollouts, sample), media)
        asked = prompts[key]
        onward = asked[..., -1:] + np.arange(max(0, last + 1 - asked.shape[-1]))
        found.append(np.concatenate([asked[..., :-1], onward], -1)[..., first:last])
    return np.concatenate(found, -1)


def media_cost(family: Family, media: Media | None, costs: Mapping[str, float]) -> float:
    """What a prompt's media cost, in tokens."""
    if media is None or not costs:
        return 0.0
    return sum(count * costs[part] for part, count in family.encoded(media).items())


def shown_by(rollouts: Rollouts, rows: Rows, family: Family) -> dict[str, NDArray[Any]]:
    """Join the media of the trees' prompts in the order of rows. Raises Damaged where they are not those that the engine
    was given."""
    shown = [media for row in rows for tree in row if (media := media_of(rollouts, tree[0]))]
    for media in shown:
        media.check("the trainer's encoders")
    return family.joined(shown) if shown else {}


def pack(rollouts: Rollouts, rows: Rows, family: Family = TEXT, config: Any = None) -> MicroBatch:
    """Make the arrays of one micro-batch with its media. config: the model's, which a family with media reads."""
    rollouts = replace(rollouts, routed_experts=None)
    return replace(place(rollouts, rows, 1, 1, family, config), media=shown_by(rollouts, rows, family))


def place(rollouts: Rollouts, rows: Rows, unit: int, row_unit: int, family: Family, config: Any) -> MicroBatch:
    """Make the arrays of one micro-batch, without media; without trees, of a few tokens that enter no loss. unit,
    row_unit: each tree, and each row, is padded to a multiple of so many tokens."""
    grown = [[grow(rollouts, tree) for tree in row] for row in rows]
    lengths = [[rounded(trie.tokens, unit) for trie in row] for row in grown]
    width = rounded(max(1, *map(sum, lengths)), row_unit)
    tokens = np.zeros((len(rows), width), np.int64)
    positions = np.tile(np.arange(width), (len(rows), 1))
    if family.axes > 1:
        positions = np.tile(positions.astype(np.float32), (family.axes, 1, 1))
    segments = np.full((len(rows), width), PADDING, np.int64)
    branches = np.zeros((len(rows), width), np.int64)
    until = np.full((len(rows), width), width, np.int64)
    predictors, targets, blocks = [], [], []
    for r, row in enumerate(rows):
        begin = 0
        for number, (tree, trie) in enumerate(zip(row, grown[r], strict=True)):
            starts, filled = starts_of(trie, begin), begin + lengths[r][number]
            positions[..., r, begin:filled] = np.arange(filled - begin)
            positions[..., r, begin : starts[-1]] = tree_positions(rollouts, tree, trie, family, config)
            segments[r, begin : starts[-1]] = number
            for branch, (segment, end) in enumerate(zip(trie.segments, ends_of(trie, starts), strict=True)):
                here = slice(starts[branch], starts[branch + 1])
                tokens[r, here] = inputs_of(rollouts, segment.sample)[segment.first : segment.last]
                branches[r, here], until[r, here] = branch, end
            for sample, leaf in zip(tree, trie.leaves, strict=True):
                first, last = rollouts.offsets[sample : sample + 2]
                chosen = np.flatnonzero(rollouts.loss_mask[first:last])
                before = len(prompt_of(rollouts, sample)) - 1  # where a sample's first token is predicted
                predictors.append(r * width + places(trie, starts, leaf)[before + chosen])
                targets.append(chosen + first)
            blocks += blocks_of(trie, r * width + starts)
            begin = filled
    found, of = (np.concatenate([np.zeros(0, np.int64), *parts]) for parts in (predictors, targets))
    turns = any(trie.deep or (len(trie.leaves) > 1 and trie.tokens > LONGEST_SHARED) for row in grown for trie in row)
    shared = shared_of(blocks, found, rollouts.tokens[of]) if turns else None
    return MicroBatch(tokens, positions, segments, branches, until, found, of, shared=shared)
