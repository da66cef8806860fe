"""Whoever takes weights from a run's checkpoint outside of the run: `export`, `eval` and a fork read no damaged file."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_hpc import checkpoint
from relax_hpc.files import folder_checksums
from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch.evaluate import find, hugging_face
from relax_hpc.launch.export import export_checkpoint
from relax_hpc.launch.fork import copy_state
from relax_hpc.recipe import dump_recipe
from tests import tiny

RECIPE = tiny.recipe(algorithm={"name": "ppo"}, critic={})
FILE = "model.safetensors"


def write(run: RunDir, step: int, of: RunDir | None = None) -> None:
    (commit_dir := run.lease / "000001").mkdir(exist_ok=True)
    folder = checkpoint.begin(commit_dir, step)
    (folder / FILE).write_bytes(b"weights of step %d" % step)
    checkpoint.commit(of or run, folder, step, {})


def damage(folder: Path, name: str = FILE) -> None:
    data = bytearray((folder / name).read_bytes())
    data[3] ^= 1
    (folder / name).write_bytes(data)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """With checkpoints of steps 2 and 4, the newer one damaged."""
    run = RunDir(tmp_path / "run")
    run.create()
    run.identity.write_bytes(to_json({"id": "x", "name": "run"}))
    run.recipe.write_text(dump_recipe(RECIPE))
    RunDir(run.critic).checkpoints.mkdir(parents=True)
    for step in (2, 4):
        write(run, step)
    damage(run.checkpoint(4))
    return run


def test_export_names_the_damaged_file_and_writes_nothing(run: RunDir, tmp_path: Path) -> None:
    output = tmp_path / "exported"
    with pytest.raises(RunError, match=r"step-00000004/model\.safetensors' has checksum .*--step.*from a copy"):
        export_checkpoint(run.root, output)
    assert not output.exists()


def test_eval_gives_no_engine_damaged_weights(run: RunDir) -> None:
    with pytest.raises(RunError, match=r"step-00000004/model\.safetensors' has checksum"):
        hugging_face(find(run.root, None)).__enter__()
    with hugging_face(find(run.root, 2)) as folder:
        assert folder == run.checkpoint(2)


def test_a_fork_begins_at_the_newest_checkpoint_that_is_whole_with_the_critic_nearest_to_it(
    run: RunDir, tmp_path: Path
) -> None:
    critic = RunDir(run.critic)
    for step in (1, 2):
        write(run, step, critic)
    damage(critic.checkpoint(2), "state.json")
    new = RunDir(tmp_path / "new")
    assert copy_state(run, new, RECIPE) == 2
    assert new.checkpoint_steps() == RunDir(new.critic).checkpoint_steps() == [2]
    of_critic = RunDir(new.critic).checkpoint(2)
    assert (of_critic / FILE).read_bytes() == b"weights of step 1" and read_json(of_critic / "state.json")["step"] == 2
    for folder in (new.checkpoint(2), of_critic):
        folder_checksums.compare_all(folder)
        assert folder_checksums.expected(folder).keys() == {FILE, "state.json"}


def test_nothing_is_forked_where_no_checkpoint_is_whole(run: RunDir, tmp_path: Path) -> None:
    damage(run.checkpoint(2), "state.json")
    with pytest.raises(RunError, match=r"no checkpoint of .* is whole: .*step-00000004/model.*step-00000002/state"):
        copy_state(run, RunDir(tmp_path / "new"), RECIPE)
