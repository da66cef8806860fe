"""Every example is run as its page says, through the real code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_run

import relax_hpc
from relax_hpc.monitor.tracking import sinks
from relax_hpc.monitor.tracking.follow import Follower
from relax_hpc.registry import resolve
from relax_hpc.telemetry import read_metrics
from tests import runs, tiny

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def trained(name: str, folder: Path, *arguments: str) -> Any:
    """Run a recipe of the examples to its end; its trajectories."""
    runs.relax_hpc("run", EXAMPLES / f"{name}.toml", "--set", f"run.root={folder}", *arguments)
    return relax_hpc.open_run(folder / name).trajectories()


@pytest.mark.slow
def test_reward(tmp_path: Path) -> None:
    rows = trained("reward", tmp_path)
    assert set(rows.status) == {"trained"} and set(rows.source) == {0, 1, 2}
    near, shortest = rows[rows.source == 0], rows[rows.source == 2]
    assert near["extra/digits"].between(0, 1).all() and near["extra/digits"].nunique() > 2
    assert rows[rows.source == 1]["extra/digits"].isna().all()
    assert set(near.raw_reward.round(2)) <= {0.0, 0.3, 1.0}
    assert set(shortest.raw_reward) == {0.0, 1.0}
    assert (tmp_path / "reward/snapshot/user/v0/0/reward.py").read_bytes() == (EXAMPLES / "reward.py").read_bytes()


@pytest.mark.slow
def test_environment(tmp_path: Path) -> None:
    rows = trained("environment", tmp_path)
    assert set(rows.status) == {"trained"} and set(rows.turns) == {1, 2, 3}
    of_three = rows[rows.turns == 3]
    assert of_three.completion.str.count("no, again: ").eq(2).all()
    told = rows[rows["extra/tries"].notna()]
    assert len(told) and (told["extra/tries"] == told.turns).all()
    assert (rows[rows.turns < 3].finish == "length").all(), "what is cut at max_new_tokens ends there"


@pytest.mark.slow
def test_filter(tmp_path: Path) -> None:
    rows = trained("filter", tmp_path)
    groups = rows.groupby(["request", "group"]).agg(
        status=("status", "first"), reason=("reason", "first"), cut=("finish", lambda of: int((of == "length").sum()))
    )
    assert set(groups.status) == {"trained", "filtered"}, "the seed gives both"
    assert (groups.status.eq("filtered") == groups.cut.gt(2)).all()
    assert groups[groups.status == "filtered"].reason.str.startswith("mostly cut: ").all()


@pytest.mark.slow
def test_algorithm(tmp_path: Path) -> None:
    trained("algorithm", tmp_path)
    steps = [line for line in read_metrics(tmp_path / "algorithm/metrics/trainer-0.jsonl")[0] if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert all(0 <= line["truncated_ratio"] <= 1 and line["sample_ratio_max"] > 0 for line in steps)
    assert steps[0]["reference_kl"] == pytest.approx(0, abs=1e-6) and steps[2]["reference_kl"] > 0
    assert all(line["grad_norm"] > 0 for line in steps)


def test_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fed by the real follower, from the lines of a run, in the place of TensorBoard."""
    tracking = [{"name": "tensorboard"}]
    run = small_run.build(tmp_path / "small")
    own: Callable[..., sinks.Sink] = resolve("sink", f"{EXAMPLES / 'sink.py'}:CsvSink", {})
    monkeypatch.setattr(sinks, "TensorBoardSink", own)
    follower = Follower(run, tiny.recipe(tracking=tracking))
    follower.look()
    [said] = follower.close()
    lines = (run.tracking / "tensorboard/train/raw_reward.csv").read_text().splitlines()
    assert lines == ["step,time,value", "0,10.0,0.5", "1,15.0,0.5"]
    assert said == f"pandas.read_csv('{run.tracking}/tensorboard/train/loss.csv')"
    assert (run.tracking / "tensorboard/eval/score.csv").read_text().splitlines()[1:] == ["0,5.0,0.1", "2,22.0,0.3"]
