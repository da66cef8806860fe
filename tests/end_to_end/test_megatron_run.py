"""A run whose trainer is Megatron-core on two processes: to its end, on under another plan, exported."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from transformers import AutoModelForCausalLM

from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch.evaluate import evaluate
from relax_hpc.telemetry import read_heartbeat
from tests.runs import SMALL, audited, outcome, pid_of, relax_hpc, start, step_now, steps_of, wait_for, write_recipe

EXPERTS = SMALL.replace("kv_heads = 1", "kv_heads = 2\nexperts = 4\nmoe_intermediate_size = 32").replace(
    "[trainer]", '[trainer]\nbackend = "megatron"\nprocesses = 2'
)
SHARED = "\n[trainer.parallel]\ntensor = 2\nsequence = true\nexpert_tensor = 2\n"


def test_a_run_goes_on_under_another_plan_and_its_checkpoint_is_exported(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, EXPERTS.replace("steps = 6", "steps = 3\nasync_checkpoints = true") + SHARED)
    relax_hpc("run", recipe)
    run = RunDir(tmp_path / "small")
    plan = ["tensor=1", "sequence=false", "expert_tensor=1", "expert=2"]
    sets = [word for key in plan for word in ("--set", f"trainer.parallel.{key}")]
    relax_hpc("run", run.root, "--set", "run.steps=5", *sets)
    assert outcome(run)["outcome"] == "done"
    assert [s["step"] for s in steps_of(run)] == [0, 1, 2, 3, 4]
    audited(run)
    relax_hpc("export", run.root, tmp_path / "model")
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    asked = ["evaluation.holdout=0.3", "evaluation.prompts=12"]
    scores = [
        evaluate(target, recipe, asked, output=tmp_path / f"scored-{i}").score.all
        for i, target in enumerate((run.root, tmp_path / "model"))
    ]
    assert scores[0].prompts == 12 and scores[0].length_mean == scores[1].length_mean > 0


def test_scorers_that_are_one_group_are_started_again_together(tmp_path: Path) -> None:
    scored = 'name = "grpo"\nkl_coef = 0.05\nold_logprobs = "recomputed"'
    text = SMALL.replace("[trainer]", '[trainer]\nbackend = "megatron"').replace('name = "grpo"', scored)
    text = text.replace("steps = 6", "steps = 30").replace("checkpoint_every = 2", "checkpoint_every = 30")
    table = '\n[scorer]\nscores = ["recomputed", "reference"]\nprocesses = 2\n'
    run, process = RunDir(tmp_path / "small"), start("run", write_recipe(tmp_path, text + table))
    wait_for(lambda: step_now(run) >= 2)
    os.kill(wait_for(lambda: pid_of(run, "scorer-1")), signal.SIGKILL)
    process.wait(300)
    assert outcome(run)["outcome"] == "done"
    audited(run)
    assert {read_heartbeat(run, f"scorer-{rank}")["attempt"] for rank in range(2)} == {1}
    for entry in (read_json(path) for path in run.ledger.rglob("*.json")):
        for taken in entry["take"]:
            policy = taken["columns"]["recomputed"].removeprefix("policy ").partition(".")[0]
            assert 0 <= entry["step"] - int(policy) <= 1, "as old as a token at most"
    assert all(step["reference_kl"] >= 0 for step in steps_of(run)) and steps_of(run)[-1]["reference_kl"] > 0


def test_a_plan_that_does_not_fit_is_refused_before_the_run_begins(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, EXPERTS + SHARED)
    for change, said in (
        ("trainer.processes=3", "tensor = 2, pipeline = 1 and context = 1 take 2 processes together"),
        ("trainer.parallel.expert_tensor=1", "expert_tensor = 1 and tensor = 2 must be equal where expert = 1"),
        ("trainer.parallel.sequence=false", "tensor = 2 with experts needs sequence = true"),
        ("trainer.backend=torch", 'is for trainer.backend = "megatron"'),
        ("model.kv_heads=1", "tensor = 2 must divide the model's 1 key/value heads: use one of [1]"),
    ):
        error = " ".join(relax_hpc("run", recipe, "--set", change, code=2).stderr.split())
        assert said in error, change
    assert not (tmp_path / "small").exists()
