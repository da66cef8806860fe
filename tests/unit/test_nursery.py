"""The nursery: roles are forked from one process that has imported torch; their ends are told truly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from relax_hpc.launch.create import create, place
from relax_hpc.launch.nursery import Child, Nursery
from relax_hpc.recipe import load_recipe
from relax_hpc.run_dir import RunDir
from tests.runs import write_recipe


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Of a run without a supervisor: its roles wait for weights, or for orders."""
    folder = tmp_path_factory.mktemp("run")
    recipe = load_recipe(write_recipe(folder), [f"run.root={folder}"])
    with Nursery(place(recipe)) as nursery:
        create(recipe, nursery)
        yield nursery


@pytest.fixture(scope="module")
def run(nursery: Nursery) -> RunDir:
    return nursery._run


def bear(nursery: Nursery, log: Path, *arguments: str) -> Child:
    _, writing = os.pipe()
    child = nursery.bear(arguments, log, writing)
    os.close(writing)
    return child


def test_a_role_is_forked_from_what_is_imported_already(nursery: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert bear(nursery, log, "--help").wait(120) == 0 and "--workplace" in log.read_text()
    children = [bear(nursery, log, "trainer", str(tmp_path), "--name", f"trainer-{i}") for i in range(8)]
    assert [child.wait(60) for child in children] == [1] * 8
    assert log.read_text().count("RunError: ") == 8
    assert nursery._process is not None and psutil.Process(nursery._process.pid).num_threads() == 1


def test_its_end_is_told_truly_and_it_ends_with_the_nursery(nursery: Nursery, run: RunDir) -> None:
    first, second = (
        bear(nursery, run.logs / "log", "rollout", str(run.root), "--workplace", f"w{i}", "--name", f"rollout-{i}")
        for i in range(2)
    )
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(2)
    first.kill()
    assert first.wait(30) == -signal.SIGKILL and second.poll() is None
    assert nursery._process is not None
    nursery._process.kill()
    assert second.wait(30) == -signal.SIGKILL
    assert bear(nursery, run.logs / "log", "--help").wait(120) == 0  # of another nursery


def test_nobody_waits_for_an_unborn_one(run: RunDir) -> None:
    nursery, log = Nursery(run), run.logs / "log"
    waiting = ["rollout", str(run.root), "--workplace", "w", "--name", "rollout-7"]
    began = time.monotonic()
    unborn = bear(nursery, log, *waiting)
    unborn.send_signal(signal.SIGTERM)
    signalled = time.monotonic()
    assert unborn.wait(600) == -signal.SIGTERM
    assert signalled - began < time.monotonic() - signalled, "it takes seconds to import torch, which were waited for"
    nursery.give_up()
    unborn = bear(nursery, log, *waiting)
    unborn.kill()
    assert unborn.wait(60) == -signal.SIGKILL


def test_it_ends_without_a_word_when_its_supervisor_does(run: RunDir, tmp_path: Path) -> None:
    alone = Nursery(run)
    assert bear(alone, tmp_path / "log", "--help").wait(120) == 0
    said = (tmp_path / "log").read_text()
    assert alone._socket is not None and alone._process is not None
    alone._socket.close()
    assert alone._process.wait(60) == 0
    assert (tmp_path / "log").read_text() == said


def test_what_is_imported_later_comes_from_the_runs_copy_of_the_code(run: RunDir) -> None:
    code = run.snapshot / "code"
    program = (
        "import sys; from pathlib import Path; from relax_hpc.launch import nursery;"
        "nursery._import_from(Path(sys.argv[1])); import relax_hpc.spool.watch as watch;"
        "print(nursery.__file__, watch.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(code)], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert after == str(code / "relax_hpc/spool/watch.py") and not before.startswith(str(code))
