"""Real runs on real shared file systems, each host a client of its own: whole, killed, overtaken, measured. `tools/test.sh --shared-filesystems`."""

from __future__ import annotations

import contextlib
import json
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
from relax_hpc.monitor.analysis.audit import audit
from relax_hpc.planning.doctor.file_system import SECOND
from relax_hpc.telemetry import read_metrics
from tests.runs import ROOT, audited, command, pid_of, relax_hpc, start, wait_for
from tools.bench.bits import same_bits
from tools.bench.chaos import Monkey, monkey
from tools.faults.shared import GlusterFS, MooseFS, SharedFileSystem, mounts, processes

STEPS, KILLS = 24, 5
HOSTS = ("trainer", "rollout-0", "rollout-1")
"""The supervisor with the trainer, and two workers, as tools/faults/hosts.py has them."""
EXACT = ("async.max_staleness=0", "rollout.workers=2")


@pytest.fixture(scope="module", params=[GlusterFS, MooseFS], ids=["glusterfs", "moosefs"])
def disk(request: pytest.FixtureRequest) -> Iterator[SharedFileSystem]:
    """One file system with a client for each host, and one for a second host of the supervisor."""
    with request.param() as shared:
        for name in (*HOSTS, "second"):
            shared.mount(name)
        yield shared


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of the same recipe on the local disk, which nothing disturbed."""
    local = monkey(tmp_path_factory.mktemp("local"), "calm", STEPS, 0, [], lambda: None, *EXACT)
    local.drive(0, STEPS)
    return local.run


def on_hosts(disk: SharedFileSystem, name: str, steps: int, roles: list[str], *sets: str) -> Monkey:
    """A run whose supervisor and trainer, and each of whose workers, go through clients of their own."""
    each = monkey(disk.folder / HOSTS[0], name, steps, 7, roles, lambda: None, *EXACT, *sets)
    each.command = [sys.executable, "-m", "tools.faults.hosts", str(disk.folder)]
    return each


def test_a_run_ends_with_the_bits_of_a_local_disk_and_nothing_is_put_aside(
    disk: SharedFileSystem, calm: RunDir
) -> None:
    each = on_hosts(disk, "whole", STEPS, [])
    each.drive(0, STEPS)
    assert audited(each.run).trained == audit(calm.root).trained
    assert [*each.run.quarantine.iterdir()] == []
    events, _ = read_metrics(each.run.metrics / "supervisor.jsonl")
    assert [event for event in events if event["kind"] == "lost"] == [], "no process was lost"
    assert same_bits(each.run, calm, STEPS)


def test_killed_anywhere_it_is_resumed_to_the_same_bits(disk: SharedFileSystem, calm: RunDir) -> None:
    each = on_hosts(disk, "killed", STEPS, ["supervisor", "trainer-0", "rollout-0", "rollout-1"])
    each.drive(KILLS, STEPS)
    assert len(each.kills) == KILLS
    assert audited(each.run).trained == audit(calm.root).trained
    assert same_bits(each.run, calm, STEPS)


AS_SECOND = 'hostname second && mount --bind "$0" "$1" && shift && exec "$@"'
"""On a host of another name, where the path $1 is the client at $0."""


def test_a_stopped_host_that_wakes_up_after_another_took_over_commits_nothing(disk: SharedFileSystem) -> None:
    """First its workers go on and its trainer wakes up, then its supervisor: the trainer finds its data waiting."""
    first = on_hosts(disk, "zombie", 100000, [])
    run, there = first.run, [str(disk.folder / name) for name in ("second", HOSTS[0])]
    first.drive_until(3)
    assert first.process is not None
    supervisor, trainer = psutil.Process(first.process.pid), psutil.Process(pid_of(run, "trainer-0"))
    supervisor.suspend()
    trainer.suspend()
    words = ["unshare", "--mount", "--uts", "sh", "-c", AS_SECOND, *there, *command("run", run.root)]
    with (disk.folder / "second.out").open("wb") as log:
        second = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        before = committed(run)
        wait_for(lambda: committed(run) > before + 3)
        taken_over = committed_by(run)[-1]
        trainer.resume()
        time.sleep(3)
        supervisor.resume()
        assert first.process.wait(120) != 0, "it says that another one has taken over"
        wait_for(lambda: not trainer.is_running())
        now = committed(run)
        wait_for(lambda: committed(run) > now + 3)
        relax_hpc("stop", run.root)
        assert second.wait(120) == 0
    finally:
        for process in (first.process, second):
            end(process)
    incarnations = committed_by(run)
    assert incarnations == sorted(incarnations), "the superseded trainer committed after its successor"
    assert len({*incarnations}) == 2 and incarnations[-1] == taken_over
    audited(run)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a command, with all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [*(own := psutil.Process(process.pid)).children(recursive=True), own]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def committed(run: RunDir) -> int:
    """The last step in the ledger."""
    return max(int(path.stem) for path in run.ledger.rglob("*.json"))


def committed_by(run: RunDir) -> list[int]:
    """The incarnation that committed each step."""
    return [json.loads(path.read_text())["incarnation"] for path in sorted(run.ledger.rglob("*.json"))]


def test_the_doctor_refuses_nothing(disk: SharedFileSystem) -> None:
    here, there = disk.folder / HOSTS[0], disk.folder / "second"
    second = start("doctor", "--file-system", there, "--second")
    try:
        wait_for(lambda: [*there.glob(f"{SECOND}*/opened/file")])
        done = relax_hpc("doctor", "--file-system", here, "--json")
        second.communicate(timeout=60)
    finally:
        second.kill()
    found = json.loads(done.stdout)
    assert [check for check in found if check["verdict"] == "failed"] == []
    assert "visibility after close" in {check["what"] for check in found}, "the second took part"
    for check in found:
        print(type(disk).__name__, check["verdict"], check["what"], check["found"], sep=" | ")


@pytest.mark.parametrize("kind", [GlusterFS, MooseFS])
def test_what_a_killed_process_left_mounted_the_next_start_removes(kind: type[SharedFileSystem]) -> None:
    code = (
        f"import time; from tools.faults.shared import {kind.__name__} as Kind; disk = Kind().__enter__(); "
        "print(disk.mount('a').parent, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        left = Path(owner.stdout.readline().strip())
        assert mounts(left) == [left / "a"]
        servers = processes(left)
        os.kill(owner.pid, signal.SIGKILL)
    assert mounts(left) and len(servers) > 3 and all(server.is_running() for server in servers)
    with kind():
        assert mounts(left) == [] and processes(left) == [] and not left.exists()
