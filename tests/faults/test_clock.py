"""Clocks that jump in the middle of a run: nothing is lost, nobody is killed, the end has the same bits."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.files.run_dir import RunDir
from relax_hpc.telemetry import read_heartbeat, read_metrics
from tests.runs import STRONG, audited, command, outcome, relax_hpc, step_now, wait_for, write_recipe
from tools.bench.bits import same_bits
from tools.faults.build import compiler
from tools.faults.clock import Clock

HOUR_S = 3600
TELL = "import time, datetime\nprint(time.time(), datetime.datetime.now().timestamp(), time.monotonic())"

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler (Debian: gcc libc6-dev)")


@pytest.mark.quick
def test_a_moved_clock_moves_the_time_of_day_alone(tmp_path: Path) -> None:
    clock = Clock(tmp_path)
    for moved_s in (-HOUR_S, 2 * HOUR_S, 0):
        clock.move(moved_s)
        told = subprocess.check_output([sys.executable, "-c", TELL], env=clock.environment(), text=True)
        by_time, by_datetime, monotonic = map(float, told.split())
        assert by_time == pytest.approx(time.time() + moved_s, abs=60)
        assert by_datetime == pytest.approx(by_time, abs=1) and monotonic == pytest.approx(time.monotonic(), abs=60)


def renewed_at(run: RunDir) -> int:
    return next(run.lease.glob("??????/holder.json")).stat().st_mtime_ns


def test_a_clock_that_jumps_back_and_forward_in_mid_run_changes_nothing(tmp_path: Path) -> None:
    folder, clock = tmp_path / "moved", Clock(tmp_path)
    folder.mkdir()
    sets = ("--set", "async.max_staleness=0", "--set", "run.checkpoint_every=10")
    recipe = write_recipe(folder, STRONG)
    line = command("run", recipe, *sets, "--set", "run.steps=100000")
    process = subprocess.Popen(line, env=clock.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = RunDir(folder / "small")
    try:
        wait_for(lambda: run.exists and step_now(run) >= 5)
        for moved_s in (-HOUR_S, 2 * HOUR_S):
            clock.move(moved_s)
            goes_on(run, moved_s)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
    ended = outcome(run)
    assert ended["outcome"] == "stopped" and ended["step"] > 8
    nobody_was_lost(run)
    audited(run)
    calm = tmp_path / "calm"
    calm.mkdir()
    relax_hpc("run", write_recipe(calm, STRONG), *sets, "--set", f"run.steps={ended['step']}")
    assert same_bits(run, RunDir(calm / "small"), ended["step"])


def goes_on(run: RunDir, moved_s: int) -> None:
    """Wait until the lease was renewed, steps were made, and each role has said so by the moved clock."""
    step, before = step_now(run), renewed_at(run)
    wait_for(lambda: renewed_at(run) != before and step_now(run) > step)
    for role in ("trainer-0", "rollout-0"):
        wait_for(lambda role=role: abs(said_at(run, role) - time.time() - moved_s) < HOUR_S / 2)  # type: ignore[misc]


def said_at(run: RunDir, role: str) -> float:
    return float((read_heartbeat(run, role) or {}).get("time", 0.0))


def nobody_was_lost(run: RunDir) -> None:
    events: list[dict[str, Any]] = read_metrics(run.metrics / "supervisor.jsonl")[0]
    assert [event for event in events if event["kind"] in ("lost", "io_error")] == []
    assert [event["attempt"] for event in events if event["kind"] == "restart"] == [0, 0]
