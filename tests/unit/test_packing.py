"""Packing: nothing lost, nothing twice, within the budget, and the arrays say what the samples say."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.media.families.qwen_vl import Qwen3VL
from relax_hpc.records import Media, Rollouts, mask_old
from relax_hpc.trainers.megatron.packing import plan as megatron_plan
from relax_hpc.trainers.packing import PADDING, Rows, balance, cut, in_loss, pack, plan
from tests.tiny import prompts, random_rollouts, rollouts

LENGTHS = st.lists(st.integers(1, 60), max_size=60)


@given(LENGTHS, st.integers(1, 5))
@settings(deadline=None)
def test_balance_gives_every_sample_once_and_no_rank_much_more(lengths: list[int], ranks: int) -> None:
    shares = balance(np.array(lengths, np.int64), ranks)
    assert sorted(s for share in shares for s in share) == list(range(len(lengths)))
    loads = [sum(lengths[s] for s in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(LENGTHS, st.integers(1, 200), st.integers(0, 40))
@settings(deadline=None)
def test_cut_keeps_to_the_budget_and_loses_nothing(lengths: list[int], budget: int, most: int) -> None:
    media = np.random.default_rng(budget).integers(0, most + 1, len(lengths)).astype(float)
    batches = cut(list(range(len(lengths))), np.array(lengths, np.int64), media, budget)
    assert sorted(s for rows in batches for row in rows for s in row) == list(range(len(lengths)))
    for rows in batches:
        width = max(lengths[s] for row in rows for s in row)
        assert all(sum(lengths[s] for s in row) <= width for row in rows)
        alone = len(rows) == 1 and len(rows[0]) == 1
        assert len(rows) * width + sum(media[s] for row in rows for s in row) <= budget or alone


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60))
@settings(deadline=None)
def test_padding_is_small(lengths: list[int]) -> None:
    """First-fit leaves at most one row half empty, so a micro-batch is at least nearly half full whatever the lengths."""
    [rows] = cut(list(range(len(lengths))), np.array(lengths, np.int64), np.zeros(len(lengths)), 10**6)
    width = max(lengths)
    assert sum(lengths) >= (len(rows) - 1) * width / 2
    assert sum(sum(lengths[s] for s in row) * 2 <= width for row in rows) <= 1


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 80))
@settings(deadline=None, max_examples=40)
def test_pack_says_what_the_samples_say(seed: int, ranks: int, budget: int) -> None:
    made = random_rollouts(13, seed=seed, masked=0.4)
    seen = []
    for rows in (rows for share in plan(made, ranks, budget) for rows in share):
        batch = pack(made, rows)
        flat_tokens, flat_positions = batch.tokens.ravel(), batch.positions.ravel()
        for r, row in enumerate(rows):
            for segment, (sample,) in enumerate(row):
                asked = made.prompt_tokens[made.prompt_offsets[sample] : made.prompt_offsets[sample + 1]]
                sequence = [*asked, *made.tokens[made.offsets[sample] : made.offsets[sample + 1]]]
                where = batch.segments[r] == segment
                assert batch.tokens[r][where].tolist() == sequence[:-1]
                assert batch.positions[r][where].tolist() == list(range(len(sequence) - 1))
        for predictor, target in zip(batch.predictors, batch.targets, strict=True):
            sample = int(np.searchsorted(made.offsets, target, side="right")) - 1
            asked = made.prompt_tokens[made.prompt_offsets[sample] : made.prompt_offsets[sample + 1]]
            sequence = [*asked, *made.tokens[made.offsets[sample] : made.offsets[sample + 1]]]
            place = len(asked) + target - made.offsets[sample] - 1  # of the token before the target
            assert flat_positions[predictor] == place
            assert flat_tokens[predictor] == sequence[place]
        seen += batch.targets.tolist()
    assert sorted(seen) == np.flatnonzero(made.loss_mask).tolist()


def test_the_mask_is_causal_within_a_sample_and_blind_outside() -> None:
    made = rollouts(prompts([2, 1, 5]), prompts([2, 3, 3]), 3)  # inputs of 3, 3 and 7 tokens
    [[rows]] = plan(made, 1, 1000)
    assert rows == [[(2,)], [(0,), (1,)]]
    batch = pack(made, rows)
    assert not batch.one_sample_a_row
    row = batch.attention_mask()[1, 0]
    assert batch.segments[1].tolist() == [0, 0, 0, 1, 1, 1, PADDING]
    assert [np.flatnonzero(line).tolist() for line in row] == [[0], [0, 1], [0, 1, 2], [3], [3, 4], [3, 4, 5], [6]]


def test_every_position_may_look_somewhere() -> None:
    """A query that sees nothing makes attention's softmax 0/0, and the NaN spreads through the gradient."""
    made = random_rollouts(30)
    for rows in plan(made, 1, 100)[0]:
        assert pack(made, rows).attention_mask().any(-1).all()


def test_the_plan_is_the_same_every_time_and_leaves_out_what_has_no_loss() -> None:
    made = random_rollouts(20, masked=0.0)
    made.loss_mask[made.offsets[3] : made.offsets[4]] = 0
    assert plan(made, 2, 64) == plan(made, 2, 64)
    assert 3 not in [s for share in plan(made, 2, 64) for rows in share for row in rows for tree in row for s in tree]


def test_answers_to_a_long_prompt_share_one_copy_of_it_and_do_not_see_each_other() -> None:
    asked, answers = prompts([5])[0], prompts([3, 1, 2])
    made = dataclasses.replace(rollouts([asked] * 3, answers, 3), group=np.array([7, 7, 7]))
    [[rows]] = plan(made, 1, 1000)
    assert rows == [[(0, 1, 2)]]
    batch = pack(made, rows)
    assert batch.tokens[0].tolist() == [*asked, *answers[0][:2], answers[2][0]]
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 5]
    assert batch.predictors.tolist() == [4, 5, 6, 4, 4, 7]
    row = batch.attention_mask()[0, 0]
    assert np.flatnonzero(row[6]).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert np.flatnonzero(row[7]).tolist() == [0, 1, 2, 3, 4, 7]


def test_answers_longer_than_their_prompt_and_other_prompts_stand_alone() -> None:
    long = dataclasses.replace(rollouts([prompts([2])[0]] * 2, prompts([9, 9]), 2), group=np.array([0, 0]))
    assert sorted(t for rows in plan(long, 1, 1000)[0] for row in rows for t in row) == [(0,), (1,)]
    other = dataclasses.replace(rollouts(prompts([8, 8]), prompts([2, 2]), 2), group=np.array([0, 0]))
    assert sorted(t for rows in plan(other, 1, 1000)[0] for row in rows for t in row) == [(0,), (1,)]


def test_no_samples_make_no_micro_batches() -> None:
    assert plan(rollouts([], [], 1), 3, 64) == [[], [], []]


def test_an_empty_prompt_is_named() -> None:
    made = rollouts([np.zeros(0, np.int32)], prompts([3]), 1)
    with pytest.raises(ValueError, match="o/0 has no prompt"):
        plan(made, 1, 64)


@given(st.integers(0, 6), st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_tokens_that_are_too_old_and_no_others_leave_the_loss(oldest: int, seed: int) -> None:
    before = random_rollouts(6, seed=3)
    versions = np.random.default_rng(seed).integers(0, 6, len(before.tokens)).astype(np.int32)
    before = dataclasses.replace(before, versions=versions)
    after, masked = mask_old(before, oldest)
    expected = [m and v >= oldest for m, v in zip(before.loss_mask.tolist(), versions.tolist(), strict=True)]
    assert after.loss_mask.tolist() == expected and after.loss_mask.dtype == np.uint8
    assert masked == sum(before.loss_mask) - sum(expected)
    assert after.generated().tolist() == before.generated().tolist()
    others = {field.name for field in dataclasses.fields(before)} - {"loss_mask", "too_old"}
    assert all(getattr(after, name) is getattr(before, name) for name in others)


def test_ranks_and_micro_batches_share_what_media_cost() -> None:
    """Prompts of one length, two of eight with large pictures: these go to different ranks, and stand by themselves."""
    made = rollouts([np.arange(3, 43, dtype=np.int32)] * 8, prompts([5] * 8), 1)
    large, small = (Media.of({"pixel_values": np.zeros((n, 2), np.float32)}) for n in (400, 4))
    made = dataclasses.replace(made, media=(large, small, large, *(small,) * 5))

    def micro_batches(*how: Any) -> list[list[list[int]]]:
        shares = plan(made, 2, 150, *how)
        return [[[sample for row in rows for (sample,) in row] for rows in share] for share in shares]

    first, second = micro_batches(Qwen3VL(), {"vision": 0.5, "audio": 0.0})
    assert [0] in first and [2] in second
    assert any({0, 2} <= {sample for batch in share for sample in batch} for share in micro_batches()), (
        "tokens are alike"
    )


def test_groups_stay_whole_where_an_algorithm_compares_their_samples() -> None:
    made = random_rollouts(24, group_size=4, masked=0.2)
    for ranks, budget in ((1, 200), (2, 90), (3, 30)):
        for shares in (plan(made, ranks, budget, whole_groups=True), by_megatron(made, ranks, budget)):
            where = {
                sample: (rank, number)
                for rank, share in enumerate(shares)
                for number, rows in enumerate(share)
                for row in rows
                for tree in row
                for sample in tree
            }
            assert sorted(where) == in_loss(made).tolist()
            for group in range(6):
                assert len({place for sample, place in where.items() if made.group[sample] == group}) == 1
            groups = [
                {made.group[s] for row in rows for tree in row for s in tree} for share in shares for rows in share
            ]
            sizes = [
                sum(int(made.lengths()[s]) - 1 for row in rows for tree in row for s in tree)
                for share in shares
                for rows in share
            ]
            assert all(size <= budget or len(held) == 1 for size, held in zip(sizes, groups, strict=True))


def by_megatron(made: Rollouts, ranks: int, budget: int) -> list[list[Rows]]:
    return [[[[(s,)] for s in samples] for samples in share] for share in megatron_plan(made, ranks, budget, 1, True)]
