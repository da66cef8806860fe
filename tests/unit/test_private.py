"""What a run makes is its user's alone, whatever the shell's umask is."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.files.permissions import keep_private, make_private
from relax_hpc.files.publish import replace, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch import create as create_module
from relax_hpc.launch.create import create
from relax_hpc.planning.doctor import files
from relax_hpc.recipe import load_recipe
from tests.runs import write_recipe


@pytest.fixture(autouse=True)
def shared() -> Iterator[None]:
    """The umask of a site whose groups share everything."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def modes(root: Path) -> set[int]:
    return {stat.S_IMODE(path.lstat().st_mode) for path in (root, *root.rglob("*"))}


@pytest.mark.parametrize(
    ("access", "taken", "given"), [("none", 0o077, 0), ("read", 0o027, 0o040)], ids=["alone", "group"]
)
def test_a_new_run_and_its_copy_of_the_code_cannot_be_written_by_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, access: str, taken: int, given: int
) -> None:
    (tmp_path / "mine.py").write_text("def judge(prompt, answer): return 0.0")
    sets = (f"run.root={tmp_path}/runs", f"run.group_access={access}", f"source.0.reward={tmp_path}/mine.py:judge")
    recipe = load_recipe(write_recipe(tmp_path), sets)

    def prepare(draft: RunDir, fork_server: Any, **options: object) -> None:
        (draft.model / "sub").mkdir(parents=True)
        (draft.model / "config.json").touch()
        os.chmod(draft.model / "config.json", 0o666)

    monkeypatch.setattr(create_module, "prepare", prepare)
    run = create(recipe, None)  # type: ignore[arg-type]
    assert list((run.snapshot / "user").rglob("mine.py")) and len(list(run.snapshot.rglob("*.py"))) > 100
    assert not any(mode & taken for mode in modes(run.root)) and all(mode & given == given for mode in modes(run.root))
    replace(run.root / "later", b"")
    (run.root / "folder").mkdir()
    (run.logs / "log").open("ab").close()
    assert not any(mode & taken for mode in modes(run.root)), "what comes later neither"
    assert stat.S_IMODE(run.root.parent.stat().st_mode) == 0o775, "others may have runs there"


def test_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path / "theirs")
    (tmp_path / "run" / "gone").symlink_to(tmp_path / "nowhere")
    make_private(tmp_path / "run", "none")
    assert stat.S_IMODE((tmp_path / "theirs").stat().st_mode) == 0o664


def test_doctor_warns_of_a_run_that_others_can_write(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    [found] = files.access(tmp_path, run)
    assert found.verdict == "warning" and "mode 775" in str(found) and "chmod -R go-w" in str(found)
    keep_private("none")
    write_file(run / "x", b"")
    run.chmod(0o750)
    assert [check.verdict for check in files.access(tmp_path, run)] == ["ok"]
    tmp_path.chmod(0o777)
    assert [check.verdict for check in files.access(tmp_path, run)] == ["warning"]
    tmp_path.chmod(0o700)
