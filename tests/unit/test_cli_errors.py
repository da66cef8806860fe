"""Errors as a person meets them: few lines that name the thing and the fix; a traceback goes into a file, never to the terminal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import small_run

from relax_hpc.files.run_dir import RunDir
from tests import unprivileged
from tests.runs import SMALL, command, write_recipe

BROKEN = """
import relax_hpc.monitor.status, relax_hpc.recipe
def broken(*arguments, **options):
    raise KeyError("a key that nobody foresaw")
relax_hpc.monitor.status.Status.of = broken
relax_hpc.recipe.sources = broken
from relax_hpc.cli import app
app(prog_name="relax-hpc")
"""
"""The command line with a failure in `status` and in `recipe`."""
LONGEST_ERROR = 8
"""Lines."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    built = small_run.build(tmp_path / "run")
    with built.recipe.open("a") as recipe:
        recipe.write('[model]\nname = "tiny"\n[[source]]\ntask = "chain_sum"\n')
    return built


def broken(folder: Path, *arguments: str | Path) -> str:
    """What such a command says; the traceback's file is below `folder`."""
    line = [sys.executable, "-c", BROKEN, *map(str, arguments)]
    done = subprocess.run(
        line, capture_output=True, text=True, check=False, env=os.environ | {"TMPDIR": str(folder)},
        preexec_fn=unprivileged.drop_privileges,
    )  # fmt: skip
    assert done.returncode == os.EX_SOFTWARE, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") <= LONGEST_ERROR
    assert "KeyError: 'a key that nobody foresaw'" in done.stderr
    assert "relax-hpc " + " ".join(map(str, arguments)) in done.stderr and "report it" in done.stderr
    return done.stderr


def traceback_in(said: str) -> Path:
    found = re.search(r"traceback is in (\S+);", said)
    assert found is not None, said
    text = Path(found[1]).read_text()
    assert "Traceback" in text and "in broken" in text and "command: relax-hpc" in text
    return Path(found[1])


def test_the_traceback_of_an_unexpected_error_is_in_the_runs_logs(run: RunDir, tmp_path: Path) -> None:
    assert traceback_in(broken(tmp_path, "status", run.root)).parent == run.logs


def test_without_a_run_or_in_one_of_somebody_else_it_is_among_temporary_files(run: RunDir, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    assert traceback_in(broken(tmp_path, "recipe", recipe)).parent == tmp_path
    unprivileged.give_away(run.root, readable=True)
    assert traceback_in(broken(tmp_path, "status", run.root)).parent == tmp_path


def test_ctrl_c_while_a_run_is_prepared_leaves_neither_a_traceback_nor_half_a_run(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    with subprocess.Popen(command("run", recipe), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stderr.readline() == "preparing: loading libraries\n"
        while "loading torch" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130 and "Traceback" not in said
    assert [path.name for path in tmp_path.iterdir()] == [recipe.name]


@pytest.mark.parametrize("as_module", [True, False])
def test_ctrl_c_while_modules_are_imported_leaves_no_traceback(tmp_path: Path, as_module: bool) -> None:
    """An import that interrupts itself, at the place where seconds pass on a slow file system."""
    (tmp_path / "typer.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(60)\n"
    )
    entry = ["-m", "relax_hpc"] if as_module else ["-c", "from relax_hpc.__main__ import main; main()"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *entry, "--version"], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "")


def refused(*arguments: str | Path) -> str:
    """What a command says that is not allowed what it wants."""
    done = unprivileged.relax_hpc(*arguments)
    assert done.returncode == 2, (arguments, done.stdout, done.stderr)
    error = done.stderr[done.stderr.index("error: ") :]
    assert "Traceback" not in done.stderr and error.count("\n") <= 2, done.stderr
    assert "ermission denied" in error, error
    return error


@pytest.mark.parametrize(
    "words",
    [("status",), ("report",), ("trace",), ("eval",), ("shards", "ls"), ("run", "--fork", "mine")],
    ids=lambda words: words[0],
)
def test_somebody_elses_private_run(run: RunDir, words: tuple[str, ...]) -> None:
    unprivileged.give_away(run.root, readable=False)
    error = refused(words[0], *words[1:2] * (words[0] == "shards"), run.root, *words[1:] * (words[0] == "run"))
    assert str(run.root) in error and "ask its owner" in error


def test_somebody_elses_run_that_may_be_read_is_shown_and_pages_about_it_go_elsewhere(
    run: RunDir, tmp_path: Path
) -> None:
    unprivileged.give_away(run.root, readable=True)
    assert "run done" in unprivileged.relax_hpc("status", run.root).stdout
    for name, page in (("report", "report.html"), ("trace", "trace.json")):
        error = refused(name, run.root)
        assert str(run.root / page) in error and "--output" in error
    assert unprivileged.relax_hpc("trace", run.root, "-o", tmp_path / "mine.json").returncode == 0
    error = refused("run", run.root, "--set", "run.steps=9")
    assert str(run.root / "changes.jsonl") in error and "ask its owner" in error, "and no temporary name"


def test_a_root_that_may_not_be_written_and_a_recipe_and_prompts_that_may_not_be_read(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    unprivileged.give_away(root, readable=True)
    recipe = write_recipe(tmp_path)
    for where in (root, root / "runs"):
        error = refused("run", recipe, "--set", f"run.root={where}")
        assert str(where) in error and "--set run.root=DIR" in error and ".new" not in error
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1 + 1 = ", "answer": "2"}\n')
    source = f'[[source]]\nprompts = "{prompts}"\n'
    recipe = write_recipe(tmp_path, SMALL[: SMALL.index("[[source]]")] + source)
    unprivileged.give_away(prompts, readable=False)
    assert str(prompts) in refused("run", recipe) and not (tmp_path / "small").exists()
    unprivileged.give_away(recipe, readable=False)
    assert str(recipe) in refused("plan", recipe)
