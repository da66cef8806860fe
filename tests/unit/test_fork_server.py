"""The fork server: roles are forked from one process that has imported torch; their ends are told truly."""

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

from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch.create import create, place
from relax_hpc.recipe import load_recipe
from relax_hpc.roles.common.process import Exit
from relax_hpc.supervise.fork_server import ForkedProcess, ForkServer
from tests.runs import write_recipe


@pytest.fixture(scope="module")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Of a run without a supervisor: its roles wait for weights, or for requests."""
    folder = tmp_path_factory.mktemp("run")
    recipe = load_recipe(write_recipe(folder), [f"run.root={folder}"])
    with ForkServer(place(recipe)) as fork_server:
        create(recipe, fork_server)
        yield fork_server


@pytest.fixture(scope="module")
def run(fork_server: ForkServer) -> RunDir:
    return fork_server._run


def spawn(fork_server: ForkServer, log: Path, *arguments: str) -> ForkedProcess:
    return fork_server.spawn(arguments, log)


def test_a_role_is_forked_from_what_is_imported_already(fork_server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert spawn(fork_server, log, "--help").wait(120) == 0 and "--claim-dir" in log.read_text()
    children = [spawn(fork_server, log, "trainer", str(tmp_path), "--name", f"trainer-{i}") for i in range(8)]
    assert [child.wait(60) for child in children] == [1] * 8
    assert log.read_text().count("RunError: ") == 8
    assert fork_server._process is not None and psutil.Process(fork_server._process.pid).num_threads() == 1


def test_its_end_is_told_truly_and_it_ends_with_the_fork_server(fork_server: ForkServer, run: RunDir) -> None:
    first, second = (
        spawn(
            fork_server,
            run.logs / "log",
            "rollout",
            str(run.root),
            "--claim-dir",
            f"w{i}",
            "--name",
            f"rollout-{i}",
        )
        for i in range(2)
    )
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(2)
    first.kill()
    assert first.wait(30) == -signal.SIGKILL and second.poll() is None
    assert fork_server._process is not None
    fork_server._process.kill()
    assert second.wait(30) == -signal.SIGKILL
    assert spawn(fork_server, run.logs / "log", "--help").wait(120) == 0  # of another fork server


def test_a_process_list_shows_the_role_whatever_becomes_of_its_environment(
    fork_server: ForkServer, run: RunDir
) -> None:
    spawn(fork_server, run.logs / "log", "--help").wait(120)
    assert fork_server._process is not None
    variables = [*psutil.Process(fork_server._process.pid).environ()]
    role = ("rollout", str(run.root), "--claim-dir", "w", "--name", "rollout-0")
    child = fork_server.spawn(role, run.logs / "log", {name: os.environ.get(name, "") for name in variables[:3]})
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(2)
    assert child.pid and psutil.Process(child.pid).cmdline()[:2] == ["relax_hpc", "rollout"]
    child.kill()
    child.wait(30)


def test_nobody_waits_for_one_that_is_not_spawned(run: RunDir) -> None:
    fork_server, log = ForkServer(run), run.logs / "log"
    waiting = ["rollout", str(run.root), "--claim-dir", "w", "--name", "rollout-7"]
    began = time.monotonic()
    not_spawned = spawn(fork_server, log, *waiting)
    not_spawned.send_signal(signal.SIGTERM)
    signalled = time.monotonic()
    assert not_spawned.wait(600) in (-signal.SIGTERM, Exit.STOPPED), "before or after the role listens"
    assert signalled - began < time.monotonic() - signalled, "it takes seconds to import torch, which were waited for"
    fork_server.give_up()
    not_spawned = spawn(fork_server, log, *waiting)
    not_spawned.kill()
    assert not_spawned.wait(60) == -signal.SIGKILL


def test_it_ends_without_a_word_when_its_supervisor_does(run: RunDir, tmp_path: Path) -> None:
    alone = ForkServer(run)
    assert spawn(alone, tmp_path / "log", "--help").wait(120) == 0
    said = (tmp_path / "log").read_text()
    assert alone._socket is not None and alone._process is not None
    alone._socket.close()
    assert alone._process.wait(60) == 0
    assert (tmp_path / "log").read_text() == said


def test_what_is_imported_later_comes_from_the_runs_copy_of_the_code(run: RunDir) -> None:
    code = run.snapshot / "code"
    program = (
        "import sys; from pathlib import Path; from relax_hpc.supervise import fork_server;"
        "fork_server._import_from(Path(sys.argv[1])); import relax_hpc.files.watch as watch;"
        "print(fork_server.__file__, watch.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(code)], capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert after == str(code / "relax_hpc/files/watch.py") and not before.startswith(str(code))
