"""A run on text and pictures whose worker has SGLang's server: weights change in mid-generation, the server is killed, nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from PIL import Image

from relax_hpc.files.run_dir import RunDir
from relax_hpc.spool.shard import Shard
from relax_hpc.telemetry import read_metrics
from tests.runs import SMALL, audited, outcome, pid_of, start, step_now, steps_of, wait_for, write_recipe

SETS = (
    "rollout.engine=sglang", "rollout.device=cpu", "async.on_stale=mask", "model.context=600", "rollout.max_new_tokens=500",
    "rollout.temperature=1.5", "run.steps=8",
    "model.vision={layers=1}",
)  # fmt: skip
"""Long enough answers for a new version to come while they are generated."""
SOURCE = """
[[source]]
prompts = "{root}/rows.jsonl"
media = {{image = "image"}}
"""


def recipe_with_pictures(folder: Path) -> Path:
    """Sums, and pictures of one color whose name is asked for."""
    rows = []
    for i in range(40):
        Image.new("RGB", (16 + i, 24), (5 * i, 90, 200 - 5 * i)).save(folder / f"{i}.png")
        rows.append(json.dumps({"prompt": "<image> = ", "image": f"{i}.png", "answer": "1"}))
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return write_recipe(folder, SMALL + SOURCE)


@pytest.mark.timeout(600)  # the server starts twice
def test_a_run_with_sglang_swaps_weights_in_mid_generation_and_outlives_its_server(tmp_path: Path) -> None:
    recipe, run = recipe_with_pictures(tmp_path), RunDir(tmp_path / "small")
    process = start("run", recipe, *(word for pair in SETS for word in ("--set", pair)))
    try:
        wait_for(lambda: step_now(run) >= 2, timeout=240)
        worker = psutil.Process(pid_of(run, "rollout-0"))
        server = next(p for p in worker.children() if "relax_hpc.engines.sglang.serve" in p.cmdline())
        server.kill()
        assert process.wait(timeout=240) == 0, process.stdout and process.stdout.read()
    finally:
        process.kill()
    assert outcome(run)["outcome"] == "done"
    assert audited(run).trained == 8 * 32
    records, _ = read_metrics(run.metrics / "rollout-0.jsonl")
    assert [r["kind"] for r in records].count("engine_restart") == 1
    assert {r["attempt"] for r in records} == {0}, "the worker itself was not started again"
    spans: dict[bool, list[int]] = {False: [], True: []}
    for path in run.shards.rglob("*.h5"):
        with Shard(path) as shard:
            for group in map(shard.group, range(len(shard.groups))):
                assert not group.reason
                spans[group.prompt.media is not None] += [len(sample.spans) for sample in group.samples]
    assert max(spans[True]) > 1, "no sample that saw a picture was made by more than one version"
    assert max(spans[False]) > 1
    assert steps_of(run)[0]["engine_diff"] < 1e-5, "the trainer saw other pictures than the engine"
    assert all(step["masked_tokens"] >= 0 and step["age_max"] <= 1 for step in steps_of(run))
