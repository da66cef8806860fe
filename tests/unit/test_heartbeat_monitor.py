"""Who counts as silent: judged by changes seen on our own clock, whatever is done to the time of day."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.tables.run import Supervision
from relax_hpc.supervise.processes import LocalProcesses
from relax_hpc.supervise.restarts import RestartPolicy
from relax_hpc.telemetry import Telemetry, read_heartbeat

LIMITS = Supervision(hang_s=120.0, start_s=600.0)


class Runs:
    """A process that runs."""

    def poll(self) -> None: ...


class Clocks:
    """Both clocks of this machine, to be moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed, self.day = 1000.0, 1.7e9
        monkeypatch.setattr(time, "monotonic", lambda: self.passed)
        monkeypatch.setattr(time, "time", lambda: self.day)

    def after(self, seconds: float, look: Callable[[], Any]) -> Any:
        """What `look` says when so much time has passed; it was called every 3 s."""
        end = self.passed + seconds
        while self.passed < end:
            self.passed, self.day = self.passed + 3, self.day + 3
            found = look()
        return found


@pytest.fixture
def worker(tmp_path: Path) -> LocalProcesses:
    return working(tmp_path)


def working(folder: Path, limits: Supervision = LIMITS) -> LocalProcesses:
    """A worker that runs."""
    run = RunDir(folder)
    run.create()
    group = LocalProcesses(run, limits, "rollout", "rollout-0", ["rollout-0"], None)  # type: ignore[arg-type]
    group.processes.append(Runs())  # type: ignore[arg-type]
    return group


def silent(worker: LocalProcesses) -> float | None:
    ended = worker.poll()
    return float(ended.reason.removeprefix("rollout-0: no heartbeat for ").removesuffix(" s")) if ended else None


def test_setting_the_clock_makes_nobody_silent_and_nobody_heard(
    worker: LocalProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks(monkeypatch)
    voice, look = Telemetry(worker.run, "rollout-0", 0), lambda: silent(worker)
    voice.heartbeat("idle")
    assert look() is None
    for jump_s in (7200.0, -10800.0):
        clocks.day += jump_s
        assert clocks.after(60, look) is None
        before = read_heartbeat(worker.run, "rollout-0")
        voice.heartbeat("idle")
        assert read_heartbeat(worker.run, "rollout-0") != before, "it says that it lives whatever the time of day"
        assert clocks.after(60, look) is None
    assert clocks.after(54, look) is None
    clocks.day -= 7200
    assert clocks.after(12, look) == 123


def test_before_its_first_word_a_role_has_the_time_of_a_start(
    worker: LocalProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks(monkeypatch)
    Telemetry(worker.run, "rollout-0", attempt=0).heartbeat("idle")
    worker.attempt = 1
    look = lambda: silent(worker)
    assert look() is None and clocks.after(600, look) is None and clocks.after(3, look) == 603


def test_while_a_namesake_of_before_speaks_nothing_is_said_of_ours(
    worker: LocalProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks(monkeypatch)
    namesake = Telemetry(worker.run, "rollout-0", attempt=0)
    worker.attempt = 1
    for _ in range(50):
        namesake.heartbeat("idle")
        assert clocks.after(30, lambda: silent(worker)) is None


def test_who_looks_rarely_finds_the_silent_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hang_s / 40 between two looks is much for a recipe with a large hang_s."""
    clocks, worker = Clocks(monkeypatch), working(tmp_path, Supervision(hang_s=1200.0))
    Telemetry(worker.run, "rollout-0", 0).heartbeat("idle")
    found = list[float | None]()
    for _ in range(45):
        found.append(silent(worker))
        clocks.passed += 30
    assert found[:41] == [None] * 41 and found[41] == 1230


def test_the_time_for_which_we_stood_still_is_nobodys_silence(
    worker: LocalProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped, or waiting for a file server: others could have spoken, and we could not have heard it."""
    clocks = Clocks(monkeypatch)
    Telemetry(worker.run, "rollout-0", 0).heartbeat("idle")
    look = lambda: silent(worker)
    assert look() is None and clocks.after(60, look) is None
    clocks.passed += 1000
    assert look() is None and clocks.after(60, look) is None and clocks.after(3, look) == 123


def test_a_pause_before_the_next_start_is_not_changed_with_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, restart_policy = Clocks(monkeypatch), RestartPolicy(Supervision(backoff_s=10.0))
    assert restart_policy.failed(None) and restart_policy.failed(None)
    clocks.day -= 3600
    assert clocks.passed < restart_policy.not_before <= clocks.passed + 20
