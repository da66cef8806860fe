"""Every example is run as its page says, through the real code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_run

import relax_hpc
from relax_hpc.data.files import FileItems
from relax_hpc.monitor.tracking import sinks
from relax_hpc.monitor.tracking.follow import Follower
from relax_hpc.recipe import load_recipe
from relax_hpc.recipe.tables.source import FileSource
from relax_hpc.records import Prompt
from relax_hpc.registry import resolve
from relax_hpc.rewards import make_rewards
from relax_hpc.telemetry import read_metrics
from tests import runs, tiny

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def trained(name: str, folder: Path, *arguments: str) -> Any:
    """Run a recipe of the examples to its end; its trajectories."""
    runs.relax_hpc("run", EXAMPLES / f"{name}.toml", "--set", f"run.root={folder}", *arguments)
    return relax_hpc.open_run(folder / name).trajectories()


def executed(notebook: Path) -> dict[str, Any]:
    """Carry out the cells of a notebook that are plain Python, one after the other, without a kernel; its variables."""
    import matplotlib

    matplotlib.use("Agg")
    variables: dict[str, Any] = {}
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), str(notebook), "exec"), variables)
    return variables


@pytest.mark.slow
def test_reward_and_the_notebook_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = trained("reward", tmp_path / "runs")
    assert set(rows.status) == {"trained"} and set(rows.source) == {0, 1, 2}
    near, shortest = rows[rows.source == 0], rows[rows.source == 2]
    assert near["extra/digits"].between(0, 1).all() and near["extra/digits"].nunique() > 2
    assert rows[rows.source == 1]["extra/digits"].isna().all()
    assert set(near.raw_reward.round(2)) <= {0.0, 0.3, 1.0}
    assert set(shortest.raw_reward) == {0.0, 1.0}
    assert (tmp_path / "runs/reward/snapshot/user/v0/0/reward.py").read_bytes() == (EXAMPLES / "reward.py").read_bytes()
    monkeypatch.chdir(tmp_path)
    seen = executed(EXAMPLES / "analysis.ipynb")
    assert seen["summary"]["size"].sum() == len(rows) and list(seen["steps"].step) == [0, 1, 2]
    assert seen["digits"].between(0, 1).all() and len(seen["pairs"]) == 18


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


def test_gsm8k() -> None:
    """The recipe loads, and rows of its shape are such that the reward knows a right answer from a wrong one."""
    recipe = load_recipe(EXAMPLES / "gsm8k.toml")
    [source], [reward] = recipe.source, make_rewards(recipe.source)
    assert isinstance(source, FileSource)
    items = FileItems(source.model_copy(update={"prompts": EXAMPLES / "gsm8k.jsonl"}))
    assert len(items) == 12
    for i in range(12):
        item = items[i]
        assert item.answer is not None and item.metadata["solution"].endswith(f"#### {item.answer}")
        prompt = Prompt(0, i, item.content[0]["content"], np.zeros(1, np.int32), item.answer, item.metadata)
        answers = [f"So it is \\boxed{{{item.answer}}}.", f"So it is \\boxed{{{item.answer}1}}."]
        assert [value for value, _ in reward(prompt, answers)] == [1.0, 0.0]


@pytest.mark.slow
def test_gsm8k_from_the_download_to_a_smoke_run(tmp_path: Path) -> None:
    """The tutorial's way: rows from the download's shape, a tiny model in Qwen3's place, two steps."""
    worked = "He has 3 * 4 = <<3*4=12>>12.\n#### 1,0"
    lines = [json.dumps({"question": f"A box has {i} pens.", "answer": f"{worked}{i:02}"}) for i in range(40)]
    for name, some in (("train", lines[:30]), ("test", lines[30:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(some) + "\n")
        called(tmp_path, "gsm8k_rows.py", f"{name}.jsonl", f"gsm8k-{name}.jsonl")
    first = json.loads((tmp_path / "gsm8k-train.jsonl").read_text().splitlines()[0])
    assert first["answer"] == "1000" and first["prompt"][0]["content"].startswith(
        "A box has 0 pens. Think step by step"
    )
    assert first["solution"] == "He has 3 * 4 = <<3*4=12>>12."
    called(tmp_path, "tiny_qwen3.py", "gsm8k-train.jsonl", "tiny-qwen3")
    shutil.copy(EXAMPLES / "gsm8k-smoke.toml", tmp_path)
    sets = [
        f"run.root={tmp_path}/runs",
        "run.steps=2",
        "sft_warm_start.steps=2",
        "trainer.prompts_per_step=8",
        "algorithm.filters=[]",
    ]
    runs.relax_hpc("run", tmp_path / "gsm8k-smoke.toml", *(word for one in sets for word in ("--set", one)))
    rows = relax_hpc.open_run(tmp_path / "runs/smoke").trajectories()
    assert set(rows.status) == {"trained", "evaluation"} and rows.prompt.str.contains("<|im_start|>assistant").all()


def called(folder: Path, script: str, *arguments: str) -> None:
    subprocess.run([sys.executable, EXAMPLES / script, *arguments], cwd=folder, check=True, timeout=300)


@pytest.mark.slow
def test_submit_a_plain_job(tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "submit.py", EXAMPLES / "filter.toml", "--plain", "local", "--set"]
    done = subprocess.run(
        [*command, f"run.root={tmp_path}"], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0 and "'outcome': 'done'" in done.stdout, done.stdout + done.stderr


def test_submit_says_what_it_would_send(tmp_path: Path) -> None:
    sets = [f"run.root={tmp_path}", "slurm.time=00:10:00"]
    command = [sys.executable, EXAMPLES / "submit.py", EXAMPLES / "reward.toml", "--dry-run"]
    done = subprocess.run(
        [*command, *(word for one in sets for word in ("--set", one))],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0 and "#SBATCH --time" in done.stdout, done.stdout + done.stderr
