"""Files that a run begins with, damaged as copies and disks damage them: the command names the file and the fix, and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from relax_hpc.files.run_dir import RunDir
from tests.runs import SMALL, audited, outcome, relax_hpc, write_recipe

TWO_STEPS = SMALL.replace("steps = 6", "steps = 4")
TORN = '{"step": 4, "cur'


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of 4 steps, with checkpoints at 2 and 4."""
    folder = tmp_path_factory.mktemp("made")
    relax_hpc("run", write_recipe(folder, TWO_STEPS))
    return RunDir(folder / "small")


@pytest.fixture
def run(made, tmp_path):
    shutil.copytree(made.root, tmp_path / "small")
    return RunDir(tmp_path / "small")


def refused(*arguments) -> str:
    done = relax_hpc(*arguments, code=2)
    assert "Traceback" not in done.stderr + done.stdout
    return done.stderr[done.stderr.index("error: ") :]


def test_a_model_whose_download_did_not_end_is_refused_before_there_is_a_run(made, tmp_path):
    model = tmp_path / "model"
    relax_hpc("export", made.root, model)
    table = f'[model]\npath = "{model}"\n'
    recipe = write_recipe(
        tmp_path, TWO_STEPS[: TWO_STEPS.index("[model]")] + table + TWO_STEPS[TWO_STEPS.index("[algorithm]") :]
    )
    os.truncate(model / "model.safetensors", 1000)
    error = refused("run", recipe)
    assert f"'{model}': model.safetensors (1000 bytes)" in error and "copy or download it again" in error
    assert {path.name for path in tmp_path.iterdir()} == {"model", recipe.name}


def test_of_a_damaged_state_an_older_checkpoint_is_taken_and_a_damaged_manifest_is_made_anew(run):
    (run.checkpoint(4) / "state.json").write_text(TORN)
    (run.weights / "latest.json").write_text(TORN)
    relax_hpc("run", run.root, "--set", "run.steps=6")
    assert outcome(run)["outcome"] == "done"
    assert "checkpoint of step 4 was damaged, an older one was taken" in relax_hpc("status", run.root).stdout.replace(
        "\n", " "
    )
    assert json.loads((run.weights / "latest.json").read_text())["number"] == 6
    audited(run)


def test_where_no_checkpoint_is_whole_the_run_ends_at_once_and_goes_on_when_one_is_put_back(made, run):
    for step in (2, 4):
        (run.checkpoint(step) / "state.json").write_text(TORN)
    error = refused("run", run.root, "--set", "run.steps=6")
    assert str(run.checkpoint(4) / "state.json") in error and "Put one back from a copy" in error
    assert len(list(run.logs.glob("trainer-0.*.log"))) <= 2 + 1, (
        "one or two attempts, and not as many as supervision.max_restarts"
    )
    shutil.copytree(made.checkpoint(4), run.checkpoint(4))
    relax_hpc("run", run.root)
    assert outcome(run)["outcome"] == "done"
    audited(run)


def test_a_disk_that_is_full_before_the_run_is_there(tmp_path):
    """Room for half of the code's copy; then for the code, and not for the model: each time one line, and nothing is left."""
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "true"], check=False).returncode:
        pytest.skip("a small file system needs root or user namespaces")
    body = [sys.executable, "-m", "tests.end_to_end.full_at_creation", str(tmp_path)]
    done = subprocess.run([*namespace, *body], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_roles_cannot_begin_with_ends_the_run_at_the_second_time(run):
    """A damaged tokenizer, which the library that reads it refuses in words of its own."""
    tokenizer = run.model / "tokenizer.json"
    before = len(list(run.logs.glob("trainer-0.*.log")))
    os.truncate(tokenizer, 100)
    error = refused("run", run.root, "--set", "run.steps=6")
    assert "cannot begin: twice the same error" in error and str(run.logs) in error
    assert outcome(run)["fatal"] is True
    assert len(list(run.logs.glob("trainer-0.*.log"))) <= before + 2, "and not as often as supervision.max_restarts"
