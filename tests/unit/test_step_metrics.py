"""Metrics of a step's samples against plain counting."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.live_view import line, render
from relax_hpc.monitor.status import Status
from relax_hpc.roles.training.step_metrics import of_generated, repetition
from relax_hpc.trainers.token_loss import TokenLoss, add, together
from tests import tiny
from tests.tiny import random_rollouts


def test_what_was_generated_counts_groups_that_a_filter_keeps_out() -> None:
    groups = [np.array(g, np.float32) for g in ([1, 1, 1, 1], [1, 0, 0, 0], [0, 0], [0, 0, 0, 0])]
    found = of_generated(groups)
    assert found["generated_groups"] == 4 and found["zero_std_groups"] == 3
    assert found["generated_reward"] == pytest.approx(5 / 14)
    assert found["pass_at_1"] == pytest.approx((1 + 1 / 4) / 4) and found["pass_at_2"] == pytest.approx((1 + 1 / 2) / 4)
    assert found["pass_at_4"] == pytest.approx(2 / 3), "a group of two says nothing of four attempts"
    assert "pass_at_8" not in found
    assert not any(name.startswith("pass_at") for name in of_generated([np.array([0.5, 1.0], np.float32)]))
    assert of_generated([]) == {"generated_groups": 0, "generated_reward": 0.0, "zero_std_groups": 0}


def test_repetition_counts_the_4_grams_that_were_said_before() -> None:
    rollouts = random_rollouts(24)
    rollouts = replace(rollouts, tokens=rollouts.tokens % 2)
    shares = []
    for i in range(len(rollouts)):
        begin, end = rollouts.offsets[i : i + 2]
        tokens = rollouts.tokens[begin:end][rollouts.loss_mask[begin:end] == 1].tolist()
        grams = [tuple(tokens[j : j + 4]) for j in range(len(tokens) - 3)]
        if grams:
            shares.append(1 - len(set(grams)) / len(grams))
    assert any(shares), "nothing is repeated: the test proves nothing"
    assert repetition(rollouts) == pytest.approx(sum(shares) / len(shares))
    assert repetition(replace(rollouts, loss_mask=np.zeros_like(rollouts.loss_mask))) == 0.0


class Peaks(TokenLoss):
    def tokens(self, targets, logprobs, entropies):  # type: ignore[no-untyped-def]
        return -logprobs, {"x": entropies, "x_max": entropies}


def test_a_metric_that_ends_in_max_is_the_greatest_over_tokens_micro_batches_and_updates() -> None:
    first = Peaks()(np.arange(3), torch.zeros(3), torch.tensor([1.0, 5.0, 2.0]))[1]
    second = Peaks()(np.arange(2), torch.zeros(2), torch.tensor([4.0, 3.0]))[1]
    none = Peaks()(np.arange(0), torch.zeros(0), torch.zeros(0))[1]
    assert add([first, none, second]) == {"loss": 0.0, "x": 15.0, "x_max": 5.0}
    about = {"tokens": 1.0, "learning_rate": 1.0, "skipped": 0.0}
    assert together([{"x_max": 2.0, **about}, {"x_max": 7.0, **about}])["x_max"] == 7.0


def test_a_peak_does_not_hide_what_is_not_a_number() -> None:
    nan = float("nan")
    bad = Peaks()(np.arange(2), torch.zeros(2), torch.tensor([nan, 3.0]))[1]
    good = Peaks()(np.arange(1), torch.zeros(1), torch.tensor([4.0]))[1]
    about = {"tokens": 1.0, "learning_rate": 1.0, "skipped": 0.0}
    for order in ([bad, good], [good, bad]):
        assert np.isnan(add(order)["x_max"]) and np.isnan(together([one | about for one in order])["x_max"])


def test_a_skipped_update_is_no_part_of_a_steps_means() -> None:
    nan = float("nan")
    about = {"learning_rate": 1.0}
    made = {"loss": 0.5, "x_max": 2.0, "tokens": 3.0, "skipped": 0.0, **about}
    other = {"loss": 1.5, "x_max": 1.0, "tokens": 1.0, "skipped": 0.0, **about}
    skipped = {"loss": nan, "x_max": nan, "tokens": 5.0, "skipped": 1.0, **about}
    assert together([skipped, made, other]) == {"loss": 0.75, "x_max": 2.0, "tokens": 9.0, "skipped": 1.0, **about}
    empty = {"loss": 0.0, "tokens": 0.0, "skipped": 0.0, **about}  # a share without groups
    for none in (together([skipped, skipped]), together([empty, skipped, skipped])):
        assert none["skipped"] == 2 and np.isnan(none["loss"])


def test_a_metric_that_was_not_finite_is_no_part_of_what_status_shows(tmp_path: Path) -> None:
    (run := RunDir(tmp_path)).create()
    status = Status(run, tiny.recipe())
    about = {
        "samples": 4,
        "step_s": 1.0,
        "wait_s": 0.0,
        "age_mean": 0.0,
        "age_max": 0,
        "spool_depth": 0,
        "missing_groups": 0,
    }
    status.steps = [{**about, "generated_reward": reward} for reward in (0.25, None, 0.75)]
    assert "reward 0.500" in line(status)
    Console(file=(shown := io.StringIO()), width=120).print(render(status))
    assert "0.500 ▁█" in shown.getvalue()
