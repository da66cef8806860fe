"""The agent quickstart for a few steps: its data, tool turns in real rollouts, and a reward of the final answer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import relax_hpc as package
from relax_hpc.files.run_dir import RunDir
from relax_hpc.telemetry import read_metrics
from tests.runs import relax_hpc

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "quickstart-agent.toml"


@pytest.mark.slow
def test_a_few_steps_of_the_agent_quickstart(tmp_path: Path) -> None:
    data = tmp_path / "data" / "agent"
    subprocess.run([sys.executable, ROOT / "examples" / "agent_rows.py", data], check=True, stdout=subprocess.DEVNULL)
    tasks = {
        name: [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]
        for name in ("tasks", "begun", "test")
    }
    asked = {name: {row["prompt"][0]["content"] for row in rows} for name, rows in tasks.items()}
    assert not asked["test"] & (asked["tasks"] | asked["begun"])
    assert all(str(sum(map(int, row["prompt"][0]["content"].split("+")))) == row["answer"] for row in tasks["test"])
    (tmp_path / "recipe.toml").write_text(RECIPE.read_text())
    small = {
        "run.root": tmp_path, "run.steps": 1, "sft_warm_start.steps": 150, "sft_warm_start.batch_size": 32, "model.layers": 1,
        "model.hidden_size": 64, "trainer.prompts_per_step": 12, "evaluation.source.0.limit": 8,
    }  # fmt: skip
    sets = [part for key, value in small.items() for part in ("--set", f"{key}={value}")]
    relax_hpc("run", tmp_path / "recipe.toml", *sets, timeout=110)
    run = RunDir(tmp_path / "quickstart-agent")
    scores = [r["score"] for r in read_metrics(run.metrics / "trainer-0.jsonl")[0] if r["kind"] == "eval"]
    assert len(scores) == 2
    rows = package.open_run(run.root).trajectories()
    called = rows[(rows["extra/tool_calls"] > 0) & (rows.turns > 1)]
    assert len(called) and called.completion.str.contains("<tool_response>").all()
    answered = rows[rows["extra/tool_calls"] > rows["extra/tool_errors"]]
    assert answered.completion.str.contains(r"<tool_response>\n\d+\n</tool_response>").all()
    assert not rows.status.isin(["failed"]).any()
