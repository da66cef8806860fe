"""The quickstart learns: warm-up, then reward and held-out score rise, with trainer and worker as processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_hpc.files.run_dir import RunDir
from relax_hpc.telemetry import read_metrics
from tests.runs import relax_hpc, steps_of

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.toml"


@pytest.mark.timeout(600)
def test_the_held_out_score_rises(tmp_path):
    relax_hpc("run", RECIPE, "--set", f"run.root={tmp_path}", "--set", "run.steps=90", timeout=550)
    run = RunDir(tmp_path / "quickstart")
    scores = {r["version"]: r["score"] for r in read_metrics(run.metrics / "trainer-0.jsonl")[0] if r["kind"] == "eval"}
    assert scores[0] <= 0.6
    assert scores[90] > scores[0] + 0.12
    rewards = [s["raw_reward"] for s in steps_of(run)]
    assert sum(rewards[-20:]) > sum(rewards[:20]) + 2
    assert {s["age_max"] for s in steps_of(run)} == {0, 1}
