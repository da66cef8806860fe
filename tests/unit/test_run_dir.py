"""Publishing: exclusive, whole or absent, whatever dies at whatever moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import link_exclusive, publish, replace, write_file
from relax_hpc.files.run_dir import RunDir, open_existing

WRITER = """
import itertools, sys
from pathlib import Path
from relax_hpc.files.publish import publish, replace
folder, how = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
for i in itertools.count():
    if how == "publish":
        publish(folder / f"f{i:06d}", (b"%06d" % i) * 200_000)
    else:
        replace(folder / "f", (b"%06d" % i) * 200_000, durable=False)
"""
WHOLE = 6 * 200_000


def writer(folder: Path, how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder), how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def assert_whole(content: bytes) -> None:
    assert len(content) == WHOLE and content == content[:6] * 200_000


def test_a_name_is_published_once(tmp_path: Path) -> None:
    final = tmp_path / "new" / "deep" / "name"
    assert publish(final, b"first")
    assert not publish(final, b"second")
    assert final.read_bytes() == b"first"
    assert os.listdir(final.parent) == ["name"]


def test_of_many_publishers_one_wins(tmp_path: Path) -> None:
    for name in map(str, range(20)):
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda i, name=name: publish(tmp_path / name, b"%d" % i, durable=False), range(8)))
        assert won.count(True) == 1
        assert int((tmp_path / name).read_bytes()) == won.index(True)


def test_a_link_whose_reply_was_lost_counts_as_ours(tmp_path: Path) -> None:
    write_file(tmp_path / "temporary", b"ours")
    os.link(tmp_path / "temporary", tmp_path / "final")  # the server did it, and its answer never came
    assert link_exclusive(tmp_path / "temporary", tmp_path / "final")
    assert os.listdir(tmp_path) == ["final"]


def test_somebody_elses_file_with_two_names_is_not_ours(tmp_path: Path) -> None:
    write_file(tmp_path / "theirs", b"theirs")
    os.link(tmp_path / "theirs", tmp_path / "final")
    write_file(tmp_path / "temporary", b"ours")
    assert not link_exclusive(tmp_path / "temporary", tmp_path / "final")


@pytest.mark.parametrize("how", ["publish", "replace"])
def test_a_writer_killed_at_any_moment_leaves_no_torn_name(tmp_path: Path, how: str) -> None:
    random.seed(0)
    for attempt in range(6):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        process = writer(folder, how)
        time.sleep(0.02 + random.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for path in folder.glob("[!.]*"):
            assert_whole(path.read_bytes())


def test_a_reader_of_a_replaced_file_sees_old_or_new_whole(tmp_path: Path) -> None:
    replace(tmp_path / "f", b"000000" * 200_000)
    process = writer(tmp_path, "replace")
    try:
        seen: set[bytes] = set()
        deadline = time.monotonic() + 60
        while len(seen) < 10 and time.monotonic() < deadline:
            content = (tmp_path / "f").read_bytes()
            assert_whole(content)
            seen.add(content[:6])
    finally:
        process.kill()
        process.wait()
    assert len(seen) >= 10


@pytest.mark.parametrize("act", [publish, replace])
def test_a_fenced_writer_changes_nothing(tmp_path: Path, act: object) -> None:
    commit_dir = tmp_path / "i000001"
    commit_dir.mkdir()
    commit_dir.rename(tmp_path / "i000001.over")
    (tmp_path / "out").mkdir()
    with pytest.raises(FileNotFoundError):
        act(tmp_path / "out" / "name", b"late", commit_dir=commit_dir)  # type: ignore[operator]
    assert os.listdir(tmp_path / "out") == []


def test_a_writer_fenced_in_the_middle_changes_nothing(tmp_path: Path) -> None:
    commit_dir = tmp_path / "i000001"
    commit_dir.mkdir()
    write_file(commit_dir / "temporary", b"late")
    commit_dir.rename(tmp_path / "i000001.over")
    with pytest.raises(FileNotFoundError):
        link_exclusive(commit_dir / "temporary", tmp_path / "final")
    assert not (tmp_path / "final").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys; from pathlib import Path; from relax_hpc.files.publish import publish\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "publish(Path(sys.argv[1]) / 'name', b'x' * 5000)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "OSError" in done.stderr
    assert os.listdir(tmp_path) == []


def test_shards_of_one_batch_share_a_folder_and_evaluations_have_theirs(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.shard("r000012-000").parent == run.shard("r000012-003x1").parent != run.shard("r000999-000").parent
    assert run.shard("e000012-000").parent == run.evals


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=rf"{tmp_path}.*run\.json"):
        open_existing(tmp_path)


def test_a_run_of_an_older_version_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "run" / "orders" / "open").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(
        RunError, match=r"older version of relax_hpc.*'orders/', expected 'requests/'.*begin a new run$"
    ):
        open_existing(tmp_path / "run")
