"""Who of a node's waiting workers looks for requests: one at a time, the next one at once, and nobody relies on one that is dead or hangs."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from relax_hpc.files.publish import to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.roles.rollout import poll_leader
from relax_hpc.roles.rollout.poll_leader import PollLeader
from tests.runs import wait_for

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    run = RunDir(tmp_path / "run")
    run.create()
    run.identity.write_bytes(to_json({"id": "x"}))
    return run


class Other:
    """A worker in another process: each word that it is sent is something that it does."""

    def __init__(self, run: RunDir) -> None:
        self.here, there = FORK.Pipe()
        self.process = FORK.Process(target=self.serve, args=(run, there), daemon=True)
        self.process.start()

    @staticmethod
    def serve(run: RunDir, there: Connection) -> None:
        own = PollLeader(run)
        while True:
            there.send(own.looks() if there.recv() == "look" else own.leave())

    def does(self, word: str) -> object:
        self.here.send(word)
        return self.here.recv()


@pytest.fixture
def other(run: RunDir) -> Iterator[Other]:
    made = Other(run)
    yield made
    made.process.kill()
    made.process.join()


def test_one_looks_and_the_next_one_is_called_when_it_leaves(run: RunDir, other: Other) -> None:
    mine = PollLeader(run)
    assert mine.looks() and mine.looks()
    assert not other.does("look")
    mine.leave()
    wait_for(lambda: other.does("look"))
    assert not mine.looks() and not mine.called.is_set()
    other.does("leave")
    assert mine.called.wait(60) and mine.looks()


def test_a_poll_leader_that_died_is_followed(run: RunDir, other: Other) -> None:
    assert other.does("look")
    mine = PollLeader(run)
    assert not mine.looks()
    other.process.kill()
    assert mine.called.wait(60) and mine.looks()


def test_where_the_poll_leader_hangs_everybody_looks(
    run: RunDir, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert other.does("look")
    mine = PollLeader(run)
    assert not mine.looks()
    assert other.process.pid is not None
    os.kill(other.process.pid, signal.SIGSTOP)
    with monkeypatch.context() as soon:
        soon.setattr(poll_leader, "SILENT_S", 0.2)
        wait_for(mine.looks)
    mine.leave()  # it found a request
    other.process.kill()
    other.process.join()
    wait_for(lambda: not mine._asking)
    os.utime(poll_leader.file_of(run))
    third = Other(run)
    try:
        assert third.does("look"), "who generates does not look, though the lock came to it meanwhile"
        assert not mine.called.is_set()
    finally:
        third.process.kill()


def test_where_there_are_no_locks_everybody_looks(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("relax_hpc.roles.rollout.poll_leader.fcntl.lockf", none)
    workers = [PollLeader(run) for _ in range(2)]
    assert all(worker.looks() and worker.looks() for worker in workers)
    for worker in workers:
        worker.leave()
