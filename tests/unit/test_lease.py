"""The lease: one holder, dead ones are taken over, whatever a superseded one does fails."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.launch import lease as lease_module
from relax_hpc.launch.lease import SILENT_S, Lease, acquire, holder
from relax_hpc.run_dir import RunDir, RunError, publish, read_json, replace, to_json

FORK = multiprocessing.get_context("fork")
HOLD = """
import sys, time
from relax_hpc.launch.lease import acquire
from relax_hpc.run_dir import RunDir
lease = acquire(RunDir(sys.argv[1]))
print(lease.new_incarnation(), flush=True)
time.sleep(600)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def hold(run: RunDir) -> tuple[subprocess.Popen[str], Path]:
    """Another process with the lease; its incarnation."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run.root)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def pretend(lease: Lease, **changes: Any) -> None:
    path = lease.folder / "holder.json"
    replace(path, to_json({**read_json(path), **changes}))


def test_a_second_one_is_told_who_holds_it(run: RunDir) -> None:
    process, _ = hold(run)
    try:
        with pytest.raises(
            RunError, match=rf"{run.root}.*pid {process.pid} on {os.uname().nodename} since.*relax-hpc stop"
        ):
            acquire(run)
        about = holder(run)
        assert about is not None and about["pid"] == process.pid
    finally:
        process.kill()
        process.wait()


def test_a_killed_holder_is_taken_over_at_once_and_can_commit_nothing(run: RunDir) -> None:
    process, incarnation = hold(run)
    process.send_signal(signal.SIGKILL)
    time.sleep(0.2)  # killed, and its parent (we) has not waited for it
    assert holder(run) is None
    lease = acquire(run)
    process.wait()
    assert lease.number == 2 and not incarnation.exists()
    with pytest.raises(FileNotFoundError):
        publish(run.root / "late", b"", via=incarnation)
    assert not (run.root / "late").exists()


def test_a_superseded_holder_notices_and_can_do_nothing(run: RunDir) -> None:
    old = acquire(run)
    incarnations = [old.new_incarnation(), old.new_incarnation()]
    (incarnations[1] / "half").mkdir()
    (incarnations[1] / "half" / "weights").write_bytes(b"x")
    assert old.renew()
    pretend(old, pid=2**22 + 1)
    new = acquire(run)
    assert not old.renew() and new.renew()
    with pytest.raises(FileNotFoundError):
        old.new_incarnation()
    new.commit(run.outcome, b"the new one's")
    with pytest.raises(RunError, match="another supervisor has taken over"):
        old.commit(run.outcome, b"late")
    assert run.outcome.read_bytes() == b"the new one's"
    assert not any(i.exists() for i in incarnations)
    assert not [p for p in run.lease.rglob("weights")], "what it left half done is removed"
    old.release()
    assert new.renew() and holder(run) is not None


def test_each_incarnation_fences_the_one_before(run: RunDir) -> None:
    lease = acquire(run)
    first = lease.new_incarnation()
    second = lease.new_incarnation()
    assert second.exists() and not first.exists()


def test_numbers_are_never_given_twice(run: RunDir) -> None:
    leases, incarnations = [], []
    for _ in range(4):
        lease = acquire(run)
        leases.append(lease.number)
        incarnations += [lease.new_incarnation().name for _ in range(3)]
        lease.release()
    assert leases == [1, 2, 3, 4]
    assert incarnations == [f"i{n:06d}" for n in range(1, 13)]


def test_released_is_free_and_released_twice_harms_nobody(run: RunDir) -> None:
    first = acquire(run)
    first.release()
    assert holder(run) is None and not first.renew()
    second = acquire(run)
    first.release()
    assert second.renew()


def test_another_process_with_the_same_pid_is_not_the_holder(run: RunDir) -> None:
    lease = acquire(run)
    pretend(lease, started=read_json(lease.folder / "holder.json")["started"] - 100)
    assert holder(run) is None
    assert acquire(run).number == 2


def test_setting_the_clock_kills_no_holder(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says starts as ticks since boot; the time of boot moves when the clock is set."""
    import psutil

    acquire(run)
    assert holder(run) is not None
    boot, created = psutil.boot_time, psutil.Process.create_time
    monkeypatch.setattr(psutil, "boot_time", lambda: boot() + 3600)
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: created(self) + 3600)
    assert holder(run) is not None


def test_a_holder_on_another_host_lives_as_long_as_it_renews(run: RunDir) -> None:
    lease = acquire(run)
    pretend(lease, host="elsewhere", pid=2**22 + 1)
    with pytest.raises(RunError, match="on elsewhere"):
        acquire(run)
    old = time.time() - SILENT_S - 1
    os.utime(lease.folder / "holder.json", (old, old))
    assert holder(run) is None
    lease.renewed = 0
    assert lease.renew()
    assert holder(run) is not None
    os.utime(lease.folder / "holder.json", (old, old))
    assert acquire(run).number == 2


def test_one_that_died_before_it_said_who_it_is_is_waited_for_a_while(run: RunDir) -> None:
    folder = run.lease / "000001"
    folder.mkdir()
    with pytest.raises(RunError, match="just starting"):
        acquire(run)
    old = time.time() - SILENT_S - 1
    os.utime(folder, (old, old))
    assert acquire(run).number == 2


def test_one_that_slept_while_it_took_the_lease_is_told(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleepy(path: Path, data: bytes) -> None:
        path.parent.rename(path.parent.with_name("000001.x.over"))
        replace(path, data)

    monkeypatch.setattr(lease_module, "replace", sleepy)
    with pytest.raises(RunError, match="another supervisor"):
        acquire(run)


def test_looking_while_a_lease_is_given_up_is_no_error(run: RunDir) -> None:
    process = FORK.Process(target=_take_and_release, args=(run.root,))
    process.start()
    while process.is_alive():
        holder(run)
    process.join()
    assert process.exitcode == 0


def _take_and_release(root: Path) -> None:
    for _ in range(150):
        lease = acquire(RunDir(root))
        lease.new_incarnation()
        lease.release()


def _race(root: Path, gate: Any, results: Any) -> None:
    gate.wait()
    try:
        lease = acquire(RunDir(root))
    except RunError as error:
        results.put(str(error))
    except BaseException as error:
        results.put(repr(error))
        raise
    else:
        results.put(lease.number)
        time.sleep(2)


@pytest.mark.parametrize("before", ["nobody", "dead"])
def test_of_many_that_take_it_at_once_one_gets_it(run: RunDir, before: str) -> None:
    for attempt in range(5):
        here = RunDir(run.root / str(attempt))
        here.create()
        if before == "dead":
            pretend(acquire(here), pid=2**22 + 1)
        gate, results = FORK.Barrier(8), FORK.Queue()
        processes = [FORK.Process(target=_race, args=(here.root, gate, results)) for _ in range(8)]
        for process in processes:
            process.start()
        answers = [results.get(timeout=60) for _ in processes]
        for process in processes:
            process.kill()
            process.join(30)
        kinds = Counter(type(a).__name__ for a in answers)
        assert kinds == {"int": 1, "str": 7}, answers
        assert all("another supervisor" in a or "is held by" in a for a in answers if isinstance(a, str)), answers


@pytest.mark.parametrize("released", [False, True])
def test_one_that_is_overtaken_between_looking_and_taking_fails(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, released: bool
) -> None:
    acquire(run).release()
    empty = lease_module._empty  # called between the two
    faster: list[Lease] = []

    def overtaken(over: Path) -> None:
        monkeypatch.setattr(lease_module, "_empty", empty)
        empty(over)
        faster.append(acquire(run))
        if released:
            faster[0].release()

    monkeypatch.setattr(lease_module, "_empty", overtaken)
    with pytest.raises(RunError, match="another supervisor"):
        acquire(run)
    assert faster[0].renew() is not released
    assert (holder(run) is None) is released
    faster[0].release()
    assert acquire(run).number == 3
