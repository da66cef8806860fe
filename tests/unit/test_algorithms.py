"""Advantages, losses and KL against plain float64 arithmetic from the papers, and what happens at the edges."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.algorithms import LossInputs, Totals, make_algorithm
from relax_hpc.algorithms.common.advantages import gae, group_relative, token_rewards
from relax_hpc.algorithms.common.covariance import covariances, without_some
from relax_hpc.algorithms.common.kl import k1, k2, k3
from relax_hpc.algorithms.common.losses import clipped_surrogate
from relax_hpc.algorithms.common.policy import KL_COV
from relax_hpc.algorithms.filters import make_filters
from relax_hpc.algorithms.grpo import GroupRelative
from relax_hpc.algorithms.gspo import sequence_log_ratio
from relax_hpc.algorithms.ppo import clipped_value, explained_variance
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.algorithm import (
    Dapo,
    DrGrpo,
    Gdpo,
    Gmpo,
    Grpo,
    Gspo,
    MaxRl,
    Opd,
    OwnAlgorithm,
    Ppo,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    Rloo,
    Sapo,
)
from relax_hpc.recipe.tables.algorithm_keys import Clipped, PolicyGradient
from relax_hpc.records import Finish, Group, Prompt, Sample, mask_old
from relax_hpc.registry import RegistryError, shown
from relax_hpc.trainers.packing import in_loss, plan
from relax_hpc.trainers.token_loss import updates
from tests import tiny
from tests.tiny import random_rollouts


def grpo_oracle(rewards: list[float], normalize: bool) -> list[float]:
    """One group, arXiv 2402.03300 section 4.1.2, in Python floats."""
    mean = sum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    if not normalize:
        return centred
    std = math.sqrt(sum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + 1e-6) for c in centred]


def surrogate_oracle(logprob: float, old_logprobs: float, advantage: float, low: float, high: float) -> float:
    """arXiv 1707.06347 eq. 7 with the bounds of 2503.14476, in Python floats: the objective's min, negated."""
    ratio = math.exp(logprob - old_logprobs)
    clipped = 1 - low if ratio < 1 - low else 1 + high if ratio > 1 + high else ratio
    return -min(ratio * advantage, clipped * advantage)


@given(
    st.lists(st.lists(st.floats(-5, 5, width=32), min_size=2, max_size=6), min_size=1, max_size=5),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=50)
def test_group_relative_matches_the_paper_in_any_order(
    groups: list[list[float]], normalize: bool, random: object
) -> None:
    samples = [
        (number * 7, r, a)
        for number, group in enumerate(groups)
        for r, a in zip(group, grpo_oracle(group, normalize), strict=True)
    ]
    random.shuffle(samples)  # type: ignore[attr-defined]
    got = group_relative(
        torch.tensor([s[1] for s in samples], dtype=torch.float64),
        torch.tensor([s[0] for s in samples]),
        normalize="group" if normalize else "none",
    )
    np.testing.assert_allclose(got.numpy(), [s[2] for s in samples], rtol=1e-6, atol=1e-7)


def test_equal_rewards_and_a_lone_sample_get_no_advantage() -> None:
    got = group_relative(torch.tensor([0.1, 0.1, 0.1, 3.0]), torch.tensor([4, 4, 4, 9]), normalize="group")
    assert got.abs().max() < 1e-6


def test_advantages_lie_on_the_samples_own_tokens_and_nowhere_else() -> None:
    rollouts = random_rollouts(12, masked=0.3)
    got = make_algorithm(Grpo(normalize="none")).advantages(rollouts).numpy()
    for i in range(len(rollouts)):
        first, last = rollouts.offsets[i], rollouts.offsets[i + 1]
        group = [float(rollouts.rewards[j]) for j in range(12) if rollouts.group[j] == rollouts.group[i]]
        expected = (float(rollouts.rewards[i]) - sum(group) / len(group)) * rollouts.loss_mask[first:last]
        np.testing.assert_allclose(got[first:last], expected, atol=1e-6)


@given(st.floats(-3, 0), st.floats(-3, 0), st.floats(-2, 2), st.floats(0, 0.9), st.floats(0, 2))
@settings(deadline=None)
def test_clipped_surrogate_matches_the_paper(
    logprob: float, old_logprobs: float, advantage: float, low: float, high: float
) -> None:
    log_ratio, advantages = (torch.tensor([x], dtype=torch.float64) for x in (logprob - old_logprobs, advantage))
    loss, _ = clipped_surrogate(log_ratio, advantages, low, high)
    assert loss.item() == pytest.approx(
        surrogate_oracle(logprob, old_logprobs, advantage, low, high), rel=1e-9, abs=1e-12
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.0, 1.0, ""),
        (1.27, 1.0, ""),
        (1.29, 1.0, "clip_high"),
        (0.5, 1.0, ""),
        (0.79, -1.0, "clip_low"),
        (0.81, -1.0, ""),
        (2.9, -1.0, ""),
        (3.1, -1.0, "clip_dual"),
    ],
)
def test_the_clip_stops_the_gradient_on_its_own_side_only(ratio: float, advantage: float, clipped: str) -> None:
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss, metrics = clipped_surrogate(logprobs, torch.tensor([advantage]).double(), 0.2, 0.28, dual=3.0)
    loss.sum().backward()
    assert {name for name, active in metrics.items() if active} == ({clipped, "clip_fraction"} if clipped else set())
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "dapo", "gspo", "gmpo", "maxrl", "sapo", "cispo", "reinforce_plus_plus", "ppo"]
)
def test_no_token_far_away_has_more_than_a_few_times_its_share_of_the_gradient(name: str) -> None:
    """Where tokens may be stale, whatever its ratio and the sign of its advantage."""
    algorithm = make_algorithm(tiny.recipe(algorithm={"name": name}, **{"async": {"max_staleness": 1}}).algorithm)
    far = torch.arange(-25, 26, 0.5, dtype=torch.float64)
    for advantage in (1.0, -1.0):
        logprobs = far.clone().requires_grad_()
        loss, _ = algorithm.loss(inputs(logprobs, [1] * len(far), advantages=torch.full_like(far, advantage)))
        near = logprobs.detach().abs() < 0.01
        [gradient] = torch.autograd.grad(loss.sum(), [logprobs])
        assert gradient[near].abs().min() > 0 and (gradient / gradient[near]).abs().max() <= 5.01


def test_the_dual_clip_is_there_by_default_where_tokens_may_be_stale_and_only_there() -> None:
    def bound(staleness: int, **algorithm: object) -> float | None:
        made = tiny.recipe(algorithm=algorithm, **{"async": {"max_staleness": staleness}}).algorithm
        assert isinstance(made, Clipped)
        return made.dual_clip

    assert [bound(s, **c) for s in (0, 1) for c in ({}, {"name": "ppo"}, {"dual_clip": 5.0}, {"dual_clip": 0.0})] == [
        0.0, 0.0, 5.0, 0.0,
        3.0, 3.0, 5.0, 0.0,
    ]  # fmt: skip
    far, down = torch.tensor([8.0]), torch.tensor([-1.0])
    for config, expected in ((Grpo(), math.exp(8)), (Grpo(dual_clip=0.0), math.exp(8)), (Grpo(dual_clip=3.0), 3.0)):
        loss, metrics = make_algorithm(config).loss(inputs(far, [1], advantages=down))
        assert loss.item() == pytest.approx(expected) and ("clip_dual" in metrics) == (expected == 3.0)


def inputs(logprobs: torch.Tensor, lengths: list[int], **others: torch.Tensor) -> LossInputs:
    """Of a step that is one micro-batch; what is not given is 0."""
    zeros = torch.zeros_like(logprobs.detach())
    names = ("entropies", "old_logprobs", "advantages", "reference", "recomputed", "teacher")
    values = {name: zeros for name in names} | others
    totals = Totals(tokens=len(logprobs), samples=len(lengths), groups=1, budget=9)
    samples = {"group": torch.zeros(len(lengths)), "rewards": torch.zeros(len(lengths))}
    samples |= {"lengths": torch.tensor(lengths), "group_tokens": torch.full((len(lengths),), len(logprobs))}
    samples["turn"] = torch.zeros(len(logprobs))
    return LossInputs(logprobs=logprobs, totals=totals, columns={KL_COV: zeros + 1}, **samples, **values)


@pytest.mark.parametrize(
    "config",
    [
        Grpo(kl_coef=0.3, dual_clip=2.0, aggregate="sequence"),
        Grpo(kl_coef=0.3, kl_unbiased=True),
        DrGrpo(kl_coef=0.3, kl_unbiased=True, kl_estimator="k1"),
        Dapo(entropy_coef=0.1),
        Gspo(clip=(0.5, 0.5)),
        Gmpo(clip=(0.02, 0.03), dual_clip=1.05),
        MaxRl(kl_cov={"coef": 0.5}),
        Gdpo(parts={"right": 1.0}, aggregate="prompt"),
        Sapo(),
        Rloo(),
        ReinforcePlusPlus(),
        ReinforcePlusPlusBaseline(kl_coef=0.3),
        Ppo(clip=(0.1, 0.3)),
        Opd(teacher=Path("teacher"), aggregate="sequence"),
    ],
    ids=lambda config: config.name,
)
def test_gradients_of_the_whole_loss_are_right(config: PolicyGradient) -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(20, dtype=torch.float64, generator=generator) * 3
    noise = lambda scale: scale * torch.randn(20, dtype=torch.float64, generator=generator)
    others = {"old_logprobs": logprobs + noise(0.05), "advantages": noise(1.0), "reference": logprobs + noise(0.5)}
    algorithm = make_algorithm(config)
    function = lambda x: algorithm.loss(inputs(x, [1, 7, 12], **others))[0]
    assert torch.autograd.gradcheck(function, (logprobs.requires_grad_(),))


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_gae_at_its_ends_is_the_return_less_the_value_and_the_error_of_one_step(discount: float) -> None:
    rollouts = random_rollouts(9, masked=0.4)
    rng = np.random.default_rng(0)
    earned, values = (torch.from_numpy(rng.normal(size=len(rollouts.tokens))) for _ in range(2))
    returns, errors, to_values = (gae(earned, v, rollouts, discount, s).numpy() for v, s in
                                  ((values, 1.0), (values, 0.0), (torch.zeros_like(values), 1.0)))  # fmt: skip
    for i in range(len(rollouts)):
        ts = [t for t in range(rollouts.offsets[i], rollouts.offsets[i + 1]) if rollouts.loss_mask[t]]
        for k, t in enumerate(ts):
            to_come = sum(discount**j * float(earned[u]) for j, u in enumerate(ts[k:]))
            after = discount * float(values[ts[k + 1]]) if t != ts[-1] else 0.0
            assert returns[t] == pytest.approx(to_come - float(values[t]))
            assert errors[t] == pytest.approx(float(earned[t]) + after - float(values[t]))
            assert to_values[t] == pytest.approx(to_come)
    outside = rollouts.loss_mask == 0
    assert outside.any() and not returns[outside].any() and not errors[outside].any()


def test_the_reward_is_earned_at_a_samples_last_token_in_the_loss() -> None:
    answers = tiny.prompts([3, 2, 2])
    rollouts = dataclasses.replace(
        tiny.rollouts([answers[0]] * 3, answers, 3), loss_mask=np.array([1, 1, 0, 0, 0, 1, 1], np.uint8)
    )
    penalties = torch.tensor([0.5, 0.25, 0, 0, 0, 0, 0.125]).double()
    found = token_rewards(torch.tensor([1.0, 2.0, 3.0]), penalties, rollouts)
    assert found.tolist() == [-0.5, 0.75, 0, 0, 0, 0, 2.875]  # the second sample is out of the loss


def test_the_gradient_of_the_critics_loss_is_right_and_stops_where_the_clip_is_active() -> None:
    generator = torch.Generator().manual_seed(0)
    old, returns, noise = (torch.randn(30, dtype=torch.float64, generator=generator) for _ in range(3))
    values = (old + noise).requires_grad_()
    function = lambda x: clipped_value(x, old, returns, 0.5)[0]
    assert torch.autograd.gradcheck(function, (values,))
    unmoved = old.clone().requires_grad_()
    loss, metrics = clipped_value(unmoved, old, returns, 0.5)
    loss.sum().backward()
    assert unmoved.grad is not None and not metrics["value_clip_fraction"].any()
    np.testing.assert_allclose(unmoved.grad, old - returns)


def test_a_critic_that_knows_explains_all_and_one_that_says_a_constant_nothing() -> None:
    returns, mask = torch.tensor([1.0, 3.0, 2.0, 9.0]), torch.tensor([1, 1, 1, 0])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.full((4,), 7.0), returns, mask) == pytest.approx(0)
    assert explained_variance(returns, torch.tensor([0.3, 0.3, 0.3 + 1e-7, 9.0]), mask) == 0


def test_the_gradient_of_distillation_is_that_of_the_reverse_kl() -> None:
    """Over all tokens that might be drawn, each with its probability."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(6, dtype=torch.float64, generator=generator) for _ in range(2))
    teacher, logits = teacher.log_softmax(0), logits.requires_grad_()
    distribution = logits.log_softmax(0)
    [truth] = torch.autograd.grad((distribution.exp() * (distribution - teacher)).sum(), logits, retain_graph=True)
    rollouts = tiny.rollouts([np.ones(1, np.int32)] * 6, [np.array([i], np.int32) for i in range(6)], 1)
    rollouts.logprobs[:] = distribution.detach()
    rollouts.columns["teacher"] = teacher.numpy().astype(np.float32)
    algorithm = make_algorithm(Opd(teacher=Path("teacher"), group_size=1))
    drawn = inputs(distribution, [1] * 6, old_logprobs=distribution.detach(), teacher=teacher,
                   advantages=algorithm.advantages(rollouts).double())  # fmt: skip
    loss, metrics = algorithm.loss(drawn)
    [found] = torch.autograd.grad((distribution.detach().exp() * loss).sum(), logits)
    np.testing.assert_allclose(found, truth, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(metrics["teacher_kl"], (distribution - teacher).detach())


def test_gspo_token_has_the_samples_ratio_and_each_tokens_own_gradient() -> None:
    logprobs, old = torch.tensor([-1.0, -3.0, -0.5]).double(), torch.tensor([-2.0, -1.0, -0.7]).double()
    share, lengths = torch.tensor([1.0, 5.0, 2.0]).double(), torch.tensor([2, 1])
    for level, gradient in (("sequence", [3.0, 3.0, 2.0]), ("token", [1.0, 5.0, 2.0])):
        now = logprobs.clone().requires_grad_()
        log_ratio = sequence_log_ratio(now, old, lengths, level)
        np.testing.assert_allclose(log_ratio.detach(), [-0.5, -0.5, 0.2])
        (log_ratio * share).sum().backward()
        assert now.grad is not None and now.grad.tolist() == pytest.approx(gradient)


def test_kl_coef_adds_k3_to_the_reference() -> None:
    logprobs, reference = torch.tensor([-1.0, -2.0]).double(), torch.tensor([-1.5, -0.5]).double()
    advantages = torch.tensor([1.0, -1.0]).double()
    given = inputs(logprobs, [2], old_logprobs=logprobs, advantages=advantages, reference=reference)
    loss, metrics = make_algorithm(Grpo(kl_coef=0.1)).loss(given)
    expected_kl = [math.exp(-0.5) - 1 + 0.5, math.exp(1.5) - 1 - 1.5]  # 2402.03300 eq. 4: ref/cur - log(ref/cur) - 1
    np.testing.assert_allclose(metrics["reference_kl"], expected_kl)
    np.testing.assert_allclose(metrics["pg_loss"], [-1, 1])
    np.testing.assert_allclose(loss, [-1 + 0.1 * expected_kl[0], 1 + 0.1 * expected_kl[1]])


def test_only_what_is_needed_is_asked_for() -> None:
    assert make_algorithm(Grpo()).needs == frozenset()
    assert make_algorithm(Grpo(kl_coef=0.1)).needs == {"reference"}
    assert make_algorithm(Grpo(old_logprobs="recomputed")).needs == {"recomputed"}
    assert make_algorithm(ReinforcePlusPlus(entropy_coef=0.1, kl_coef=0.1)).needs == {"entropy", "reference"}
    assert make_algorithm(Ppo()).needs == {"values"}
    assert make_algorithm(Grpo(teacher=Path("t"))).needs == {"teacher"}
    given = dataclasses.replace(inputs(torch.zeros(1), [1]), reference=None, recomputed=None, teacher=None)
    for config in (Grpo(kl_coef=0.1), Grpo(old_logprobs="recomputed"), Opd(teacher=Path("t"))):
        with pytest.raises(ValueError, match=r"(kl_coef=0.1|recomputed|teacher).*got none"):
            make_algorithm(config).loss(given)


def test_an_overlong_answer_is_punished_from_the_first_token_over_the_limit() -> None:
    answers = tiny.prompts([4, 5, 6, 9])
    rollouts = tiny.rollouts([answers[0]] * 4, answers, 4)
    rollouts.rewards[:] = 1.0
    relative = make_algorithm(Dapo(overlong=(4, 6))).advantages(rollouts)[rollouts.offsets[:-1]]
    rewards = [1.0, 0.5, 0.0, 0.0]
    np.testing.assert_allclose(relative, grpo_oracle(rewards, True), rtol=1e-5)


def test_an_overlong_answer_is_one_of_many_generated_tokens_whatever_was_observed_or_is_too_old() -> None:
    """Of 9 tokens each, 9, 4 and 6 were generated, and of the last one's 4 are too old for the loss."""
    answers = tiny.prompts([9, 9, 9])
    rollouts = tiny.rollouts([answers[0]] * 3, answers, 3)
    rollouts.rewards[:] = 1.0
    rollouts.loss_mask[9 + 4 : 18] = rollouts.loss_mask[18 + 6 :] = 0
    rollouts.versions[:] = 7
    rollouts.versions[18 : 18 + 4] = 3
    rollouts, masked = mask_old(rollouts, oldest=5)
    relative = make_algorithm(Dapo(overlong=(4, 8))).advantages(rollouts)[[8, 12, 23]]
    assert masked == 4
    np.testing.assert_allclose(relative, grpo_oracle([0.0, 1.0, 0.5], True), rtol=1e-5)


def test_what_is_taken_from_the_reward_is_said() -> None:
    rollouts = tiny.random_rollouts(8, masked=0.2)
    rng = np.random.default_rng(0)
    reference = (rollouts.logprobs + rng.normal(size=len(rollouts.tokens))).astype(np.float32)
    rollouts = dataclasses.replace(rollouts, columns={"reference": reference})
    algorithm = GroupRelative(Dapo(overlong=(4, 12), kl_coef=0.3, kl_in="reward"))
    own = [[t for t in range(*rollouts.offsets[i : i + 2]) if rollouts.loss_mask[t]] for i in range(8)]
    overlong = np.mean([min(1.0, max(0.0, (len(ts) - 4) / 8)) for ts in own])
    kl = np.mean([sum(0.3 * float(rollouts.logprobs[t] - reference[t]) for t in ts) for ts in own])
    said = algorithm.reward_parts(rollouts)
    assert overlong > 0.1 and kl != 0
    assert said == pytest.approx(
        {"overlong_penalty": overlong, "kl_penalty": kl, "shaped_reward": rollouts.rewards.mean() - overlong - kl},
        rel=1e-4,
    )
    assert GroupRelative(Dapo(kl_coef=0.3)).reward_parts(rollouts) == {}


def test_gdpo_and_maxrl_name_what_they_cannot_use() -> None:
    rollouts = random_rollouts(8)
    with pytest.raises(RunError, match=r"parts has 'right', which no sample of the step has; they have \['form'\]"):
        numbers = {"form": np.ones(8, np.float32)}
        make_algorithm(Gdpo(parts={"right": 1.0})).advantages(dataclasses.replace(rollouts, extra=numbers))
    rollouts.rewards[:] = [0, 0, 1, 0, 0, -2, 0, 0]
    with pytest.raises(RunError, match=r"sample o/5 has the reward -2.0, expected none below 0"):
        make_algorithm(MaxRl()).advantages(rollouts)
    rollouts.rewards[5] = 0
    found = make_algorithm(MaxRl()).advantages(rollouts).numpy()
    of_sample = [set(found[a:b].tolist()) for a, b in zip(rollouts.offsets, rollouts.offsets[1:], strict=False)]
    assert of_sample[2] <= {3.0, 0.0} and of_sample[0] <= {-1.0, 0.0} and set().union(*of_sample[4:]) == {0.0}


def test_parts_that_no_source_has_are_named_before_a_run() -> None:
    source = {"prompts": "a.jsonl", "rewards": [{"reward": "exact"}, {"reward": "format", "name": "form"}]}
    tables = {"model": tiny.SMALL, "rollout": {"max_new_tokens": 16}, "source": [source]}
    for known in ("exact", "form", "form.detail"):
        Recipe.model_validate({**tables, "algorithm": {"name": "gdpo", "parts": {known: 1.0}}})
    with pytest.raises(
        ValueError, match=r"algorithm.parts has 'format', .* `rewards` of the sources have \['exact', 'form'\]"
    ):
        Recipe.model_validate({**tables, "algorithm": {"name": "gdpo", "parts": {"format": 1.0}}})


@pytest.mark.parametrize(
    ("rollout", "said"), [({"top_p": 0.9}, "rollout.top_p = 0.9"), ({"top_k": 20}, "rollout.top_k = 20")]
)
def test_logprobs_before_truncation_are_warned_of(rollout: dict[str, object], said: str) -> None:
    [warning] = tiny.recipe(rollout=rollout).warnings
    assert said in warning and not tiny.recipe(rollout=rollout, algorithm={"name": "sft"}).warnings


def test_an_own_algorithm_has_a_teacher_where_it_needs_one(tmp_path: Path) -> None:
    path, options = own(tmp_path, needs='{"teacher"}'), {"scale": 1.0}
    config = OwnAlgorithm(factory=f"{path}:Mine", options=options, teacher=Path("t"))
    assert make_algorithm(config).needs == {"teacher"}
    with pytest.raises(RegistryError, match=r"needs \['teacher'\], and algorithm.teacher = None.*give both"):
        make_algorithm(OwnAlgorithm(factory=f"{path}:Mine", options=options))


PREFERENCE = Path(__file__).resolve().parents[2] / "examples" / "preference.py"


def test_a_loss_over_pairs_is_dpo_under_every_split_that_keeps_groups_whole() -> None:
    rollouts = random_rollouts(22, group_size=4, masked=0.3)
    rng = np.random.default_rng(0)
    rollouts.rewards[8:12] = 0.5
    reference = (rollouts.logprobs + rng.normal(size=len(rollouts.tokens)) * 0.4).astype(np.float32)
    rollouts = dataclasses.replace(rollouts, columns={"reference": reference})
    table = {"name": "own", "factory": f"{PREFERENCE}:Preference", "options": {"beta": 0.5}}
    recipe = tiny.recipe(algorithm=table)
    algorithm, now = make_algorithm(recipe.algorithm), rollouts.logprobs + 0.3 * rng.normal(size=len(rollouts.tokens))

    def expected(now: list[float]) -> float:
        moved = [
            sum(now[t] - float(reference[t]) for t in range(*rollouts.offsets[i : i + 2]) if rollouts.loss_mask[t])
            for i in range(22)
        ]
        losses = []
        for group in range(6):
            mine = [i for i in range(22) if rollouts.group[i] == group and i in in_loss(rollouts)]
            best, worst = max(mine, key=lambda i: rollouts.rewards[i]), min(mine, key=lambda i: rollouts.rewards[i])
            unlike = rollouts.rewards[best] > rollouts.rewards[worst]
            losses.append(math.log1p(math.exp(-0.5 * (moved[best] - moved[worst]))) if unlike else 0.0)
        return sum(losses) / len(losses)

    [(_, loss)] = updates(rollouts, algorithm, recipe, torch.device("cpu"))
    for ranks, budget in ((1, 10**6), (2, 120), (3, 20)):
        shares = plan(rollouts, ranks, budget, whole_groups=True)
        batches = [[t for row in rows for tree in row for s in tree for t in range(*rollouts.offsets[s : s + 2])
                    if rollouts.loss_mask[t]] for share in shares for rows in share]  # fmt: skip
        assert sorted(t for batch in batches for t in batch) == np.flatnonzero(rollouts.loss_mask).tolist()
        assert budget > 1000 or len(batches) > 2
        logprobs = torch.tensor(now, requires_grad=True)
        total = (
            sum(loss.tokens(np.array(b), logprobs[b], logprobs[b].detach())[0].sum() for b in batches)
            / loss.totals.tokens
        )
        assert isinstance(total, torch.Tensor) and total.item() == pytest.approx(expected(now.tolist()), rel=1e-5)
        [gradient] = torch.autograd.grad(total, logprobs)
        token = int(np.flatnonzero(gradient)[3])
        up, down = ([x + by * (t == token) for t, x in enumerate(now.tolist())] for by in (1e-4, -1e-4))
        assert gradient[token].item() == pytest.approx((expected(up) - expected(down)) / 2e-4, rel=1e-4)
    with pytest.raises(RunError, match="whole_groups = True, but the trainer's backend split a group"):
        loss.tokens(np.array(batches[0][:-1]), logprobs[: len(batches[0]) - 1], logprobs[: len(batches[0]) - 1])


def test_clip_cov_draws_some_of_the_tokens_in_its_band_and_the_same_in_every_process() -> None:
    rollouts = random_rollouts(40, masked=0.2)
    advantages = torch.from_numpy(np.random.default_rng(0).normal(size=len(rollouts.tokens))).float()
    found = covariances(advantages, rollouts)
    assert np.isneginf(found[rollouts.loss_mask == 0]).all()
    drawn = [np.flatnonzero(without_some(advantages, r, 0.05, 0.1, 0.5) == 0) for r in (rollouts, random_rollouts(40))]
    other = without_some(advantages, dataclasses.replace(rollouts, ids=[f"p/{i}" for i in range(40)]), 0.05, 0.1, 0.5)
    assert len(drawn[0]) == int(0.05 * rollouts.loss_mask.sum()) > 5
    assert ((found[drawn[0]] >= 0.1) & (found[drawn[0]] <= 0.5)).all()
    assert np.array_equal(*drawn) and not np.array_equal(drawn[0], np.flatnonzero(other == 0))


def test_truncated_samples_count_in_their_group_and_not_in_the_loss() -> None:
    rollouts = random_rollouts(8, masked=0.0)
    cut = dataclasses.replace(rollouts, finish=np.array([1, 0, 0, 1, 0, 0, 0, 0], np.uint8))
    recipe = tiny.recipe(algorithm={"name": "grpo", "mask_truncated": True})
    [(part, loss)] = updates(cut, make_algorithm(recipe.algorithm), recipe, torch.device("cpu"))
    lengths = np.diff(cut.offsets)
    assert part.loss_mask.sum() == lengths.sum() - lengths[0] - lengths[3] == loss.totals.tokens
    assert (loss.totals.samples, loss.totals.groups) == (6, 2)
    assert torch.equal(loss.advantages, make_algorithm(Grpo()).advantages(rollouts))


@pytest.mark.parametrize(
    ("algorithm", "wrong"),
    [
        ({"rejection": {}}, r"rejection is empty: give at least one of \['geometric', 'product', 'mean_kl', 'max_kl', 'veto'\]"),
        ({"rejection": {"geometric": [1.1, 1.2]}}, r"rejection.geometric = \[1.1, 1.2\]: expected .*low below 1"),
        ({"clip_cov": {"low": 6.0}}, r"clip_cov.low = 6.0 must be below algorithm.clip_cov.high = 5.0"),
        ({"name": "gdpo", "parts": {"a": 1.0}, "overlong": [1, 2]}, r"overlong changes a reward, of which 'gdpo' has only the parts"),
        ({"name": "maxrl", "kl_coef": 0.1, "kl_in": "reward"}, r"kl_in = 'reward' changes a reward, which 'maxrl' divides"),
    ],
)  # fmt: skip
def test_keys_that_cannot_be_used_are_named(algorithm: dict[str, object], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        tiny.recipe(algorithm=algorithm)


def test_metrics_say_what_a_correction_did() -> None:
    recomputed = torch.tensor([0.0, 1.0, -1.0, 0.1]).double()
    tis, icepop, mis = (
        make_algorithm(Grpo(old_logprobs="recomputed", correction={"name": name, "low": 0.5, "high": 2.0})).loss(
            inputs(torch.zeros(4).double(), [1, 2, 1], recomputed=recomputed)
        )[1]
        for name in ("tis", "icepop", "mis")
    )
    for metrics in (tis, icepop):
        assert metrics["correction_low"].tolist() == [0, 0, 1, 0] and metrics["correction_high"].tolist() == [
            0,
            1,
            0,
            0,
        ]
    np.testing.assert_allclose(tis["correction_weight"], [1, 2, 0.5, math.exp(0.1)])
    np.testing.assert_allclose(icepop["correction_weight"], [1, 0, 0, math.exp(0.1)])
    np.testing.assert_allclose(mis["correction_weight"], [1, 1, 1, math.exp(0.1)])  # e · 1/e of the second sample
    assert icepop["correction_masked"].tolist() == [0, 1, 1, 0] and not mis["correction_masked"].any()


def test_a_geometric_mean_of_weights_has_a_narrow_band_of_its_own() -> None:
    def weights(recomputed: float, **correction: object) -> torch.Tensor:
        config = Grpo(old_logprobs="recomputed", correction={"name": "mis", **correction})
        given = inputs(torch.zeros(100).double(), [100], recomputed=torch.full((100,), recomputed).double())
        return make_algorithm(config).loss(given)[1]["correction_weight"]

    geometric = {"weight": "geometric"}
    assert weights(0.0005, **geometric).all() and not weights(0.002, **geometric).any()
    assert not weights(-0.002, **geometric).any() and weights(-0.002, **geometric, low=0.9).all()
    assert weights(0.002, **geometric, high=2).all() and weights(0.002).all()


def test_weights_that_vanish_are_counted_and_those_that_are_masked_are_not() -> None:
    recomputed = torch.cat([torch.full((100,), -0.1), torch.full((100,), 0.1), torch.zeros(100)]).double()
    for name, vanished in (("mis", [1, 0, 0]), ("tis", [0, 0, 0]), ("icepop", [0, 0, 0])):
        config = Grpo(old_logprobs="recomputed", correction={"name": name})
        said = make_algorithm(config).loss(inputs(torch.zeros(300).double(), [100] * 3, recomputed=recomputed))[1]
        assert said["correction_vanished"][::100].tolist() == vanished
        assert name != "mis" or said["correction_masked"][::100].tolist() == [0, 1, 0]


def test_estimators_approach_the_true_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    current, other = (
        torch.randn(5, dtype=torch.float64, generator=generator).mul(0.3).log_softmax(0) for _ in range(2)
    )
    truth = (current.exp() * (current - other)).sum().item()
    exact = lambda estimator: (current.exp() * estimator(current, other)).sum().item()
    assert exact(k1) == pytest.approx(truth, rel=1e-9)
    assert exact(k3) == pytest.approx(truth, rel=1e-9)
    assert exact(k2) == pytest.approx(truth, rel=0.3)
    assert (k3(current, other) >= 0).all()


OWN = """
import torch
class Mine:
    needs = {needs}
    def __init__(self, scale): self.scale = scale
    def advantages(self, rollouts): return torch.ones(len(rollouts.tokens)) * self.scale
    def loss(self, inputs): return -inputs.logprobs * inputs.advantages, {{}}
class Half:
    needs = frozenset()
def half(): return Half()
"""


def own(tmp_path: Path, needs: str = "frozenset()") -> str:
    path = tmp_path / "mine.py"
    path.write_text(OWN.format(needs=needs))
    return str(path)


def test_an_own_algorithm_is_loaded_and_checked(tmp_path: Path) -> None:
    path = own(tmp_path)
    algorithm = make_algorithm(OwnAlgorithm(factory=f"{path}:Mine", options={"scale": 2.0}))
    assert algorithm.advantages(random_rollouts(2)).max() == 2.0
    with pytest.raises(RegistryError, match="scale"):
        make_algorithm(OwnAlgorithm(factory=f"{path}:Mine", options={"skale": 2.0}))
    with pytest.raises(RegistryError, match=r"\['advantages', 'loss'\]"):
        make_algorithm(OwnAlgorithm(factory=f"{path}:half"))
    (tmp_path / "odd.py").write_text("def odd(**options): return options['clip']\n")
    with pytest.raises(
        RegistryError, match=r"odd.py:odd' called with algorithm.options = {'clipp': 1} raised KeyError: 'clip'"
    ):
        make_algorithm(OwnAlgorithm(factory=f"{tmp_path}/odd.py:odd", options={"clipp": 1}))


@pytest.mark.parametrize(
    ("needs", "wrong"),
    [('{"values"}', r"\['values'\].*reference"), ('"reference"', "expected a set"), ("None", "None")],
)
def test_an_own_algorithm_with_an_unknown_column_is_refused(tmp_path: Path, needs: str, wrong: str) -> None:
    path = own(tmp_path, needs=needs)
    with pytest.raises(RegistryError, match=wrong):
        make_algorithm(OwnAlgorithm(factory=f"{path}:Mine", options={"scale": 1}))


@pytest.mark.parametrize(
    ("part", "body", "wrong"),
    [
        (
            "advantages",
            "torch.from_numpy(rollouts.columns['reference'])",
            r"KeyError: 'reference' \(.*mine.py:3, in advantages",
        ),
        (
            "advantages",
            "rollouts.logprobs",
            r"advantages returned array(?s:.)*ndarray\), expected a float tensor \[\d+\]",
        ),
        (
            "advantages",
            "torch.zeros(len(rollouts))",
            r"returned a tensor \[2\] of torch.float32, expected a float tensor \[\d+\]",
        ),
        (
            "advantages",
            "torch.ones(len(rollouts.tokens)) / 0",
            r"returned inf for token \d+ of sample .*expected finite",
        ),
        ("advantages", "exit()", r"raised SystemExit.*mine.py:3, in advantages"),
        ("loss", "inputs.nothing", r"AttributeError.*mine.py:3, in loss"),
        ("loss", "-inputs.logprobs", r"loss returned a tensor \[3\] .*expected .* dict of metrics"),
        ("loss", "(-inputs.logprobs.sum(), {})", r"returned a tensor \[\] .* as the loss, expected a tensor \[3\]"),
        (
            "loss",
            "(-inputs.logprobs, {'mine': inputs.logprobs.mean()})",
            r"a tensor \[\] .* as the metric 'mine', expected a tensor \[3\]",
        ),
        (
            "loss",
            "(-inputs.logprobs, {'loss': inputs.logprobs})",
            r"a metric called 'loss' \(str\), expected a name.*'tokens'",
        ),
        ("loss", "(-inputs.logprobs, {1: inputs.logprobs})", r"a metric called 1 \(int\)"),
        (
            "loss",
            "(-inputs.logprobs.detach(), {})",
            "a loss without gradient, expected one that is made of inputs.logprobs",
        ),
        (
            "loss",
            "(-inputs.logprobs, {'mine': 3.0})",
            r"returned 3.0 \(float\) as the metric 'mine', expected a tensor \[3\]",
        ),
    ],
)
def test_what_an_own_algorithm_does_wrong_is_said_with_its_place(
    tmp_path: Path, part: str, body: str, wrong: str
) -> None:
    argument = "rollouts" if part == "advantages" else "inputs"
    (tmp_path / "mine.py").write_text(
        f"import torch\nclass Mine:\n    def {part}(self, {argument}): return {body}\n    needs = frozenset()\n"
        + ("    def loss(self, inputs): ...\n" if part == "advantages" else "    def advantages(self, rollouts): ...\n")
    )
    algorithm = make_algorithm(OwnAlgorithm(factory=f"{tmp_path / 'mine.py'}:Mine"))
    inputs = SimpleNamespace(logprobs=torch.zeros(3, requires_grad=True))
    with pytest.raises(RunError, match=wrong):
        algorithm.advantages(random_rollouts(2)) if part == "advantages" else algorithm.loss(inputs)  # type: ignore[arg-type]


def test_a_filter_that_raises_is_said_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def keep(group): return 1 / 0\n")
    [keep] = make_filters([f"{tmp_path / 'mine.py'}:keep"])
    with pytest.raises(RunError, match=r"filter '.*' raised ZeroDivisionError: .*mine.py:1, in keep"):
        keep(group([1.0]))


@pytest.mark.parametrize("value", ["True", "False", "1.0", "['short']", "'two\\nlines'", "'\\ud800'"])
def test_a_filter_that_returns_no_reason_is_named_with_prompt_and_value(tmp_path: Path, value: str) -> None:
    (tmp_path / "mine.py").write_text(f"def keep(group): return {value}\n")
    [keep] = make_filters([f"{tmp_path / 'mine.py'}:keep"])
    said = rf"mine.py:keep' returned {re.escape(shown(eval(value)))} for source 0, prompt 0: expected a line of text"
    with pytest.raises(RunError, match=said):
        keep(group([1.0]))


def group(rewards: list[float]) -> Group:
    empty = np.zeros(0, np.int32)
    samples = [
        Sample(empty, empty.astype(np.uint8), empty.astype(np.float32), [(0, 0)], Finish.STOP, reward=r)
        for r in rewards
    ]
    return Group(Prompt(0, 0, "", empty), samples)


def test_zero_std_filters_groups_without_a_signal() -> None:
    [zero_std] = make_filters(["zero_std"])
    assert zero_std(group([1.0, 1.0, 1.0])) == "all 3 rewards are 1.0"
    assert zero_std(group([1.0, 0.0, 1.0])) is None


def test_zero_std_looks_at_a_part_of_the_reward_where_one_is_named() -> None:
    """All are right, and a bonus for length differs."""
    samples = group([1.1, 1.3, 1.2])
    for sample in samples.samples:
        sample.raw_reward, sample.extra = 1.0, {"correct": 1.0, "bonus": sample.reward - 1, "reward": 7.0}
    whole, correct, bonus, raw, wrong = make_filters(
        ["zero_std", *(f"zero_std:{c}" for c in ("correct", "bonus", "raw_reward", "right"))]
    )
    assert whole(samples) is None and bonus(samples) is None
    assert correct(samples) == "all 3 values of 'correct' are 1.0" and raw(samples) is not None
    with pytest.raises(RunError, match=r"zero_std:right.*they have \['bonus', 'correct', 'raw_reward', 'reward'\]"):
        wrong(samples)
    samples.samples[0].extra["correct"] = 0.0
    assert correct(samples) is None


def test_a_filter_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "filters.py"
    path.write_text("def bad(group, threshold): return None\ndef good(group): return 'short'\n")
    assert make_filters([f"{path}:good"])[0](group([1.0])) == "short"
    with pytest.raises(RegistryError, match="threshold"):
        make_filters([f"{path}:bad"])
    with pytest.raises(RegistryError, match="zero_std"):
        make_filters(["zero_sdt"])
