"""Checkpoints: complete or absent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relax_hpc import checkpoint
from relax_hpc.run_dir import RunDir, read_json
from tests.runs import wait_for

WRITER = """
import itertools, sys
from pathlib import Path
from relax_hpc import checkpoint
from relax_hpc.run_dir import RunDir, read_json
run, via = RunDir(sys.argv[1]), Path(sys.argv[2])
print("ready", flush=True)
for step in itertools.count():
    folder = checkpoint.begin(via, step)
    for name in "model", "optimizer":
        (folder / name).write_bytes(b"x" * 1_000_000)
    checkpoint.commit(run, folder, step, {"book": {}})
    checkpoint.rotate(run, via, 2)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


@pytest.fixture
def via(run: RunDir) -> Path:
    via = run.lease / "000001" / "i000001"
    via.mkdir(parents=True)
    return via


def write(run: RunDir, via: Path, step: int, content: bytes = b"weights") -> None:
    folder = checkpoint.begin(via, step)
    (folder / "model").write_bytes(content)
    checkpoint.commit(run, folder, step, {"said": step})


def test_newest_of_several(run: RunDir, via: Path) -> None:
    assert checkpoint.newest(run) is None
    for step in (0, 10, 9):
        write(run, via, step)
    found = checkpoint.newest(run)
    assert found is not None and found[0].name == "step-00000010" and found[1] == {"step": 10, "said": 10}
    assert read_json(run.checkpoint(9) / "state.json") == {"step": 9, "said": 9}
    assert os.listdir(via) == []


def test_killed_at_any_moment_every_visible_checkpoint_is_whole(run: RunDir, tmp_path: Path) -> None:
    for attempt in range(6):
        via = run.lease / "000001" / f"i{attempt:06d}"
        via.mkdir(parents=True)
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(run.root), str(via)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        if attempt:
            wait_for(lambda: any(run.checkpoints.iterdir()))
        time.sleep(0.03 + attempt * 0.037)
        process.send_signal(signal.SIGKILL)
        process.wait()
        folders = list(run.checkpoints.iterdir())
        assert folders or attempt == 0
        for folder in folders:
            assert sorted(p.name for p in folder.iterdir()) == ["DONE", "model", "optimizer", "state.json"]
            assert {(folder / n).stat().st_size for n in ("model", "optimizer")} == {1_000_000}
            assert read_json(run.checkpoint(int(folder.name[5:])) / "state.json") == {
                "step": int(folder.name[5:]),
                "book": {},
            }


def test_rotation_keeps_the_newest_and_names_the_oldest_left(run: RunDir, via: Path) -> None:
    for step in (0, 2, 4, 6):
        write(run, via, step)
    assert checkpoint.rotate(run, via, 2) == 4
    assert run.checkpoint_steps() == [4, 6]
    assert checkpoint.rotate(run, via, 5) == 4
    assert os.listdir(via) == []


def test_a_folder_without_its_mark_is_no_checkpoint_and_is_replaced(run: RunDir, via: Path) -> None:
    write(run, via, 2)
    (run.checkpoint(4)).mkdir()
    (run.checkpoint(4) / "model").write_bytes(b"half")
    found = checkpoint.newest(run)
    assert found is not None and found[1]["step"] == 2
    write(run, via, 4)
    assert run.checkpoint_steps() == [2, 4]
    assert (run.checkpoint(4) / "model").read_bytes() == b"weights"


def test_a_checkpoint_that_is_there_stays(run: RunDir, via: Path) -> None:
    write(run, via, 2, b"first")
    write(run, via, 2, b"second")
    assert (run.checkpoint(2) / "model").read_bytes() == b"first"
    assert os.listdir(via) == []


def test_an_attempt_that_found_the_disk_full_can_be_made_again(run: RunDir, via: Path) -> None:
    folder = checkpoint.begin(via, 2)
    (folder / "model").write_bytes(b"half")
    write(run, via, 2)
    assert (run.checkpoint(2) / "model").read_bytes() == b"weights"


def test_a_fenced_trainer_neither_adds_nor_removes(run: RunDir, via: Path) -> None:
    for step in (0, 2, 4):
        write(run, via, step)
    folder = checkpoint.begin(via, 6)
    via.rename(via.with_name("i000001.over"))
    with pytest.raises(FileNotFoundError):
        checkpoint.commit(run, folder, 6, {})
    with pytest.raises(FileNotFoundError):
        checkpoint.begin(via, 8)
    with pytest.raises(FileNotFoundError):
        checkpoint.rotate(run, via, 1)
    assert run.checkpoint_steps() == [0, 2, 4]
