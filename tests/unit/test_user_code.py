"""The user's files in a run: which are copied, where the recipe sees them, and what an edited one comes to."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import to_json, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch import user_code
from relax_hpc.recipe import Recipe, dump_recipe, load_recipe
from relax_hpc.rewards import make_rewards
from tests.runs import write_recipe


def recipe_of(folder: Path, *sets: str) -> Recipe:
    return load_recipe(write_recipe(folder), [f"run.root={folder}/runs", *sets])


def made(recipe: Recipe) -> RunDir:
    """A run with its copies and its recipe, and nothing else."""
    run = RunDir(recipe.run.root / recipe.run.name)
    run.create()
    write_file(run.recipe, dump_recipe(user_code.seen_from(run, user_code.copy(recipe, run))).encode())
    write_file(run.identity, to_json({"id": "x"}))
    return run


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A reward that imports a module, which imports a package's, and lazily another one, all beside it."""
    (tmp_path / "my_judge.py").write_text(
        "from my_words import RIGHT\ndef judge(prompt, answer):\n    import my_late\n    return my_late.score(answer == RIGHT)\n"
    )
    (tmp_path / "my_words.py").write_text("import json\nfrom my_package.deep import RIGHT\n")
    (tmp_path / "my_late.py").write_text("score = float\n")
    (tmp_path / "my_unused.py").write_text("")
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("")
    (tmp_path / "my_package" / "deep.py").write_text("RIGHT = 'yes'\n")
    return tmp_path


def judged(run: RunDir, answer: str, cwd: Path) -> float:
    """What the run's reward says, in a process of its own."""
    program = (
        "import sys\nfrom relax_hpc.recipe import load_recipe\nfrom relax_hpc.rewards import make_rewards\n"
        f"print(make_rewards(load_recipe('{run.recipe}').sources)[0].function(None, '{answer}'))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, cwd=cwd, check=True)
    return float(done.stdout)


def test_a_file_is_copied_with_what_it_imports_beside_it_and_the_run_may_be_moved(mine: Path) -> None:
    run = made(recipe_of(mine, f"source.0.reward={mine}/my_judge.py:judge"))
    samples_per_prompt = sorted(
        str(p.relative_to(run.snapshot / "user" / "v0" / "0")) for p in (run.snapshot / "user").rglob("*.py")
    )
    assert samples_per_prompt == [
        "my_judge.py",
        "my_late.py",
        "my_package/__init__.py",
        "my_package/deep.py",
        "my_words.py",
    ]
    moved = RunDir(mine / "elsewhere" / "moved")
    moved.root.parent.mkdir()
    shutil.move(run.root, moved.root)
    recipe = load_recipe(moved.recipe)
    assert (recipe.run.root, recipe.run.name) == (moved.root.parent, "moved")
    assert recipe.source[0].reward == f"{moved.snapshot}/user/v0/0/my_judge.py:judge"
    for path in mine.glob("my_*.py"):
        path.write_text("raise AssertionError('the original was imported')")
    assert judged(moved, "yes", cwd=mine) == 1.0


def test_files_of_one_name_in_two_folders_stay_two(tmp_path: Path) -> None:
    for k, name in enumerate("ab"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.py").write_text(
            f"def judge(prompt, answer): return {k}\ndef keep(group): return None\n"
        )
    recipe = recipe_of(
        tmp_path, f"source.0.reward={tmp_path}/a/same.py:judge", f'algorithm.filters=["{tmp_path}/b/same.py:keep"]'
    )
    run = made(recipe)
    kept = load_recipe(run.recipe)
    assert make_rewards(kept.sources)[0].function(None, "") == 0
    assert Path(kept.algorithm.filters[0].rpartition(":")[0]).read_text() == (tmp_path / "b" / "same.py").read_text()


def test_a_module_beside_it_that_is_also_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("import fractions\ndef judge(prompt, answer): return 1.0\n")
    (tmp_path / "fractions.py").write_text("")
    with pytest.raises(
        RunError,
        match="judge.py' imports 'fractions', which both '.*/fractions.py' and '.*lib.*/fractions.py' are: rename",
    ):
        made(recipe_of(tmp_path, f"source.0.reward={tmp_path}/judge.py:judge"))


def test_modules_of_one_name_beside_two_files_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").write_text(
            "import shared_words\ndef judge(prompt, answer): ...\ndef keep(group): ...\n"
        )
        (tmp_path / name / "shared_words.py").write_text(f"NAME = '{name}'\n")
    sets = f"source.0.reward={tmp_path}/a/code.py:judge", f'algorithm.filters=["{tmp_path}/b/code.py:keep"]'
    with pytest.raises(
        RunError,
        match="b/code.py' imports 'shared_words', which both '.*/b/shared_words.py' and '.*/a/shared_words.py' are",
    ):
        made(recipe_of(tmp_path, *sets))


def test_an_edited_file_is_named_and_taken_as_a_new_version(mine: Path) -> None:
    run = made(recipe_of(mine, f"source.0.reward={mine}/my_judge.py:judge"))
    old = load_recipe(run.recipe)
    assert user_code.edited(run, old) == []
    words = mine / "my_words.py"
    words.write_text("from my_unused import RIGHT\n")
    (mine / "my_unused.py").write_text("RIGHT = 'no'\n")
    [edited] = user_code.edited(run, old)
    assert edited.file == str(words) and edited.old != edited.new
    new, changed = user_code.copy_edited(run, old)
    assert new.source[0].reward == f"{run.snapshot}/user/v1/0/my_judge.py:judge"
    assert {Path(c.file).name: (c.old is None, c.new is None) for c in changed} == {
        "my_words.py": (False, False), "my_unused.py": (True, False), "__init__.py": (False, True), "deep.py": (False, True),
    }  # fmt: skip
    assert user_code.edited(run, new) == [] and user_code.edited(run, old) == [edited]
    assert judged(run, "yes", cwd=mine) == 1.0
    run.recipe.write_text(dump_recipe(user_code.seen_from(run, new)))
    assert (judged(run, "yes", cwd=mine), judged(run, "no", cwd=mine)) == (0.0, 1.0)


def test_a_forks_copies_came_from_where_those_of_the_first_run_did(mine: Path) -> None:
    run = made(recipe_of(mine, f"source.0.reward={mine}/my_judge.py:judge"))
    fork = made(load_recipe(run.recipe, ["run.name=fork"]))
    origins = json.loads((fork.snapshot / "user" / "v0" / "origins.json").read_text())
    assert origins["0/my_package/deep.py"]["from"] == str(mine / "my_package" / "deep.py")


def test_new_code_that_cannot_be_taken_is_said(mine: Path) -> None:
    plain = made(recipe_of(mine))
    with pytest.raises(RunError, match="no copy of code of yours"):
        user_code.copy_edited(plain, load_recipe(plain.recipe))
    run = made(recipe_of(mine, f"source.0.reward={mine}/my_judge.py:judge", "run.name=other"))
    (mine / "my_judge.py").unlink()
    with pytest.raises(RunError, match="my_judge.py'] are gone"):
        user_code.copy_edited(run, load_recipe(run.recipe))
