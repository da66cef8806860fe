"""The lease: one holder, dead ones are taken over, whatever a superseded one does fails."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import publish, read_json, replace, to_json, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.supervise import lease as lease_module
from relax_hpc.supervise.lease import Holder, Lease, acquire, holder
from tests.runs import wait_for
from tools.faults.calls import inject

FORK = multiprocessing.get_context("fork")
HOLD = """
import sys, time
from relax_hpc.supervise.lease import acquire
from relax_hpc.files.run_dir import RunDir
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
        publish(run.root / "late", b"", commit_dir=incarnation)
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
    old.renewed = float("-inf")
    assert not old.renew(), "it writes, and is answered that there is no such file"
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


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for takes seconds, not a minute."""
    for name, seconds in {"SILENT_S": 1.0, "OLD_S": 0.5, "GLANCE_S": 0.5, "RENEW_S": 0.05, "LOOK_S": 0.01}.items():
        monkeypatch.setattr(lease_module, name, seconds)


@contextmanager
def renewed(lease: Lease, clock_off_s: float) -> Iterator[None]:
    """The lease's holder works on a host whose clock is not ours."""
    path, end = lease.folder / "holder.json", threading.Event()

    def renew() -> None:
        while not end.wait(0.05):
            stamp = time.time() + clock_off_s
            os.utime(path, (stamp, stamp))

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("clock_off_s", [0.0, -3600.0, 3600.0])
def test_a_holder_on_another_host_lives_as_long_as_it_is_seen_to_renew_whatever_the_clocks_say(
    run: RunDir, soon: None, clock_off_s: float
) -> None:
    lease = acquire(run)
    pretend(lease, host="elsewhere", pid=2**22 + 1)
    stamp = time.time() + clock_off_s
    os.utime(lease.folder / "holder.json", (stamp, stamp))
    with renewed(lease, clock_off_s):
        assert holder(run, glance=True) is not None
        with pytest.raises(RunError, match="on elsewhere"):
            acquire(run)
    assert acquire(run).number == 2, "nobody renews it any more"


def test_a_single_renewal_is_seen_though_stat_answers_from_a_cache(
    run: RunDir, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = acquire(run)
    pretend(lease, host="elsewhere")
    path, sleep, stat = lease.folder / "holder.json", time.sleep, os.stat
    cached = stat(path)

    def renewing(seconds: float) -> None:
        monkeypatch.setattr(time, "sleep", sleep)
        os.utime(path)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", renewing)
    monkeypatch.setattr(os, "stat", lambda name, **more: cached if name == path else stat(name, **more))
    with pytest.raises(RunError, match="on elsewhere"):
        acquire(run)


def test_a_lease_is_renewed_while_the_clock_is_set(run: RunDir, soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = acquire(run)
    holder_file, real = lease.folder / "holder.json", time.time
    for off_s in (-3600.0, 7200.0):
        monkeypatch.setattr(time, "time", lambda off_s=off_s: real() + off_s)
        os.utime(holder_file, (0, 0))
        wait_for(lambda: lease.renew() and holder_file.stat().st_mtime > 0)


def test_a_silence_is_measured_by_our_own_clock(run: RunDir, soon: None) -> None:
    lease, watch = acquire(run), Holder(run)
    assert watch.silent_for() == 0.0
    wait_for(lambda: watch.silent_for() > 0.05)
    os.utime(lease.folder / "holder.json", (5e9, 5e9))
    assert watch.silent_for() == 0.0
    lease.release()
    assert watch.silent_for() == 0.0
    wait_for(lambda: watch.silent_for() > 0.05)


def _killed_at(root: Path, number: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        faults = inject(patch, root)
        faults.rule = lambda n, call, path: "kill" if n == number else None
        lease = acquire(RunDir(root))
        lease.new_incarnation()
    os._exit(0)


def test_whoever_is_killed_while_it_takes_the_lease_is_followed_at_once(run: RunDir) -> None:
    codes = list[int | None]()
    while not codes or codes[-1] != 0:
        here = RunDir(run.root / str(len(codes)))
        here.lease.mkdir(parents=True)
        pretend(acquire(here), pid=2**22 + 1)
        process = FORK.Process(target=_killed_at, args=(here.root, len(codes) + 1))
        process.start()
        process.join()
        codes.append(process.exitcode)
        lease = acquire(here)
        assert holder(here) is not None and lease.new_incarnation().is_dir()
        assert not [name for name in os.listdir(here.lease) if name.startswith(".")]
    assert len(codes) > 15 and set(codes[:-1]) == {-signal.SIGKILL}


@pytest.mark.parametrize(("call", "error"), [("rename", errno.EIO), ("rename", errno.ENOENT), ("mkdir", errno.EEXIST)])
def test_an_answer_that_is_lost_is_no_failure(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    """Carried out, and answered with an error: as when a client asks again for what was done already."""
    pretend(acquire(run), pid=2**22 + 1)
    faults = inject(monkeypatch, run.lease / ("000002" if call == "mkdir" else ""))
    faults.error = error
    faults.rule = lambda number, name, path: "lost" if name == call else None
    lease = acquire(run)
    incarnation = lease.new_incarnation()
    assert faults.hit and lease.number == 2 and incarnation.is_dir()
    second = lease.new_incarnation()
    assert second.is_dir() and not incarnation.is_dir()
    replace(run.root / "mine", b"x", commit_dir=second)
    lease.release()
    assert holder(run) is None and faults.hit


def test_who_holds_a_folder_of_a_superseded_one_open_can_commit_nothing_through_it(run: RunDir) -> None:
    """As a client does that keeps in mind where a path leads to."""
    lease = acquire(run)
    handle = os.open(lease.new_incarnation(), os.O_RDONLY)
    write_file(run.root / "what", b"")
    os.link(run.root / "what", "before", dst_dir_fd=handle)
    pretend(lease, pid=2**22 + 1)
    acquire(run)
    with pytest.raises(FileNotFoundError):
        os.link(run.root / "what", "late", dst_dir_fd=handle)
    os.close(handle)


def test_who_holds_the_folder_of_a_superseded_lease_open_can_neither_start_nor_commit_anything_through_it(
    run: RunDir,
) -> None:
    """A supervisor that was stopped for a minute: its client knows its lease's folder, and goes on with it."""
    lease = acquire(run)
    lease.new_incarnation()
    handle = os.open(lease.folder, os.O_RDONLY)
    pretend(lease, pid=2**22 + 1)
    new = acquire(run)
    with pytest.raises(FileNotFoundError):
        os.mkdir("i000002", dir_fd=handle)
    with pytest.raises(FileNotFoundError):
        os.open("outcome", os.O_CREAT | os.O_WRONLY, dir_fd=handle)
    with pytest.raises(FileNotFoundError):
        os.utime("holder.json", dir_fd=handle)
    os.close(handle)
    assert new.number == 2 and new.new_incarnation().name == "i000002"


def test_names_that_are_nobodys_are_left_alone(run: RunDir) -> None:
    lease = acquire(run)
    lease.new_incarnation()
    for path in (run.lease / "000001.bak", run.lease / "notes.txt", run.lease / "9", lease.folder / "i_am_new"):
        path.write_text("")
    (run.lease / "000009x").mkdir()
    (lease.folder / "i00001.tmp").mkdir()
    before = set(os.listdir(run.lease))
    assert lease.new_incarnation().name == "i000002"
    pretend(lease, pid=2**22 + 1)
    assert holder(run) is None and Holder(run).silent_for() == 0
    new = acquire(run)
    assert new.number == 2 and new.new_incarnation().name == "i000003"
    assert before - {"000001"} <= set(os.listdir(run.lease))
    for damaged in (b"", b"{", b"[]"):
        (new.folder / "holder.json").write_bytes(damaged)
        assert holder(run, glance=True) is not None, "who it is cannot be read; that it lives can be seen"


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
        answers = [results.get(timeout=600) for _ in processes]
        for process in processes:
            process.kill()
            process.join(30)
        kinds = Counter(type(a).__name__ for a in answers)
        assert kinds == {"int": 1, "str": 7}, answers
        assert all("is held by pid" in a for a in answers if isinstance(a, str)), "each is told who was faster"


@pytest.mark.parametrize("released", [False, True])
def test_one_that_is_overtaken_between_looking_and_taking_fails(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, released: bool
) -> None:
    acquire(run).release()
    appears = lease_module._appears  # called between the two
    faster: list[Lease] = []

    def overtaken(*arguments: Any) -> bool:
        monkeypatch.setattr(lease_module, "_appears", appears)
        faster.append(acquire(run))
        if released:
            faster[0].release()
        return appears(*arguments)

    monkeypatch.setattr(lease_module, "_appears", overtaken)
    with pytest.raises(
        RunError, match="given up by another supervisor" if released else f"is held by pid {os.getpid()}"
    ):
        acquire(run)
    assert faster[0].renew() is not released
    assert (holder(run) is None) is released
    faster[0].release()
    assert acquire(run).number == 3


def test_an_incarnations_number_is_on_disk_before_its_folder_is_removed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the number is given again after a loss of power."""
    first = acquire(run)
    first.new_incarnation()
    first.release()
    assert sorted(os.listdir(run.lease)) == ["000001.gone", "i000001.gone"]
    done = list[str]()
    held = acquire(run)
    held.new_incarnation()
    sync, remove = lease_module.sync_folder, lease_module.shutil.rmtree
    monkeypatch.setattr(lease_module, "sync_folder", lambda folder: (done.append(f"sync {folder}"), sync(folder)))
    monkeypatch.setattr(
        lease_module.shutil, "rmtree", lambda path, **about: (done.append(f"remove {path}"), remove(path, **about))
    )
    held.release()
    assert done[0] == f"sync {run.lease}" and done[1].startswith(f"remove {run.lease}/000002.") and len(done) == 2
    assert sorted(os.listdir(run.lease)) == ["000001.gone", "000002.gone", "i000001.gone", "i000002.gone"]
