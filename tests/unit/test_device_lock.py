"""Whose turn it is on shared devices: workers together, the trainer alone, and nobody waits for the dead."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from relax_hpc.files.publish import to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.roles.common.device_lock import DeviceLock
from tests.runs import wait_for

FORK = multiprocessing.get_context("fork")


def hold(run: RunDir, alone: bool, said: Connection) -> None:
    turn = DeviceLock(run, alone=alone)
    said.send(turn.acquire())
    signal.pause()


@pytest.mark.parametrize(("theirs", "ours", "free"), [(False, False, True), (False, True, False), (True, False, False)])
def test_a_turn_is_shared_by_workers_alone_and_ends_with_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: bool, ours: bool, free: bool
) -> None:
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path))
    run = RunDir(tmp_path / "run")
    run.create()
    run.identity.write_bytes(to_json({"id": "x"}))
    here, there = FORK.Pipe()
    other = FORK.Process(target=hold, args=(run, theirs, there))
    other.start()
    try:
        assert here.recv()
        mine = DeviceLock(run, alone=ours)
        assert mine.acquire() is free
        assert other.pid is not None
        os.kill(other.pid, signal.SIGKILL)
        wait_for(mine.acquire)
        mine.release()
        assert not mine.held
    finally:
        other.kill()
        other.join()
