"""Samples -> micro-batches: balanced over data-parallel ranks, under a token budget, packed into rows with little
padding.

    samples ──join──► trees ──balance──► a share of trees a rank ──cut──► micro-batches of rows of trees ──pack──► arrays
    media of each tree's prompt ──compared with their digest──► one after the other, in the order of rows, once a tree

A tree is a prompt followed by several answers to it that are trained on behind one copy of it: where prompts are longer
than answers, that saves most of the work. The whole plan depends on the samples alone: every process computes it and
takes its own share. An answer goes in without its last token, which predicts nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relax_hpc.media.families import TEXT, Family
from relax_hpc.records import Media, Rollouts

Tree = tuple[int, ...]
"""Samples behind one copy of their prompt, by index; most often one."""
Rows = list[list[Tree]]
"""A micro-batch: rows of trees."""

LONGEST_SHARED = 2048
"""The most tokens of a tree with several answers: attention costs the square of a row's length, and separate answers
have shorter rows."""

PADDING = -1
"""The segment of tokens that only fill a row."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward: R rows of L tokens, M tokens that enter the loss."""

    tokens: NDArray[np.int64]  # [R, L]
    positions: NDArray[Any]  # [R, L] each tree begins again at 0, each answer behind the prompt; padding counts on
    """[3, R, L] float32 for a model whose positions have three axes."""
    segments: NDArray[np.int64]  # [R, L] which tree of the row, PADDING after the last
    branches: NDArray[np.int64]  # [R, L] which answer of the tree, from 1; 0 is the prompt
    predictors: NDArray[np.int64]  # [M] where, in the flattened [R * L], the model predicts the token
    targets: NDArray[np.int64]  # [M] the token itself, by its index in rollouts.tokens
    media: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Arguments of the forward by name: what the prompts show."""

    @property
    def one_sample_a_row(self) -> bool:
        """True where each row has a single sample, so that causal attention alone keeps samples apart: all behind it is
        padding."""
        return bool((self.segments < 1).all() and (self.branches < 2).all())

    def attention_mask(self) -> NDArray[np.bool_]:
        """[R, 1, L, L] True where a query (second last axis) may look: its own prompt and answer, not after itself."""
        same = self.segments[:, None, :, None] == self.segments[:, None, None, :]
        mask: NDArray[np.bool_] = same & np.tri(self.segments.shape[1], dtype=np.bool_)
        if (self.branches > 1).any():
            queries, keys = self.branches[:, None, :, None], self.branches[:, None, None, :]
            mask &= (keys == queries) | (keys == 0)
        return mask


def join(rollouts: Rollouts, used: NDArray[np.int64]) -> list[Tree]:
    """Join the samples `used` to trees: a group shares its prompt where that saves at least as many tokens as its
    answers have. One whose environment showed more than its prompt stands alone."""
    groups: dict[int, list[int]] = {}
    trees: list[Tree] = []
    for sample in used.tolist():
        if shows_later(rollouts, sample):
            trees.append((sample,))
        else:
            groups.setdefault(int(rollouts.group[sample]), []).append(sample)
    for samples in groups.values():
        prompts = [rollouts.prompt_tokens[slice(*rollouts.prompt_offsets[s : s + 2])] for s in samples]
        shown = {media.digest if (media := media_of(rollouts, s)) else "" for s in samples}
        answers = sum(int(rollouts.offsets[s + 1] - rollouts.offsets[s]) - 1 for s in samples)
        saved = len(prompts[0]) * (len(samples) - 1)
        short = len(prompts[0]) + answers <= LONGEST_SHARED
        alike = len(shown) == 1 and all(np.array_equal(p, prompts[0]) for p in prompts)
        if saved >= max(answers, 1) and short and alike:
            trees.append(tuple(samples))
        else:
            trees += [(sample,) for sample in samples]
    return trees


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
    rollouts: Rollouts, ranks: int, budget: int, family: Family = TEXT, costs: Mapping[str, float] | None = None
) -> list[list[Rows]]:
    """Plan the micro-batches of each rank, of the samples in the loss. costs: what a position of each encoder costs."""
    trees = join(rollouts, in_loss(rollouts))
    lengths = np.array([tree_length(rollouts, tree) for tree in trees], np.int64)
    media = np.array([media_cost(family, media_of(rollouts, tree[0]), costs or {}) for tree in trees])
    shares = balance(lengths + media, ranks)
    return [
        [[[trees[i] for i in row] for row in rows] for rows in cut(share, lengths, media, budget)] for share in shares
    ]


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
    prompt = int(rollouts.prompt_offsets[tree[0] + 1] - rollouts.prompt_offsets[tree[0]])
    return prompt + sum(int(rollouts.offsets[s + 1] - rollouts.offsets[s]) - 1 for s in tree)


def media_of(rollouts: Rollouts, sample: int) -> Media | None:
    """Return what a sample's prompt shows beside its text."""
    return rollouts.media[sample] if rollouts.media else None


def shows_later(rollouts: Rollouts, sample: int) -> bool:
    """Return True if a sample's environment showed more than its prompt."""
    return rollouts.shown_later is not None and bool(rollouts.shown_later[sample])


def tree_positions(rollouts: Rollouts, tree: Tree, family: Family, config: Any) -> NDArray[Any]:
    """[T] or [axes, T] positions of a tree's tokens: each answer goes on behind the prompt."""
    prompt = rollouts.prompt_tokens[slice(*rollouts.prompt_offsets[tree[0] : tree[0] + 2])]
    answers = [rollouts.tokens[int(rollouts.offsets[s]) : int(rollouts.offsets[s + 1]) - 1] for s in tree]
    media = media_of(rollouts, tree[0])
    if shows_later(rollouts, tree[0]):
        return family.positions_onward(config, np.concatenate([prompt, *answers]), media)[..., :-1]
    placed = family.positions_onward(config, prompt, media)
    return np.concatenate([placed[..., :-1], *(placed[..., -1:] + np.arange(len(answer)) for answer in answers)], -1)


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
    return replace(place(rollouts, rows, 1, 1, family, config), media=shown_by(rollouts, rows, family))


def place(rollouts: Rollouts, rows: Rows, unit: int, row_unit: int, family: Family, config: Any) -> MicroBatch:
    """Make the arrays of one micro-batch, without media; without trees, of a few tokens that enter no loss. unit,
    row_unit: each tree, and each row, is padded to a multiple of so many tokens."""
    lengths = [[rounded(tree_length(rollouts, tree), unit) for tree in row] for row in rows]
    width = rounded(max(1, *map(sum, lengths)), row_unit)
    tokens = np.zeros((len(rows), width), np.int64)
    positions = np.tile(np.arange(width), (len(rows), 1))
    if family.axes > 1:
        positions = np.tile(positions.astype(np.float32), (family.axes, 1, 1))
    segments = np.full((len(rows), width), PADDING, np.int64)
    branches = np.zeros((len(rows), width), np.int64)
    predictors, targets = [], []
    for r, row in enumerate(rows):
        at = 0
        for segment, tree in enumerate(row):
            prompt = rollouts.prompt_tokens[slice(*rollouts.prompt_offsets[tree[0] : tree[0] + 2])]
            begin, filled, at = at, at + lengths[r][segment], at + len(prompt)
            asked = at - 1  # where the prompt's last token predicts the first of every answer
            tokens[r, begin:at], positions[..., r, begin:filled] = prompt, np.arange(filled - begin)
            placed = tree_positions(rollouts, tree, family, config)
            positions[..., r, begin : begin + placed.shape[-1]] = placed
            for branch, sample in enumerate(tree, start=1):
                first, last = int(rollouts.offsets[sample]), int(rollouts.offsets[sample + 1])
                end = at + last - first - 1
                tokens[r, at:end] = rollouts.tokens[first : last - 1]
                branches[r, at:end] = branch
                chosen = np.flatnonzero(rollouts.loss_mask[first:last])
                predictors.append(r * width + np.where(chosen == 0, asked, at - 1 + chosen))
                targets.append(chosen + first)
                at = end
            segments[r, begin:at] = segment
            at = filled
    found, of = (np.concatenate([np.zeros(0, np.int64), *parts]) for parts in (predictors, targets))
    return MicroBatch(tokens, positions, segments, branches, found, of)
