"""Telemetry: torn lines, orphans, a heartbeat that is a whole file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relax_hpc.files.run_dir import RunDir
from relax_hpc.telemetry import Orphaned, Telemetry, read_heartbeat, read_metrics


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    return run


def test_a_line_that_a_kill_cut_spoils_only_itself(run: RunDir) -> None:
    path = run.metrics / "trainer-0.jsonl"
    Telemetry(run, "trainer-0", 0).metrics("test", step=1)
    path.write_bytes(path.read_bytes() + b'{"step": 2, "rew')
    records, offset = read_metrics(path)
    assert [r["step"] for r in records] == [1]
    after = Telemetry(run, "trainer-0", 1)
    after.metrics("test", step=3)
    after.metrics("test", step=4)
    more, end = read_metrics(path, offset)
    assert [r["step"] for r in more] == [3, 4] and end == path.stat().st_size
    assert [r["step"] for r in read_metrics(path)[0]] == [1, 3, 4]


def test_lines_are_strict_json_and_name_what_was_not_finite(run: RunDir) -> None:
    nan, inf = float("nan"), float("inf")
    Telemetry(run, "x", 0).metrics(
        "step", loss=nan, grad_norm=inf, reward=0.5, shares=[0.5, nan], sources=[{"score": -inf}], pair=(1, 2)
    )
    Telemetry(run, "x", 0).metrics("step", loss=0.1, note="NaN")
    lines = [json.loads(t, parse_constant=pytest.fail) for t in (run.metrics / "x.jsonl").read_text().splitlines()]
    first, second = ({k: v for k, v in line.items() if k not in ("time", "attempt", "kind")} for line in lines)
    assert first == {
        "loss": None, "grad_norm": None, "reward": 0.5, "shares": [0.5, None], "sources": [{"score": None}], "pair": [1, 2],
        "non_finite": ["loss", "grad_norm", "shares", "sources"],
    }  # fmt: skip
    assert second == {"loss": 0.1, "note": "NaN"}


def test_a_line_that_is_half_written_waits(run: RunDir) -> None:
    path = run.metrics / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2')
    records, offset = read_metrics(path)
    assert records == [{"a": 1}]
    path.write_bytes(path.read_bytes() + b"2}\n")
    assert read_metrics(path, offset)[0] == [{"a": 22}]


def test_a_line_that_a_full_disk_cut_spoils_only_itself(run: RunDir) -> None:
    code = (
        "import resource, signal, sys; from relax_hpc.files.run_dir import RunDir; from relax_hpc.telemetry import Telemetry\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); t = Telemetry(RunDir(sys.argv[1]), 'r', 0)\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "t.metrics('test', step=1); resource.setrlimit(resource.RLIMIT_FSIZE, (150, hard)); t.metrics('test', step=2, long='x' * 100)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)); t.metrics('test', step=3); t.metrics('test', step=4)"
    )
    subprocess.run([sys.executable, "-c", code, str(run.root)], check=True)
    assert b"xxx" in (run.metrics / "r.jsonl").read_bytes(), "nothing was cut: the test proves nothing"
    assert [r["step"] for r in read_metrics(run.metrics / "r.jsonl")[0]] == [1, 3, 4]


def test_no_file_is_no_records(run: RunDir) -> None:
    assert read_metrics(run.metrics / "none.jsonl", 5) == ([], 5)
    assert read_heartbeat(run, "none") is None


def test_samples_of_a_step_are_grouped_by_request(run: RunDir) -> None:
    Telemetry(run, "trainer-0", 0).trained(3, 7, ["r000001-000/0", "r000001-001x1/4", "r000001-000/2"])
    (record,), _ = read_metrics(run.metrics / "trainer-0.trained.jsonl")
    assert record == {"step": 3, "incarnation": 7, "samples": {"r000001-000": [0, 2], "r000001-001x1": [4]}}


def test_a_new_state_is_written_at_once_and_progress_stays(run: RunDir) -> None:
    telemetry = Telemetry(run, "rollout-1", 2)
    telemetry.heartbeat("idle", requests=5)
    telemetry.heartbeat("generating")
    heartbeat = read_heartbeat(run, "rollout-1")
    assert heartbeat is not None
    assert (heartbeat["state"], heartbeat["requests"], heartbeat["attempt"], heartbeat["pid"]) == (
        "generating",
        5,
        2,
        os.getpid(),
    )
    assert os.listdir(run.heartbeats) == ["rollout-1.json"]


def test_heartbeats_of_one_state_are_few(run: RunDir) -> None:
    telemetry = Telemetry(run, "r", 0)
    telemetry.heartbeat("idle")
    first = (run.heartbeats / "r.json").stat().st_ino
    for _ in range(1000):
        telemetry.heartbeat("idle")
    assert (run.heartbeats / "r.json").stat().st_ino == first


def test_who_has_nothing_new_to_say_says_it_rarely(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    now, written = 1000.0, []
    for clock in ("time", "monotonic"):
        monkeypatch.setattr(time, clock, lambda: now)
    telemetry = Telemetry(run, "r", 0, quiet_s=5.0)
    for tick in range(120):
        now = 1000.0 + tick / 10
        telemetry.heartbeat("generating", requests=tick // 80)
        heartbeat = read_heartbeat(run, "r")
        assert heartbeat is not None
        if not written or heartbeat["time"] != written[-1]:
            written.append(heartbeat["time"])
    assert written == pytest.approx([1000.0, 1005.0, 1008.0])


def test_a_child_notices_that_its_supervisor_was_killed(run: RunDir) -> None:
    child = (
        "import sys, time; from relax_hpc.files.run_dir import RunDir; from relax_hpc.telemetry import Orphaned, Telemetry\n"
        "t = Telemetry(RunDir(sys.argv[1]), 'child', 0, int(sys.argv[2]))\n"
        "try:\n"
        "    for _ in range(600): t.heartbeat('idle'); time.sleep(0.05)\n"
        "except Orphaned as gone: open(sys.argv[1] + '/gone', 'w').write(str(gone))"
    )
    parent = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}, sys.argv[1], str(os.getpid())]); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent, str(run.root)])
    from tests.runs import wait_for

    wait_for(lambda: read_heartbeat(run, "child"))
    assert not (run.root / "gone").exists()
    process.kill()
    process.wait()
    wait_for(lambda: (run.root / "gone").exists() and (run.root / "gone").read_text())
    assert str(process.pid) in (run.root / "gone").read_text()


def test_another_process_than_its_supervisor_is_none(run: RunDir) -> None:
    Telemetry(run, "r", 0, os.getppid()).heartbeat("idle")
    with pytest.raises(Orphaned):
        Telemetry(run, "r", 0, 1 if os.getppid() != 1 else 2).heartbeat("idle")


def test_a_heartbeat_that_cannot_be_written_harms_nobody(run: RunDir, tmp_path: Path) -> None:
    run.heartbeats.rmdir()
    telemetry = Telemetry(run, "r", 0)
    telemetry.heartbeat("idle")
    run.heartbeats.mkdir()
    telemetry.heartbeat("working")
    heartbeat = read_heartbeat(run, "r")
    assert heartbeat is not None and heartbeat["state"] == "working"
