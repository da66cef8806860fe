"""The supervisor's loop, with roles that are scripts: what it says, whom it ends, when it gives up (tests/faults has it over a file system that
fails)."""

from __future__ import annotations

import errno
import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import to_json, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch.create import Opened
from relax_hpc.recipe import dump_recipe, load_recipe
from relax_hpc.recipe.schema import Recipe
from relax_hpc.roles.common.process import Exit, passes, place_of
from relax_hpc.spool.queue import RequestQueue
from relax_hpc.spool.request import Request
from relax_hpc.supervise import io_retry, local, supervisor
from relax_hpc.supervise.fork_server import ForkServer
from relax_hpc.supervise.io_retry import IoRetry, IoTrouble
from relax_hpc.supervise.lease import acquire
from relax_hpc.supervise.local import run_here
from relax_hpc.supervise.processes import LocalProcesses
from relax_hpc.supervise.rollout_workers import RolloutWorker
from relax_hpc.telemetry import Telemetry
from tests.runs import write_recipe
from tools.faults.calls import Faults, inject
from tools.faults.roles import Stage


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_retry, "FIRST_PAUSE_S", 1e-4)
    monkeypatch.setattr(io_retry, "LONGEST_PAUSE_S", 2e-4)
    monkeypatch.setattr(supervisor, "POLL_S", 1e-4)
    monkeypatch.setattr(supervisor, "LEASE_LOOK_S", 1e-3)
    monkeypatch.setattr(local, "clear_node", lambda run, recipe: None)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe(write_recipe(tmp_path), ["supervision.backoff_s=0.0001", "supervision.max_restarts=3"])


def prepared(root: Path, recipe: Recipe) -> RunDir:
    """A run that an earlier supervisor, now dead, began: a claim of its worker is left."""
    run = RunDir(root)
    run.create()
    write_file(run.identity, to_json({"id": root.name, "debug": None, "shards_from": None}))
    write_file(run.recipe, dump_recipe(recipe).encode())
    queue = RequestQueue(run)
    queue.put([Request(f"r000000-00{k}", ((0, k),), 4, k, 0) for k in range(2)])
    queue.open_claim_dir("rollout-0-before")
    assert queue.claim("rollout-0-before", 0) is not None
    return run


def test_trouble_is_said_once_and_ends_the_run_only_when_it_lasts(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said, tries = RunDir(tmp_path), list[str](), 0

    def fails() -> int:
        nonlocal tries
        tries += 1
        if tries < 20:
            raise OSError(errno.EIO, "Input/output error", "there")
        return tries

    retry = IoRetry(run, 60.0, lambda kind, **about: said.append(kind))
    assert retry(fails) == 20 and said == ["io_error", "io_well"]
    tries = -(10**9)
    with pytest.raises(RunError, match=rf"'{tmp_path}' fails for 0 s \(supervision.io_wait_s\).*there.*goes on"):
        IoRetry(run, 0.01, lambda kind, **about: None)(fails)


@pytest.mark.parametrize(
    ("number", "waits"),
    [
        *[(n, True) for n in (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)],
        *[(n, True) for n in (errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EREMOTEIO, errno.ENOLCK)],
        *[(n, False) for n in (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.ENOTEMPTY, errno.EINVAL)],
    ],
    ids=lambda value: errno.errorcode[value] if not isinstance(value, bool) else "",
)
def test_what_passes_and_what_is_an_answer(number: int, waits: bool) -> None:
    assert passes(OSError(number, "x")) is waits


def test_a_superseded_supervisor_is_told_at_once_and_not_after_minutes(tmp_path: Path, recipe: Recipe) -> None:
    run = prepared(tmp_path / "run", recipe)

    class Overtaken(Stage):
        def train(self, voice: Telemetry, folder: Path) -> int:
            os.rename(folder.parent, folder.parent.with_name("000001.x.over"))
            return -signal.SIGKILL

    stage = Overtaken(run, Faults(Path("/nowhere")))
    with pytest.raises(RunError, match="another supervisor has taken over"):
        run_here(Opened(run, recipe, stage), Console(file=io.StringIO()))
    assert not run.outcome.exists()


@pytest.mark.parametrize(
    ("errors", "failures"),
    [
        (["ValueError: betas", "ValueError: betas"], 2),
        (["ValueError: betas", "KeyError: 'x'", "ValueError: betas", "KeyError: 'x'"], 4),
        (["", "", "", ""], 4),
    ],
    ids=["the same twice", "different ones", "killed"],
)
def test_the_same_error_twice_at_the_same_place_is_one_that_a_person_must_mend(
    tmp_path: Path, recipe: Recipe, errors: list[str], failures: int
) -> None:
    run = prepared(tmp_path / "run", recipe)

    class Broken(Stage):
        def train(self, voice: Telemetry, folder: Path) -> int:
            error = errors[voice.attempt]
            if error:
                voice.heartbeat("crashed", step=0, error=error, place="optim.py:7")
                return Exit.CRASHED
            return -signal.SIGKILL

    stage = Broken(run, Faults(Path("/nowhere")))
    outcome = run_here(Opened(run, recipe, stage), Console(file=io.StringIO()))
    assert outcome["outcome"] == "failed" and sum(name == "trainer-0" for name, _ in stage.spawned) == failures
    assert outcome["fatal"] is (failures == 2)
    if failures == 2:
        assert "trainer cannot begin: twice the same error, ValueError: betas (optim.py:7)" in outcome["reason"]


def test_an_error_of_any_rank_counts(tmp_path: Path, recipe: Recipe) -> None:
    """Rank 0 knows only that its peer left, each time in other words."""
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"processes": 2})})
    run = prepared(tmp_path / "run", recipe)

    class Broken(Stage):
        def train(self, voice: Telemetry, folder: Path) -> int:
            error = "SafetensorError: truncated" if voice.role == "trainer-1" else f"peer {voice.attempt} left"
            voice.heartbeat("crashed", error=error, place="load.py:7")
            return Exit.CRASHED

    stage = Broken(run, Faults(Path("/nowhere")))
    outcome = run_here(Opened(run, recipe, stage), Console(file=io.StringIO()))
    assert outcome["outcome"] == "failed" and outcome["fatal"] is True
    assert "twice the same error, SafetensorError: truncated (load.py:7) on " in outcome["reason"]
    assert stage.spawned.count(("trainer-1", 1)) == 1 and ("trainer-1", 2) not in stage.spawned


def test_what_any_rank_cannot_go_on_for_ends_the_run(tmp_path: Path, recipe: Recipe) -> None:
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update={"processes": 2})})
    run = prepared(tmp_path / "run", recipe)

    class Broken(Stage):
        def train(self, voice: Telemetry, folder: Path) -> int | None:
            return Exit.FATAL if voice.role == "trainer-1" else None  # rank 0 waits for it

    stage = Broken(run, Faults(Path("/nowhere")))
    outcome = run_here(Opened(run, recipe, stage), Console(file=io.StringIO()))
    assert outcome["outcome"] == "failed" and outcome["fatal"] is True and "trainer-1.0000.log" in outcome["reason"]
    assert ("trainer-1", 1) not in stage.spawned


def test_what_a_worker_did_before_is_no_progress_of_one_that_dies_before_its_first_heartbeat(
    tmp_path: Path, recipe: Recipe
) -> None:
    run = prepared(tmp_path / "run", recipe)

    class Dying(Stage):
        def train(self, voice: Telemetry, folder: Path) -> int | None:
            return Exit.DONE if ("rollout-0", 8) in self.spawned else None

        def generate(self, voice: Telemetry, claim_dir: str) -> int:
            if claim_dir.endswith("0000"):
                voice.heartbeat("idle", requests=5)
            return -signal.SIGKILL

    outcome = run_here(Opened(run, recipe, Dying(run, Faults(Path("/nowhere")))), Console(file=io.StringIO()))
    assert outcome["outcome"] == "failed" and outcome["reason"].startswith(
        "rollout-0 was lost 4 times without progress"
    )


def test_an_error_has_a_place_unless_it_is_one_of_the_moment() -> None:
    def place(error: type[Exception], *arguments: Any) -> str:
        with pytest.raises(error) as caught:
            io_retry.IoRetry(RunDir("/nowhere"), 0.0, lambda kind: None)(raising(error(*arguments)))
        return place_of(caught.value)

    def raising(error: Exception) -> Callable[[], None]:
        def act() -> None:
            raise error

        return act

    assert place(ValueError, "x").startswith("io_retry.py:") and place(FileNotFoundError, errno.ENOENT, "x")
    assert place(ConnectionResetError, "peer") == place(type("DistNetworkError", (Exception,), {}), "x") == ""
    assert place_of(OSError(errno.EIO, "x")) == ""
    assert (
        place(RuntimeError, "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer")
        == ""
    )
    assert place(RuntimeError, "size mismatch")


def test_a_stop_that_comes_while_a_lost_trainer_waits_for_its_next_start_is_no_start(
    tmp_path: Path, recipe: Recipe
) -> None:
    run = prepared(tmp_path / "run", recipe)

    class Stopped(Stage):
        def train(self, voice: Telemetry, folder: Path) -> int | None:
            signal.raise_signal(signal.SIGTERM)
            return super().train(voice, folder)

    stage = Stopped(run, Faults(Path("/nowhere")))
    outcome = run_here(Opened(run, recipe, stage), Console(file=io.StringIO()))
    assert (outcome["outcome"], outcome["step"]) == ("stopped", 3)
    assert ("trainer-0", 1) not in stage.spawned


def test_workers_that_cannot_be_ended_leave_no_trainer_behind(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ended, stop = prepared(tmp_path / "run", recipe), list[str](), LocalProcesses.stop

    def fails(*_: Any) -> None:
        raise IoTrouble("the file system fails")

    monkeypatch.setattr(RolloutWorker, "end", fails)
    monkeypatch.setattr(LocalProcesses, "stop", lambda self, grace_s: (ended.append(self.name), stop(self, grace_s)))
    with pytest.raises(IoTrouble):
        run_here(Opened(run, recipe, Stage(run, Faults(Path("/nowhere")))), Console(file=io.StringIO()))
    assert [name for name in ended if name == "trainer"] == ["trainer", "trainer"], (
        "once when they were lost, once at the end"
    )


def test_what_is_swept_is_old_by_the_clock_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    young, old = run.heartbeats / ".young", run.heartbeats / ".old"
    young.touch()
    old.touch()
    os.utime(old, (0, old.stat().st_mtime - 400))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    supervisor.sweep(run, older_than_s=300)
    assert os.listdir(run.heartbeats) == [".young"]
    supervisor.sweep(run)
    assert os.listdir(run.heartbeats) == []


def test_a_picture_that_fails_ends_nothing(tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("a heartbeat of another version")

    monkeypatch.setattr("relax_hpc.monitor.live_view.Status.refresh", fails)
    for terminal in (True, False):
        run = prepared(tmp_path / f"terminal-{terminal}", recipe)
        console = Console(file=io.StringIO(), force_terminal=terminal)
        outcome = run_here(Opened(run, recipe, Stage(run, Faults(Path("/nowhere")))), console)
        assert outcome["outcome"] == "done"


def test_a_log_that_cannot_be_opened_leaves_no_role_that_is_waited_for(tmp_path: Path, recipe: Recipe) -> None:
    run = RunDir(tmp_path / "run")
    with ForkServer(run) as fork_server, pytest.raises(FileNotFoundError):
        fork_server.spawn(["trainer"], run.logs / "x.log")
    assert fork_server._not_spawned == [] and fork_server._process is None


def test_the_lease_is_ours_after_the_file_system_failed_while_it_was_taken(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    with monkeypatch.context() as patch:
        faults = inject(patch, run.root)
        faults.error = errno.EIO
        appeared = run.lease / "000001"
        faults.rule = lambda n, call, path: "before" if call == "listdir" and appeared.is_dir() else None
        with pytest.raises(OSError, match="Input/output"):
            acquire(run)
    assert acquire(run).number == 2
