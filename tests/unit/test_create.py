"""Which run a recipe means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json, to_json, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch import create as create_module
from relax_hpc.launch import user_code
from relax_hpc.launch.create import create, existing, place
from relax_hpc.launch.prepare import prepare
from relax_hpc.recipe import dump_recipe, load_recipe
from relax_hpc.recipe.schema import Recipe
from relax_hpc.supervise.fork_server import ForkServer
from tests import tiny
from tests.runs import write_recipe

USERS = """
def judge(prompt, answer): return 0.0
def other(prompt, answer): return 0.0
def keep(group): return None
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """One that names the user's file in a value, in a list, and in a table of a list."""
    (tmp_path / "mine.py").write_text(USERS)
    sets = (f"run.root={tmp_path}/runs", f'algorithm.filters=["zero_std", "{tmp_path}/mine.py:keep"]', f"source.0.reward={tmp_path}/mine.py:judge")  # fmt: skip
    return load_recipe(write_recipe(tmp_path), sets)


def test_the_same_recipe_means_the_run_it_made_though_that_names_copies_of_the_users_files(recipe: Recipe) -> None:
    run = place(recipe)
    run.create()
    plain = recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    kept = user_code.copy(recipe, run)
    assert str(run.snapshot) in str(kept.algorithm.filters) and str(run.snapshot) in kept.source[0].reward
    write_file(run.recipe, dump_recipe(user_code.seen_from(run, kept)).encode())
    write_file(run.identity, to_json({"id": "x"}))
    assert existing(recipe) == run
    plain["source"][0]["reward"] = plain["source"][0]["reward"].replace(":judge", ":other")
    changed = Recipe.model_validate(plain)
    with pytest.raises(RunError, match=r"run of another recipe.*:judge.*:other"):
        existing(changed)


def test_of_two_commands_that_begin_the_same_run_the_second_is_told_of_the_first(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = place(recipe)

    def meanwhile(draft: RunDir, fork_server: Any, **options: object) -> None:
        run.create()
        write_file(run.identity, to_json({"id": "of the first"}))

    monkeypatch.setattr(create_module, "prepare", meanwhile)
    with pytest.raises(RunError, match=r"made by another command at this moment.*relax-hpc status"):
        create(recipe, None)  # type: ignore[arg-type]
    assert read_json(run.identity) == {"id": "of the first"} and len(list(run.root.parent.iterdir())) == 1


def test_answers_as_long_as_the_models_context_are_refused_before_the_run_begins(tmp_path: Path) -> None:
    """Of a model at a path, whose context stands in its config.json."""
    folder = tiny.folder(tiny.recipe(model={"context": 128}), tmp_path / "model")

    def prepared(max_new_tokens: int) -> None:
        sources = [{"task": "chain_sum", "size": 20, "reward": "exact"}]
        rollout = {"max_new_tokens": max_new_tokens}
        (run := RunDir(tmp_path / str(max_new_tokens))).create()
        prepare(run, Recipe.model_validate({"model": {"path": folder}, "rollout": rollout, "source": sources}))

    with pytest.raises(RunError, match=r"rollout\.max_new_tokens = 128 leaves no room .* context of 128 tokens"):
        prepared(128)
    prepared(100)


def test_rows_that_are_left_out_are_counted_when_the_run_is_made(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1) if i else None} for i in range(5)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tiny.recipe(source=[{"prompts": tmp_path / "p.jsonl", "missing_answer": "drop"}])
    run = RunDir(tmp_path / "run")
    run.create()
    prepare(run, recipe)
    assert read_json(run.rows) == {"source.0": {"rows": 5, "too_long": 0, "no_answer": 1, "cut": 0}}


OWN = """
class Mine:
    needs = {"reference"}
    def advantages(self, rollouts): raise NotImplementedError
    def loss(self, inputs): raise NotImplementedError
"""


def test_a_fork_does_not_move_the_reference_of_an_own_algorithm_from_a_scorer_to_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    own = {"name": "own", "factory": f"{tmp_path}/mine.py:Mine"}
    old = RunDir(tmp_path / "runs" / "old")
    old.create()
    write_file(old.recipe, dump_recipe(tiny.recipe(algorithm=own, scorer={"scores": ["reference"]})).encode())
    fork = tiny.recipe(model={"context": 512}, algorithm=own, run={"name": "fork", "root": str(old.root.parent)})
    with (
        ForkServer(RunDir(tmp_path)) as fork_server,
        pytest.raises(RunError, match="the reference does not move between trainer and scorer"),
    ):
        create(fork, fork_server, fork_of=old)
    assert not place(fork).root.exists()
