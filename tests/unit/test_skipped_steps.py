"""Steps that trained nothing are counted while they come in a row; the cause is named."""

from __future__ import annotations

import logging

import pytest

from relax_hpc.files.errors import RunError
from relax_hpc.roles.training.skipped_steps import SkippedSteps
from relax_hpc.spool.ledger import Entry
from tests.tiny import random_rollouts

FINE = {"loss": 0.1, "tokens": 9.0, "skipped": 0.0}
BAD = {"loss": float("nan"), "grad_norm": 1.0, "tokens": 9.0, "skipped": 1.0}
NONE = {"loss": 0.0, "tokens": 0.0, "skipped": 0.0}


def entry(step: int, filtered: dict[str, str] | None = None) -> Entry:
    return Entry(step=step, incarnation=0, lineage=0, take=(), filtered=filtered or {}, dropped=())


def test_only_skipped_steps_in_a_row_stop_a_run_and_the_reward_is_named() -> None:
    skipped_steps, rollouts = SkippedSteps(3, logging.getLogger()), random_rollouts(8)
    for step, metrics in enumerate([BAD, BAD, FINE, BAD, BAD]):
        skipped_steps.note(entry(step), rollouts, metrics)
        skipped_steps.check()
    rollouts.rewards[5] = float("inf")
    skipped_steps.note(entry(5), rollouts, BAD)
    with pytest.raises(
        RunError, match=r"3 steps in a row.*step 5: the reward of sample o/5 is inf \(1 of 8.*max_skipped_steps=…"
    ):
        skipped_steps.check()


def test_what_was_computed_is_named_where_the_rewards_are_fine() -> None:
    skipped_steps = SkippedSteps(1, logging.getLogger())
    skipped_steps.note(entry(2), random_rollouts(8), BAD)
    with pytest.raises(RunError, match="step 2: loss = nan; mend"):
        skipped_steps.check()


def test_one_skipped_update_of_several_is_said(caplog: pytest.LogCaptureFixture) -> None:
    SkippedSteps(1, logging.getLogger()).note(entry(2), random_rollouts(8), FINE | {"skipped": 1.0})
    assert "step 2: loss or gradient of 1 of its updates were not finite" in caplog.text


def test_steps_whose_groups_are_all_filtered_are_said_plainly_and_do_not_stop(caplog: pytest.LogCaptureFixture) -> None:
    skipped_steps = SkippedSteps(2, logging.getLogger())
    for step in range(5):
        skipped_steps.note(entry(step, {"o/0": "all 4 rewards are 1.0"}), random_rollouts(0), NONE)
        skipped_steps.check()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and said[1].startswith("4 steps in a row had nothing to train on")
    assert "all 4 rewards are 1.0" in said[0]
