"""Checkpoints: complete or absent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_hpc import checkpoint
from relax_hpc.files import folder_checksums
from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from tests.runs import wait_for

WRITER = """
import itertools, sys
from pathlib import Path
from relax_hpc import checkpoint
from relax_hpc.files.run_dir import RunDir
from relax_hpc.files.publish import read_json
run, commit_dir = RunDir(sys.argv[1]), Path(sys.argv[2])
print("ready", flush=True)
for step in itertools.count():
    folder = checkpoint.begin(commit_dir, step)
    for name in "model", "optimizer":
        (folder / name).write_bytes(b"x" * 1_000_000)
    checkpoint.commit(run, folder, step, {"planner": {}})
    checkpoint.rotate(run, commit_dir, 2)
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


@pytest.fixture
def commit_dir(run: RunDir) -> Path:
    commit_dir = run.lease / "000001" / "i000001"
    commit_dir.mkdir(parents=True)
    return commit_dir


def write(run: RunDir, commit_dir: Path, step: int, content: bytes = b"weights") -> None:
    folder = checkpoint.begin(commit_dir, step)
    (folder / "model").write_bytes(content)
    checkpoint.commit(run, folder, step, {"said": step})


def newest(run: RunDir, quarantine: Callable[[int, str], None] | None = None) -> tuple[Path, dict[str, Any]] | None:
    """What is restored, by a trainer that looks at every file."""
    taken: list[Path] = []

    def take(folder: Path) -> None:
        folder_checksums.compare_all(folder)
        taken.append(folder)

    state = checkpoint.restore(run, take, lambda said: said, quarantine or (lambda step, damage: pytest.fail(damage)))
    return None if state is None else (taken[-1], state)


def damage(path: Path, how: str) -> None:
    if how == "gone":
        path.unlink()
    elif how == "torn":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["flipped", "torn", "gone"])
@pytest.mark.parametrize("name", ["model", "state.json"])
def test_a_damaged_checkpoint_is_quarantined_with_the_reason_and_the_next_older_one_taken(
    run: RunDir, commit_dir: Path, name: str, how: str
) -> None:
    for step in (2, 4, 6):
        write(run, commit_dir, step)
    for step in (4, 6):
        damage(run.checkpoint(step) / name, how)
    said: dict[int, str] = {}

    def quarantine(step: int, reason: str) -> None:
        said[step] = reason
        checkpoint.move_to_quarantine(run, commit_dir, run.quarantine, step, reason)

    assert newest(run, quarantine) == (run.checkpoint(2), {"step": 2, "said": 2})
    assert list(said) == [6, 4] and run.checkpoint_steps() == [2]
    wanted = folder_checksums.of_pieces([b"weights"])
    for step, reason in said.items():
        assert str(run.checkpoint(step) / name) in reason
        assert name != "model" or wanted in reason
        if how == "flipped" and name == "model":
            assert (
                folder_checksums.of_file(next(run.quarantine.glob(f"checkpoint-{step:08d}.*.damaged")) / name) in reason
            )
    write(run, commit_dir, 6)
    assert newest(run) == (run.checkpoint(6), {"step": 6, "said": 6}), "another of the same step can be made"


def test_a_damaged_seal_is_damage(run: RunDir, commit_dir: Path) -> None:
    write(run, commit_dir, 2)
    write(run, commit_dir, 4)
    (run.checkpoint(4) / "DONE").write_text('{"checksums": [')
    said: list[str] = []
    assert newest(run, lambda step, reason: said.append(reason)) == (run.checkpoint(2), {"step": 2, "said": 2})
    assert "DONE" in said[0]


def test_where_no_checkpoint_is_whole_nothing_begins_anew(run: RunDir, commit_dir: Path) -> None:
    for step in (2, 4):
        write(run, commit_dir, step)
        damage(run.checkpoint(step) / "model", "flipped")
    with pytest.raises(
        RunError, match=r"no checkpoint of .* is whole: .*step-00000004/model.*step-00000002/model.*from a copy"
    ):
        newest(run, lambda step, reason: None)


def test_what_another_process_found_damaged_is_damaged_for_all(run: RunDir, commit_dir: Path) -> None:
    write(run, commit_dir, 2)
    write(run, commit_dir, 4)
    others, taken = iter(["", "rank 2: 'model' is damaged", "", ""]), list[str]()
    agree = lambda said: said or next(others)
    state = checkpoint.restore(run, lambda folder: taken.append(folder.name), agree, lambda step, reason: None)
    assert state == {"step": 2, "said": 2} and taken == ["step-00000004", "step-00000002"]


def test_no_process_takes_a_checkpoint_whose_state_another_one_cannot_read(run: RunDir, commit_dir: Path) -> None:
    """To take one is collective with Megatron: a process that began it alone would wait for ever."""
    write(run, commit_dir, 2)
    write(run, commit_dir, 4)
    others, taken = iter(["rank 2: 'state.json' is damaged", "", ""]), list[str]()
    agree = lambda said: said or next(others)
    state = checkpoint.restore(run, lambda folder: taken.append(folder.name), agree, lambda step, reason: None)
    assert state == {"step": 2, "said": 2} and taken == ["step-00000002"]


def test_newest_of_several(run: RunDir, commit_dir: Path) -> None:
    assert newest(run) is None
    for step in (0, 10, 9):
        write(run, commit_dir, step)
    found = newest(run)
    assert found is not None and found[0].name == "step-00000010" and found[1] == {"step": 10, "said": 10}
    assert read_json(run.checkpoint(9) / "state.json") == {"step": 9, "said": 9}
    assert os.listdir(commit_dir) == []


def test_killed_at_any_moment_every_visible_checkpoint_is_whole(run: RunDir, tmp_path: Path) -> None:
    for attempt in range(6):
        commit_dir = run.lease / "000001" / f"i{attempt:06d}"
        commit_dir.mkdir(parents=True)
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(run.root), str(commit_dir)], stdout=subprocess.PIPE, text=True
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
                "planner": {},
            }


def test_rotation_keeps_the_newest_and_names_the_oldest_left(run: RunDir, commit_dir: Path) -> None:
    for step in (0, 2, 4, 6):
        write(run, commit_dir, step)
    assert checkpoint.rotate(run, commit_dir, 2) == 4
    assert run.checkpoint_steps() == [4, 6]
    assert checkpoint.rotate(run, commit_dir, 5) == 4
    assert os.listdir(commit_dir) == []


def test_a_folder_without_its_mark_is_no_checkpoint_and_is_replaced(run: RunDir, commit_dir: Path) -> None:
    write(run, commit_dir, 2)
    (run.checkpoint(4)).mkdir()
    (run.checkpoint(4) / "model").write_bytes(b"half")
    found = newest(run)
    assert found is not None and found[1]["step"] == 2
    write(run, commit_dir, 4)
    assert run.checkpoint_steps() == [2, 4]
    assert (run.checkpoint(4) / "model").read_bytes() == b"weights"


def test_a_checkpoint_that_is_there_stays(run: RunDir, commit_dir: Path) -> None:
    write(run, commit_dir, 2, b"first")
    write(run, commit_dir, 2, b"second")
    assert (run.checkpoint(2) / "model").read_bytes() == b"first"
    assert os.listdir(commit_dir) == []


def test_an_attempt_that_found_the_disk_full_can_be_made_again(run: RunDir, commit_dir: Path) -> None:
    folder = checkpoint.begin(commit_dir, 2)
    (folder / "model").write_bytes(b"half")
    write(run, commit_dir, 2)
    assert (run.checkpoint(2) / "model").read_bytes() == b"weights"


def test_a_fenced_trainer_neither_adds_nor_removes(run: RunDir, commit_dir: Path) -> None:
    for step in (0, 2, 4):
        write(run, commit_dir, step)
    folder = checkpoint.begin(commit_dir, 6)
    commit_dir.rename(commit_dir.with_name("i000001.over"))
    with pytest.raises(FileNotFoundError):
        checkpoint.commit(run, folder, 6, {})
    with pytest.raises(FileNotFoundError):
        checkpoint.begin(commit_dir, 8)
    with pytest.raises(FileNotFoundError):
        checkpoint.rotate(run, commit_dir, 1)
    assert run.checkpoint_steps() == [0, 2, 4]
