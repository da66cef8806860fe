"""Requests as files: races of real processes, workers that die, workers that are thought dead and are not."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.files import watch
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.files.watch import FolderWatch, backoff
from relax_hpc.monitor.analysis.statuses import GroupStatuses
from relax_hpc.spool.ledger import Dropped, Entry, Taken
from relax_hpc.spool.queue import RequestFile, RequestQueue, publish_shard
from relax_hpc.spool.request import Request, RequestState
from tools.faults.calls import inject

FORK = multiprocessing.get_context("fork")


def request(k: int, version: int = 0, kind: str = "r", batch: int = 0) -> Request:
    return Request(f"{kind}{batch:06d}-{k:03d}", ((0, k),), 4, k, version)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    return run


@pytest.fixture
def queue(run: RunDir) -> RequestQueue:
    queue = RequestQueue(run)
    for worker in ("a", "b"):
        queue.open_claim_dir(worker)
    return queue


def test_a_request_that_is_released_again_may_go_to_the_worker_that_generated_it_before(
    run: RunDir, queue: RequestQueue
) -> None:
    """Its shard was damaged, say, and there is one worker, whose version does not change before the request comes."""
    for _ in range(2):
        queue.put([request(0)])
        claim = queue.claim("a", 0)
        assert claim is not None
        publish_shard(run, claim, b"shard", "a")
        run.shard("r000000-000").unlink()


def claim_all(root: Path, worker: str, all_here: Any, results: Any) -> None:
    queue, mine = RequestQueue(RunDir(root)), []
    queue.open_claim_dir(worker)
    all_here.wait()
    while os.listdir(RunDir(root).open_requests):
        claim = queue.claim(worker, 0)
        if claim is not None:
            assert claim.path.parent.name == worker and claim.request.id == claim.request_file.request_id
            mine.append(claim.request.id)
    results.put(mine)


def test_processes_that_race_claim_every_request_once(run: RunDir, queue: RequestQueue) -> None:
    requests = [request(k) for k in range(200)]
    queue.put(requests)
    results, all_here = FORK.Queue(), FORK.Barrier(6)
    processes = [FORK.Process(target=claim_all, args=(run.root, f"w{i}", all_here, results)) for i in range(6)]
    for process in processes:
        process.start()
    claimed = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join(30)
    assert Counter(i for mine in claimed for i in mine) == Counter(o.id for o in requests)
    assert sum(bool(mine) for mine in claimed) > 1, "one process took all: no race"


def test_a_request_is_claimed_whole_evaluations_first_then_in_order(queue: RequestQueue) -> None:
    queue.put([request(1), request(0), request(5, kind="e", batch=9)])
    claims = [queue.claim("a", 3) for _ in range(4)]
    assert [c.request for c in claims if c] == [request(5, kind="e", batch=9), request(0), request(1)]
    assert claims[0] is not None and claims[0].request_file == RequestFile("e000009-005", 0, 0)


def test_older_weights_than_asked_for_claim_nothing(queue: RequestQueue) -> None:
    queue.put([request(0, version=5), request(1, version=4)])
    claim = queue.claim("a", 4)
    assert claim is not None and claim.request.id == "r000000-001"
    assert queue.claim("a", 4) is None
    assert queue.in_progress() == {"r000000-000": 5, "r000000-001": 4}


def test_what_nobody_started_may_be_told_to_start_later(queue: RequestQueue) -> None:
    queue.put([request(0, 1), request(1, 1), request(2, 9)])
    queue.claim("a", 2)
    assert queue.raise_oldest(6)
    assert queue.in_progress() == {"r000000-000": 2, "r000000-001": 6, "r000000-002": 9}
    assert not queue.raise_oldest(6)
    assert queue.claim("b", 5) is None
    claim = queue.claim("b", 6)
    assert claim is not None and claim.request == request(1, 1)


def test_a_dead_workers_claims_are_open_again_with_the_version_they_were_started_with(
    queue: RequestQueue, run: RunDir
) -> None:
    queue.put([request(0), request(1)])
    queue.claim("a", 3)
    queue.claim("a", 4)
    assert sorted(queue.give_back("a", lost=True)) == ["r000000-000", "r000000-001"]
    assert sorted(os.listdir(run.open_requests)) == ["r000000-000.a1.v3", "r000000-001.a1.v4"]
    assert queue.workers() == ["b"]
    assert queue.give_back("a", lost=True) == []
    again = queue.claim("b", 3)
    assert again is not None and again.request_file.attempt == 1
    assert queue.give_back("b", lost=False) == ["r000000-000"]
    assert sorted(os.listdir(run.open_requests)) == ["r000000-000.a1.v3", "r000000-001.a1.v4"]


def test_a_worker_that_is_thought_dead_claims_nothing_more(queue: RequestQueue) -> None:
    zombie = RequestQueue(queue._run)
    queue.put([request(0), request(1)])
    assert zombie.claim("a", 0) is not None
    queue.give_back("a", lost=True)
    with pytest.raises(FileNotFoundError, match="counted as lost"):
        zombie.claim("a", 0)
    assert len(queue.in_progress()) == 2


def test_nothing_stays_with_a_worker_that_claims_while_it_is_given_up(
    queue: RequestQueue, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker claims once more between the last look into its folder and the folder's end."""
    queue.put([request(0), request(1)])
    zombie, rmdir = RequestQueue(run), Path.rmdir
    assert zombie.claim("a", 0) is not None

    def late(folder: Path) -> None:
        monkeypatch.setattr(Path, "rmdir", rmdir)
        assert zombie.claim("a", 0) is not None
        rmdir(folder)

    monkeypatch.setattr(Path, "rmdir", late)
    queue.give_back("a", lost=True)
    assert queue.workers() == ["b"] and len(os.listdir(run.open_requests)) == 2


def test_the_loser_of_a_name_is_quarantined_with_its_reason(queue: RequestQueue, run: RunDir) -> None:
    queue.put([request(0)])
    zombies = queue.claim("a", 0)
    queue.give_back("a", lost=True)
    second = queue.claim("b", 0)
    assert zombies is not None and second is not None
    assert publish_shard(run, zombies, b"zombie was first", "a")
    assert not publish_shard(run, second, b"second", "b")
    assert run.shard("r000000-000").read_bytes() == b"zombie was first"
    assert (run.quarantine / "r000000-000.b.h5").read_bytes() == b"second"
    reason = read_json(run.quarantine / "r000000-000.b.reason.json")
    assert (reason["request"], reason["worker"]) == ("r000000-000", "b") and "published first" in reason["reason"]
    assert queue.in_progress() == {}


def test_a_zombie_that_comes_second_loses_and_harms_nothing(queue: RequestQueue, run: RunDir) -> None:
    queue.put([request(0)])
    zombies = queue.claim("a", 0)
    queue.give_back("a", lost=True)
    second = queue.claim("b", 0)
    assert zombies is not None and second is not None
    assert publish_shard(run, second, b"second", "b")
    assert not publish_shard(run, zombies, b"zombie", "a")
    assert run.shard("r000000-000").read_bytes() == b"second"
    assert (run.quarantine / "r000000-000.a.h5").read_bytes() == b"zombie"


def _publish(root: Path, worker: str, claim: Any, results: Any) -> None:
    results.put(publish_shard(RunDir(root), claim, worker.encode() * 100_000, worker))


def test_of_attempts_that_race_one_wins(queue: RequestQueue, run: RunDir) -> None:
    queue.put([request(0)])
    claim = queue.claim("a", 0)
    results = FORK.Queue()
    processes = [FORK.Process(target=_publish, args=(run.root, f"w{i}", claim, results)) for i in range(5)]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=600) for _ in processes) == [False] * 4 + [True]
    for process in processes:
        process.join(30)
    content = run.shard("r000000-000").read_bytes()
    assert content == content[:2] * 100_000
    assert len(list(run.quarantine.glob("*.h5"))) == len(list(run.quarantine.glob("*.reason.json"))) == 4


def test_withdrawn_is_what_is_still_open(queue: RequestQueue) -> None:
    queue.put([request(0), request(1), request(2)])
    queue.claim("a", 0)
    queue.withdraw(["r000000-000", "r000000-001"])
    assert set(queue.in_progress()) == {"r000000-000", "r000000-002"}


def test_a_request_that_moves_while_it_is_listed_is_seen(queue: RequestQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between any two looks at folders, the request moves on: open, claimed, open again."""
    for first in ("open", "claimed"):
        queue.put([request(0)])
        if first == "claimed":
            queue.claim("a", 0)
        listdir, moves = (
            os.listdir,
            iter([lambda: queue.claim("a", 0), lambda: queue.give_back("a", lost=False)][first == "claimed" :]),
        )

        def moving(path: Any, moves: Any = moves, listdir: Any = listdir) -> list[str]:
            names: list[str] = listdir(path)
            monkeypatch.setattr(os, "listdir", listdir)
            next(moves, lambda: None)()
            monkeypatch.setattr(os, "listdir", moving)
            return names

        monkeypatch.setattr(os, "listdir", moving)
        assert queue.in_progress() == {"r000000-000": 0}
        monkeypatch.setattr(os, "listdir", listdir)
        queue.open_claim_dir("a")
        queue.give_back("a", lost=False)
        queue.open_claim_dir("a")
        queue.withdraw(["r000000-000"])


def test_a_request_that_is_claimed_after_claims_were_listed_is_seen(
    queue: RequestQueue, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays claimed: a look at the open requests that comes last would not find it."""
    queue.put([request(0)])
    listdir, listed = os.listdir, list[str]()

    def claiming(path: Any) -> list[str]:
        if listed and Path(path) == run.open_requests:
            monkeypatch.setattr(os, "listdir", listdir)
            queue.claim("a", 0)
        listed.append(str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", claiming)
    assert queue.in_progress() == {"r000000-000": 0}
    assert len(listed) == 4 and queue.claim("a", 0) is None


def test_a_request_passes_through_the_states_that_its_files_say(queue: RequestQueue, run: RunDir) -> None:
    def states() -> dict[str, RequestState]:
        return queue.states()

    queue.put([request(0), request(1)])
    assert states() == dict.fromkeys(("r000000-000", "r000000-001"), RequestState.OPEN)
    claim = queue.claim("a", 3)
    assert claim is not None and states()["r000000-000"] is RequestState.CLAIMED
    queue.put_back(claim, aborts=1)
    assert states()["r000000-000"] is RequestState.PARTIAL
    assert queue.claim("b", 3) is not None and states()["r000000-000"] is RequestState.CLAIMED
    assert queue.give_back("b", lost=True) and states()["r000000-000"] is RequestState.PARTIAL
    claim = queue.claim("a", 4)
    assert claim is not None and publish_shard(run, claim, b"shard", "a") and states().keys() == {"r000000-001"}
    found = GroupStatuses([Entry(7, 1, 0, (Taken("r000000-001", 0),), {}, (Dropped("r000000-002", "stale", "x"),))])
    at = lambda name: found.of(run.shard(name)).state
    assert at("r000000-000") is RequestState.PUBLISHED and at("r000000-001") is RequestState.TRAINED
    assert at("r000000-002") is RequestState.DROPPED and at("e000000-000") is RequestState.PUBLISHED
    assert found.of(run.quarantine / "r000000-000.a.h5").state is RequestState.QUARANTINED


def test_of_two_attempts_in_generates_the_older_start_counts(queue: RequestQueue, run: RunDir) -> None:
    (run.open_requests / "r000000-000.a1.v7").write_text("{}")
    (run.claimed_requests / "a" / "r000000-000.a0.v9").write_text("{}")
    (run.claimed_requests / "b" / "r000000-000.a0.v4").write_text("{}")
    assert queue.in_progress() == {"r000000-000": 4}


def test_a_request_file_that_a_power_failure_emptied_stops_nobody(queue: RequestQueue, run: RunDir) -> None:
    queue.put([request(0), request(1), request(2)])
    (run.open_requests / "r000000-000.a0.v0").write_bytes(b"")
    claim = queue.claim("a", 0)
    assert claim is not None and claim.request == request(1)
    (run.open_requests / "r000000-009.a0.v0").write_bytes(b'{"id": "o0')
    (run.claimed_requests / "b" / "r000000-008.a0.v0").write_bytes(b"")
    queue.remove_torn()
    assert set(queue.in_progress()) == {"r000000-001", "r000000-002"}


@pytest.mark.parametrize("moves", ["to a new worker", "back from a dead one"])
def test_a_torn_request_that_moves_while_they_are_looked_for_is_removed(
    moves: str, queue: RequestQueue, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it counts as claimed, until its worker sees that it is torn: then it is nowhere, and a step waits for it."""
    name, listdir = "r000000-000.a0.v0", os.listdir
    held, waits = run.claimed_requests / "c" / name, run.open_requests / name
    source, target = (waits, held) if moves == "to a new worker" else (held, waits)
    if moves == "back from a dead one":
        queue.open_claim_dir("c")
    source.write_bytes(b"")

    def moving(path: Any) -> list[str]:
        monkeypatch.setattr(os, "listdir", listdir)
        before = listdir(path)
        queue.open_claim_dir("c")
        source.rename(target)
        return before if moves == "back from a dead one" else listdir(path)

    monkeypatch.setattr(os, "listdir", moving)
    queue.remove_torn()
    assert not held.exists() and not waits.exists()


def test_a_name_is_seen_at_the_next_poll_even_when_the_folders_time_stands_still(tmp_path: Path) -> None:
    folder = FolderWatch(tmp_path)
    for i in range(50):
        (tmp_path / f"one{i}").touch()
        tick = os.stat(tmp_path)
        assert f"one{i}" in folder.names()
        (tmp_path / f"two{i}").touch()
        os.utime(tmp_path, ns=(tick.st_atime_ns, tick.st_mtime_ns))  # as a coarse clock would have it
        assert f"two{i}" in folder.names()


def test_a_listing_that_takes_long_is_not_taken_for_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = FolderWatch(tmp_path)
    (tmp_path / "one").touch()
    tick = os.stat(tmp_path)
    listdir = os.listdir

    def slow(path: Any) -> list[str]:
        names = listdir(path)
        time.sleep(2 * watch.RECENT_S)
        return names

    monkeypatch.setattr(os, "listdir", slow)
    assert folder.names() == {"one"}
    monkeypatch.setattr(os, "listdir", listdir)
    (tmp_path / "two").touch()
    os.utime(tmp_path, ns=(tick.st_atime_ns, tick.st_mtime_ns))
    assert folder.names() == {"one", "two"}


def test_a_poll_costs_one_stat_when_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(10):
        (tmp_path / f"f{i}").touch()
    (tmp_path / ".temporary").touch()
    folder = FolderWatch(tmp_path)
    assert len(folder.names()) == 10
    time.sleep(2 * watch.RECENT_S)
    assert len(folder.names()) == 10
    calls: Counter[str] = Counter()
    for name in ("stat", "listdir", "scandir", "open"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, real=real, name=name, **k: (calls.update([name]), real(*a, **k))[1])
    for _ in range(100):
        assert len(folder.names()) == 10
    assert calls["stat"] == 100 and calls.total() - calls["stat"] <= 1  # one listing if two seconds went by


def test_a_folder_is_listed_again_after_a_while_whatever_its_time_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, now = FolderWatch(tmp_path), 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    long_ago = (10**18 + 1, 10**18 + 1)  # no whole second, after which it would be listed in any case
    os.utime(tmp_path, ns=long_ago)
    assert folder.names() == frozenset()
    now += watch.RECENT_S + 0.01
    assert folder.names() == frozenset()
    (tmp_path / "new").touch()
    os.utime(tmp_path, ns=long_ago)
    assert folder.names() == frozenset()
    now += watch.RELIST_S + 0.01
    assert folder.names() == {"new"}


class Coarse:
    """A file system whose times are whole seconds, and `os.listdir` of a client that answers from a cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.stale, self.listings = 1000.25, dict[str, list[str]](), 0
        self.stat, self.listdir = os.stat, os.listdir
        self.second = 1_700_000_000
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(os, "listdir", self.list)

    def list(self, path: Any) -> list[str]:
        self.listings += 1
        return self.stale.get(os.fspath(path)) or self.listdir(path)

    def touch(self, path: Path) -> None:
        path.touch()
        self.stamp(path.parent)

    def stamp(self, folder: Path) -> None:
        """The folder's time is the second that it is."""
        stamp = (self.second + int(self.now)) * 10**9
        os.utime(folder, ns=(stamp, stamp))


def test_where_times_are_whole_seconds_a_name_of_the_same_second_is_seen_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, folder = Coarse(monkeypatch), FolderWatch(tmp_path)
    there.touch(tmp_path / "one")
    assert folder.names() == {"one"}
    there.now += 0.4  # settled, for times that are finer
    assert folder.names() == {"one"}
    there.now += 0.2
    there.touch(tmp_path / "two")
    there.now += 0.11
    assert folder.names() == {"one", "two"}
    before = there.listings
    for _ in range(300):
        there.now += 0.02
        folder.names()
    assert there.listings - before <= 20, "six seconds without news are not spent with listing"


def test_a_worker_does_not_take_its_own_claim_for_an_answer_that_was_lost(
    queue: RequestQueue, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim stays while the shard is published, and a listing of before speaks of the request still."""
    there = Coarse(monkeypatch)
    queue.put([request(0), request(1)])
    there.stale[str(run.open_requests)] = os.listdir(run.open_requests)
    claims = [queue.claim("a", 0) for _ in range(4)]
    assert [c and c.request.id for c in claims] == ["r000000-000", "r000000-001", None, None]
    first = claims[0]
    assert first is not None and queue.put_back(first)
    again = queue.claim("a", 0)
    assert again is not None and again.request.id == "r000000-000", "what was put back may be ours again"


def test_an_answer_that_was_lost_is_a_claim(queue: RequestQueue, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.put([request(0)])
    for error in (errno.ENOENT, errno.EIO):
        faults = inject(monkeypatch, run.open_requests)
        faults.error, faults.rule = error, lambda number, call, path: "lost" if call == "rename" else None
        claim = queue.claim("a", 0)
        faults.quiet += 1
        assert claim is not None and faults.hit and queue.put_back(claim)


def test_a_folder_whose_time_was_wrong_once_is_listed_every_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a client shows it that keeps attributes for a minute: what it says of the time does not change."""
    there, folder = Coarse(monkeypatch), FolderWatch(tmp_path, watchers=15)
    there.stamp(tmp_path)
    os.utime(tmp_path, ns=(10**18 + 1, 10**18 + 1))

    def seen_after(name: str) -> float:
        (tmp_path / name).touch()
        os.utime(tmp_path, ns=(10**18 + 1, 10**18 + 1))
        began = there.now
        while name not in folder.names():
            there.now += 0.05
        return there.now - began

    folder.names()
    there.now += 10
    folder.names()
    assert seen_after("one") > 10
    assert all(seen_after(name) <= watch.CACHED_RELIST_S + 0.1 for name in ("two", "three", "four"))


@pytest.mark.parametrize("stray", ["evil", "r000000-001", "r000000-001.a0", "x.a0.v0", "r000000-001.a0.v0.bak", "r000000-001.a0.vx"])  # fmt: skip
def test_names_that_are_no_requests_are_left_alone_and_end_nothing(
    queue: RequestQueue, run: RunDir, stray: str, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in (run.open_requests, run.claimed_requests / "a", run.claimed_requests):
        (folder / stray).write_text("not ours")
    assert not queue.has_open() and queue.claim("a", 0) is None and stray in caplog.text
    queue.put([request(0)])
    assert queue.has_open() and queue.in_progress() == {"r000000-000": 0} and queue.raise_oldest(3)
    claim = queue.claim("a", 3)
    assert claim is not None and claim.request == request(0)
    assert queue.give_back("a", lost=True) == ["r000000-000"] and sorted(queue.workers()) == ["a", "b"]
    queue.remove_torn()
    queue.withdraw(["r000000-000"])
    assert os.listdir(run.open_requests) == [stray]


def test_a_missing_folder_has_no_names_until_it_comes(tmp_path: Path) -> None:
    folder = FolderWatch(tmp_path / "later")
    assert folder.names() == frozenset()
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "x").touch()
    assert folder.names() == {"x"}


def test_pauses_grow_to_a_limit() -> None:
    pauses = backoff(0.1, 0.3)
    assert [round(next(pauses), 3) for _ in range(5)] == [0.1, 0.15, 0.225, 0.3, 0.3]


@pytest.mark.parametrize("watchers", [2, 8, 16])
def test_many_that_wait_poll_as_often_as_few(watchers: int) -> None:
    pauses = backoff(watchers=watchers)
    waits = [next(pauses) for _ in range(80)]
    assert watchers / waits[-1] == pytest.approx(20)
    assert all(wait <= 0.02 or wait < 0.12 * sum(waits[:i]) + 0.02 for i, wait in enumerate(waits))
    pauses = backoff(watchers=10000)
    assert max(next(pauses) for _ in range(100)) == watch.LONGEST_PAUSE_S


@pytest.mark.parametrize("workers", [2, 8, 32])
def test_a_request_costs_as_many_polls_whatever_the_number_of_workers(workers: int) -> None:
    usual_s = 0.5 * workers  # a request every half second
    pauses, waited_s, polls = backoff(watchers=workers, usual_s=usual_s), 0.0, 0
    while waited_s < usual_s:
        pause_s = next(pauses)
        assert pause_s < 0.1 * usual_s
        waited_s, polls = waited_s + pause_s, polls + 1
    assert watch.LOOKS - 1 <= polls <= 16
    longer = [next(pauses) for _ in range(40)]
    assert longer == sorted(longer) and longer[-1] == min(0.05 * workers, watch.LONGEST_PAUSE_S)
