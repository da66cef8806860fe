"""What a person can do wrong ends in words, not in a traceback, and loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from relax_hpc import open_run
from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.analysis.audit import audit
from relax_hpc.spool.shard import Shard
from tests.runs import SMALL, audited, outcome, relax_hpc, start, step_now, steps_of, wait_for, write_recipe

FILE_SOURCE = (
    SMALL[: SMALL.index("[[source]]")]
    + '[[source]]\nprompts = "{root}/prompts.jsonl"\nreward = "{root}/rewards.py:judge"\n'
)


def with_prompts(folder, reward="return float(answer == prompt.answer)", lines=None):
    """A recipe on a prompt file of its own and a reward of the user's own."""
    rows = [json.dumps({"prompt": f"{a} + {b} = ", "answer": str(a + b)}) for a in range(10) for b in range(10)]
    (folder / "prompts.jsonl").write_text("\n".join(lines or rows) + "\n")
    (folder / "rewards.py").write_text(f"import time, math\ndef judge(prompt, answer):\n    {reward}\n")
    return write_recipe(folder, FILE_SOURCE)


def refused(*arguments) -> str:
    error = relax_hpc("run", *arguments, code=2).stderr
    assert "Traceback" not in error
    return error


def test_an_unknown_key_names_the_valid_ones(tmp_path):
    error = refused(write_recipe(tmp_path, SMALL.replace("learning_rate", "learningrate")))
    assert "learningrate" in error and "learning_rate" in error and not (tmp_path / "small").exists()


@pytest.mark.quick
def test_a_broken_line_names_file_and_line(tmp_path):
    good = json.dumps({"prompt": "1 + 1 = ", "answer": "2"})
    error = refused(with_prompts(tmp_path, lines=[good, good, '{"prompt": ', good]))
    assert "prompts.jsonl" in error and ":3:" in error
    folders = {p.name for p in tmp_path.iterdir() if p.is_dir()}
    assert folders <= {"__pycache__"}, "half a run was left behind"  # Python's own, beside the reward's file


def test_a_prompt_longer_than_the_context_names_it_and_the_lengths(tmp_path):
    row = json.dumps({"prompt": "1 + " * 40, "answer": "2"})
    error = refused(with_prompts(tmp_path, lines=[row]))
    assert "160" in error and "48" in error


def test_a_reward_of_another_signature_is_refused_before_anything_starts(tmp_path):
    recipe = with_prompts(tmp_path)
    (tmp_path / "rewards.py").write_text("def judge(answer):\n    return 1.0\n")
    assert "judge" in refused(recipe) and not (tmp_path / "small").exists()


def test_a_reward_that_raises_now_and_then_costs_its_groups_and_no_more(tmp_path):
    recipe = with_prompts(tmp_path, "return 1.0 if prompt.index % 5 else math.sqrt(-1)")
    relax_hpc("run", recipe, "--set", "rollout.max_failed_fraction=0.9")
    run = RunDir(tmp_path / "small")
    assert outcome(run)["outcome"] == "done"
    failed = sum(s["failed_groups"] for s in steps_of(run))
    assert failed > 0
    found = audit(run.root)
    assert found.lost == [] and found.trained == 6 * 32 - failed * 4
    rows = open_run(run.root).trajectories()
    reasons = rows[rows.status == "failed"].reason.unique()
    assert len(reasons) == 1 and "raised ValueError" in reasons[0], "reasons are counted, so they name no prompt"
    assert rows[rows.status == "failed"].detail.str.contains("math domain error").all()
    assert f"{failed} groups failed: reward" in relax_hpc("status", run.root).stdout
    assert "math domain error" in "".join(p.read_text() for p in run.logs.glob("trainer-0*"))


def test_a_reward_that_always_raises_stops_the_run_and_it_goes_on_when_the_limit_is_raised(tmp_path):
    recipe = with_prompts(tmp_path, "raise KeyError('no rubric')")
    error = refused(recipe)
    assert "groups failed" in error and "no rubric" in error and "max_failed_fraction" in error
    run = RunDir(tmp_path / "small")
    relax_hpc("run", run.root, "--set", "rollout.max_failed_fraction=1.0", "--set", "run.steps=2")
    assert outcome(run)["outcome"] == "done"


def test_a_mended_reward_is_taken_and_scores_what_failed_in_a_run_that_was_moved_meanwhile(tmp_path):
    recipe = with_prompts(tmp_path, "import words; return float(answer == words.WORDS[prompt.answer])")
    (tmp_path / "words.py").write_text("WORDS = {}\n")
    error = refused(recipe)
    assert "KeyError" in error and "--code new" in error and "--redo generate" in error
    (tmp_path / "words.py").write_text("class Same(dict):\n    __missing__ = lambda self, key: key\nWORDS = Same()\n")
    run = RunDir(tmp_path / "elsewhere" / "moved")
    run.root.parent.mkdir()
    (tmp_path / "small").rename(run.root)
    assert not list(run.ledger.rglob("*.json"))
    said = refused(run.root)
    assert (
        f"{tmp_path}/words.py changed since the run copied it" in said
        and "--code new takes" in said
        and "KeyError" in said
    )
    failed = {p.stem: answers(p) for p in run.shards.rglob("*.h5")}
    relax_hpc("run", run.root, "--code", "new")
    assert outcome(run)["outcome"] == "done"
    assert {request: answers(run.shard(request)) for request in failed} == failed, "they were generated again"
    assert sum(s["failed_groups"] for s in steps_of(run)) == 0
    audited(run)
    [code, redo] = [json.loads(line) for line in run.changes.read_text().splitlines()]
    assert (
        (code["key"], code["file"]) == ("code", f"{tmp_path}/words.py")
        and code["old"] != code["new"]
        and code["step"] == 0
    )
    assert (redo["key"], redo["how"], set(redo["requests"])) == ("redo", "score", set(failed))


def test_code_that_does_not_load_is_not_taken(tmp_path):
    recipe = with_prompts(tmp_path)
    relax_hpc("run", recipe, "--set", "run.steps=1")
    run = RunDir(tmp_path / "small")
    before = run.recipe.read_bytes()
    (tmp_path / "rewards.py").write_text("WORDS = open('words.txt').read()\n")
    error = refused(run.root, "--code", "new", "--set", "run.steps=2")
    assert "does not load: FileNotFoundError" in error and "absolute path" in error
    assert run.recipe.read_bytes() == before and not run.changes.exists()
    assert "this one is to be made" in refused(recipe, "--set", "run.name=other", "--code", "new")


def answers(shard):
    with Shard(shard) as found:
        return found.read("tokens").tolist()


def test_a_loss_that_is_never_finite_stops_the_run_and_says_what_was_not(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "class Mine:\n"
        "    needs = frozenset()\n"
        "    def advantages(self, rollouts): return torch.ones(len(rollouts.tokens))\n"
        "    def loss(self, inputs): return inputs.logprobs / 0, {}\n"
    )
    table = f"algorithm={{factory = '{tmp_path / 'mine.py'}:Mine', group_size = 4}}"
    error = refused(write_recipe(tmp_path), "--set", table, "--set", "trainer.max_skipped_steps=3")
    assert "3 steps in a row were skipped" in error and "step 2: loss = -inf" in error
    run = RunDir(tmp_path / "small")
    assert [s["skipped"] for s in steps_of(run)] == [1, 1, 1]


def test_a_reward_that_never_returns_is_cut_off_at_its_time_limit(tmp_path):
    recipe = with_prompts(tmp_path, "time.sleep(3600 if prompt.index == 0 else 0); return 1.0")
    (tmp_path / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{i} + 1 = ", "answer": str(i + 1)}) for i in range(8)) + "\n"
    )
    relax_hpc(
        "run",
        recipe,
        "--set",
        "rollout.reward_time_limit_s=1.0",
        "--set",
        "run.steps=1",
        "--set",
        "async.max_staleness=0",
    )
    entry = json.loads(next(RunDir(tmp_path / "small").ledger.rglob("*.json")).read_text())
    (reason,) = entry["filtered"].values()
    assert "1" in reason and "limit" in reason


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    relax_hpc("run", write_recipe(tmp_path), "--set", "run.steps=2")
    wide = tmp_path / "wide"
    wide.mkdir()
    relax_hpc("run", write_recipe(wide, SMALL.replace("hidden_size = 32", "hidden_size = 64")), "--set", "run.steps=2")
    # Whole, with its checksums: one file alone would be a damaged checkpoint.
    step = "small/checkpoints/step-00000002"
    shutil.copytree(wide / step, tmp_path / step, dirs_exist_ok=True)
    error = refused(tmp_path / "small", "--set", "run.steps=4")
    assert "another model" in error or "shape" in error


def test_a_damaged_shard_stops_the_run_by_name(tmp_path):
    recipe = write_recipe(
        tmp_path,
        SMALL.replace("steps = 6", "steps = 100000").replace("checkpoint_every = 2", "checkpoint_every = 100000"),
    )
    run = RunDir(tmp_path / "small")
    process = start("run", recipe)
    wait_for(lambda: run.exists and step_now(run) >= 3)
    process.kill()
    process.wait()
    shard = run.shard("r000001-000")
    os.truncate(shard, shard.stat().st_size // 2)
    error = refused(run.root)
    assert "r000001-000.h5" in error and "truncated" in error


@pytest.mark.skipif(
    os.geteuid() != 0 and not shutil.which("unshare"), reason="a small file system needs root or user namespaces"
)
def test_a_full_disk_stops_the_run_in_words_and_it_goes_on_when_there_is_room(tmp_path):
    """The run lies on a tmpfs of 24 MB, filled up under it; the whole test body runs inside a mount namespace."""
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    done = subprocess.run(
        [*namespace, sys.executable, "-m", "tests.end_to_end.full_disk", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_quota_removes_what_is_not_needed_or_stops_in_words(tmp_path):
    recipe = write_recipe(
        tmp_path, SMALL.replace("steps = 6", "steps = 30").replace("checkpoint_every = 2", "checkpoint_every = 1000")
    )
    quota = ("--set", "spool.quota_gb=0.0003")
    error = refused(recipe, *quota)
    assert "spool.quota_gb = 0.0003" in error and "spool.keep" in error
    run = RunDir(tmp_path / "small")
    stopped_at = outcome(run)["step"]
    assert 0 < stopped_at < 30
    relax_hpc("run", run.root, "--set", "spool.keep=needed")
    assert outcome(run)["outcome"] == "done"
    assert sum(p.stat().st_size for p in run.shards.rglob("*.h5")) < 0.0003e9
    assert len(run.checkpoint_steps()) <= 2
