"""Scores of evaluations: pass@k against counting all draws, intervals against published values and against coverage."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.records import Finish, Group, Prompt, Sample
from relax_hpc.rewards.scores import Answers, answers, bootstrap, pass_at, powers_of_two, score, wilson
from relax_hpc.spool.shard import Shard
from relax_hpc.spool.shard_writer import encode


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_draws_without_replacement_that_hold_a_solved_answer(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
        assert pass_at(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_k_goes_up_in_powers_of_two() -> None:
    assert [powers_of_two(n) for n in (1, 2, 3, 4, 7, 8)] == [[1], [1, 2], [1, 2], [1, 2, 4], [1, 2, 4], [1, 2, 4, 8]]


@pytest.mark.parametrize(("solved", "n", "low", "high"), [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (81, 263, 0.2553, 0.3662)])  # fmt: skip
def test_wilson_has_the_published_values(solved: int, n: int, low: float, high: float) -> None:
    """The last one is Newcombe's (Statistics in Medicine 17, 1998, table I)."""
    assert wilson(solved, n) == pytest.approx((low, high), abs=5e-5)


def test_the_bootstrap_covers_the_true_mean_and_knows_that_answers_to_one_prompt_go_together() -> None:
    rng, hits, widths = np.random.default_rng(1), 0, []
    for _ in range(60):
        hard = rng.random(50) < 0.4
        low, high = bootstrap(np.where(hard, 0.0, 1.0))
        hits += low <= 0.6 <= high
        widths.append(high - low)
    assert hits >= 51  # 95% of 60 are 57; 50 or fewer happen once in 5000 times
    assert np.mean(widths) == pytest.approx(2 * 1.96 * math.sqrt(0.24 / 50), rel=0.05)


def one(source: int, rewards: list[float], failed: bool = False) -> Answers:
    n = 0 if failed else len(rewards)
    return Answers(source, np.array(rewards, np.float32), np.full(n, 4), np.zeros(n, bool), failed)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.booleans(), min_size=4, max_size=4)), min_size=1, max_size=8))
def test_sources_are_scored_apart_and_together(given: list[tuple[int, list[bool]]]) -> None:
    whole, sources = score([one(s, [float(r) for r in rewards]) for s, rewards in given], ["a", "b", "c"], 1.0)
    assert [s.name for s in sources] == ["abc"[i] for i in sorted({s for s, _ in given})]
    assert whole.prompts == sum(s.prompts for s in sources) == len(given)
    assert whole.score == pytest.approx(sum(s.score * s.prompts for s in sources) / len(given))
    assert whole.pass_at["1"] == pytest.approx(whole.score) and list(whole.pass_at) == ["1", "2", "4"]
    assert whole.pass_at["4"] == pytest.approx(np.mean([any(rewards) for _, rewards in given]))
    assert all(s.low <= s.score <= s.high for s in (whole, *sources))


def test_single_answers_right_or_wrong_have_wilson_all_others_the_bootstrap() -> None:
    single, _ = score([one(0, [1.0]), one(0, [0.0])], ["a"], 1.0)
    parts, _ = score([one(0, [0.5]), one(0, [0.0])], ["a"], 0.5)
    assert (single.interval, single.low, single.high) == ("wilson", *wilson(1, 2))
    assert parts.interval == "bootstrap" and parts.pass_at == {"1": 0.5}


def test_a_group_that_failed_counts_as_not_solved(tmp_path: Path) -> None:
    prompt = Prompt(1, 7, "x", np.arange(2, dtype=np.int32), "1")
    sample = Sample(np.arange(3, dtype=np.int32), np.ones(3, np.uint8), np.zeros(3, np.float32), [(0, 0)], Finish.LENGTH, raw_reward=1.0)  # fmt: skip
    groups = [Group(prompt, [sample, sample]), Group(prompt, [], "its process died")]
    (tmp_path / "e.h5").write_bytes(b"".join(encode("e", groups, {"version": 0, "samples_per_prompt": 2})))
    with Shard(tmp_path / "e.h5") as shard:
        found = answers([shard])
    (whole, (of_source,)) = score(found, ["a", "b"], 1.0)
    assert (of_source.source, of_source.name, of_source.prompts, of_source.failed, of_source.samples) == (
        1,
        "b",
        2,
        1,
        2,
    )
    assert (whole.score, whole.pass_at, whole.truncated, whole.length_mean) == (0.5, {"1": 0.5, "2": 0.5}, 1.0, 3.0)
