"""The fault file system itself: its rules do to a caller what they say, its caches are as old as they say, and it leaves no mount behind."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.faults import faultfs
from tools.faults.faultfs import Caches, FaultFS, Rule

CACHE_S = 2.0


@pytest.fixture(autouse=True)
def mountable() -> None:
    if reason := faultfs.why_not():
        pytest.skip(reason)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FaultFS]:
    with FaultFS(tmp_path / "backing", tmp_path / "mount") as disk:
        yield disk


@contextlib.contextmanager
def other_hosts(folder: Path, caches: Caches) -> Iterator[tuple[Path, Path]]:
    """Two hosts' views of one folder: the first caches nothing, the second has these caches."""
    with FaultFS(folder / "backing", folder / "a") as a, FaultFS(folder / "backing", folder / "b", caches) as b:
        yield a.mount, b.mount


def calling(code: str, *arguments: Path) -> subprocess.Popen[bytes]:
    """A process that makes one call, and then says so."""
    return subprocess.Popen(
        [sys.executable, "-c", f"import os, sys; {code}; print('done', flush=True)", *map(str, arguments)],
        stdout=subprocess.PIPE,
    )


def hit(disk: FaultFS) -> faultfs.Hit:
    """Wait for the first hit."""
    deadline = time.monotonic() + 30
    while not (hits := disk.hits()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return hits[0]


RENAME = "os.rename(sys.argv[1], sys.argv[2])"
WRITE = "h = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT); os.write(h, b'x' * 100)"


@pytest.mark.quick
@pytest.mark.parametrize(("action", "moved"), [("kill-before", False), ("kill-after", True)])
def test_a_caller_is_killed_before_or_after_its_call_and_never_sees_the_answer(disk, action, moved):
    source, target = disk.mount / "a", disk.mount / "b"
    source.write_bytes(b"")
    disk.rules(Rule("rename", "^/a>/b$", action))
    process = calling(RENAME, source, target)
    said, _ = process.communicate(timeout=60)
    assert (process.returncode, said) == (-signal.SIGKILL, b"")
    assert (disk.backing / "b").exists() is moved
    found = hit(disk)
    assert (found.op, found.path, found.target, found.action) == ("rename", "/a", "/b", action)
    assert RENAME in found.process
    disk.rules()


def test_half_of_a_write_is_there_when_its_caller_is_killed(disk):
    disk.rules(Rule("write", "^/a$", "kill-half"))
    process = calling(WRITE, disk.mount / "a")
    assert process.wait(60) == -signal.SIGKILL
    assert (disk.backing / "a").read_bytes() == b"x" * 50


@pytest.mark.quick
@pytest.mark.parametrize(("action", "made"), [("error-before", False), ("error-after", True)])
def test_an_error_comes_before_the_call_or_as_a_lost_reply_at_the_nth_call_alone(disk, action, made):
    disk.rules(Rule("mkdir", "/d[0-9]$", action, when=2, error=errno.EDQUOT))
    os.mkdir(disk.mount / "d1")
    with pytest.raises(OSError) as raised:
        os.mkdir(disk.mount / "d2")
    os.mkdir(disk.mount / "d3")
    assert raised.value.errno == errno.EDQUOT
    assert (disk.backing / "d2").exists() is made
    assert disk.counts() == [(3, 1)]


@pytest.mark.quick
def test_a_stopped_callers_call_is_carried_out_when_it_is_let_go_and_never_when_it_is_killed(disk):
    for name in ("a", "b"):
        (disk.backing / name).write_bytes(b"")
    for name, ending in (("a", "goes on"), ("b", "is killed")):
        begin = disk.log.stat().st_size
        disk.rules(Rule("rename", f"^/{name}>", "stop-before"))
        process = calling(RENAME, disk.mount / name, disk.mount / f"{name}2")
        while not disk.hits(begin):
            time.sleep(0.01)
        time.sleep(0.2)
        assert process.poll() is None and not (disk.backing / f"{name}2").exists()
        if ending == "is killed":
            process.kill()
            assert process.wait(60) == -signal.SIGKILL and not (disk.backing / "b2").exists()
            continue
        disk.rules()
        while not (disk.backing / "a2").exists():
            time.sleep(0.01)
        assert process.poll() is None, "it is stopped still"
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == 0


def test_rules_know_the_calling_process_and_probabilities(disk):
    disk.rules(
        Rule("create", "", "error-before", 1.0, process="nobody"), Rule("create", "", "error-before", 0.5), Rule("unlink", "", "note", 1.0)
    )  # fmt: skip
    refused = 0
    for k in range(100):
        try:
            (disk.mount / f"f{k}").touch()
        except OSError:
            refused += 1
    assert 25 < refused < 75
    assert [hits for _, hits in disk.counts()] == [0, refused, 0]
    (disk.mount / "f-last").unlink(missing_ok=True)
    assert not [found for found in disk.hits() if found.action == "note"] and "f0" not in os.listdir(disk.mount / "..")


def test_a_rule_that_nobody_understands_is_refused_and_the_old_ones_stay(disk):
    disk.rules(Rule("mkdir", "/x$", "error-before"))
    for wrong in (Rule("mkdir", "(", "note"), Rule("mkdir", "", "explode"), Rule("mkdir", "", "note", 0)):
        with pytest.raises(OSError) as raised:
            disk.rules(wrong)
        assert raised.value.errno == errno.EINVAL
    with pytest.raises(OSError):
        os.mkdir(disk.mount / "x")


def test_every_changing_call_can_be_noted_with_its_answer(disk):
    disk.rules(Rule("*", "", "note", 1.0))
    (disk.mount / "a").write_text("some")
    os.link(disk.mount / "a", disk.mount / "b")
    with contextlib.suppress(FileExistsError):
        os.link(disk.mount / "a", disk.mount / "b")
    shutil.move(disk.mount / "b", disk.mount / "c")
    os.unlink(disk.mount / "a")
    seen = [(h.op, h.path, h.target) for h in disk.hits() if h.op in ("create", "write", "link", "rename", "unlink")]
    expected = [
        ("create", "/a", ""),
        ("write", "/a", ""),
        ("link", "/a", "/b"),
        ("rename", "/b", "/c"),
        ("unlink", "/a", ""),
    ]
    assert seen == expected  # the kernel itself answers the second link: it has just seen the name
    assert next(h.answer for h in disk.hits() if h.op == "write") == 4


def test_open_files_live_on_and_links_are_one_file(disk):
    path = disk.mount / "a"
    path.write_text("old")
    os.link(path, disk.mount / "b")
    assert path.samefile(disk.mount / "b") and path.stat().st_nlink == 2
    with path.open() as handle:
        path.unlink()
        assert handle.read() == "old"
    assert sorted(os.listdir(disk.mount)) == ["b"]


@pytest.mark.quick
def test_each_cache_is_as_old_as_it_says_and_no_older(tmp_path):
    caches = Caches(attributes_s=CACHE_S, entries_s=CACHE_S, negative_s=CACHE_S, listings_s=CACHE_S)
    with other_hosts(tmp_path, caches) as (there, here):
        (there / "file").write_text("1")
        (there / "folder").mkdir()
        began = time.monotonic()
        before = os.stat(here / "file")
        assert not (here / "new").exists() and os.listdir(here / "folder") == []
        (there / "new").write_text("")
        (there / "folder" / "name").write_text("")
        (there / "file").write_text("12")
        old = (os.stat(here / "file").st_size, (here / "new").exists(), os.listdir(here / "folder"))
        if time.monotonic() - began < CACHE_S:
            assert old == (1, False, [])
        assert (here / "file").read_text() == "12", "what is opened is asked for"
        (here / "folder" / "own").write_text("")
        assert sorted(os.listdir(here / "folder")) == ["name", "own"], "own changes are seen at once"
        time.sleep(CACHE_S + 0.1)
        assert (here / "new").exists() and os.stat(here / "file").st_size == 2
        assert before.st_size == 1


def test_without_close_to_open_a_file_is_as_old_as_its_attributes(tmp_path):
    with other_hosts(tmp_path, Caches(attributes_s=60, entries_s=60, close_to_open=False)) as (there, here):
        (there / "file").write_text("old")
        assert (here / "file").read_text() == "old"
        (there / "file").write_text("newer")
        assert (here / "file").read_text() == "old"


def test_whole_seconds_silly_names_and_a_path_that_is_stale_for_good(tmp_path):
    with FaultFS(tmp_path / "b", tmp_path / "m", Caches(whole_seconds=True, silly_rename=True)) as disk:
        path = disk.mount / "a"
        path.write_text("x")
        assert path.stat().st_mtime_ns % 10**9 == 0 and (disk.backing / "a").stat().st_mtime_ns % 10**9
        with path.open():
            path.unlink()
            assert any(name.startswith(".fuse_hidden") for name in os.listdir(disk.mount))
        (disk.mount / "b").write_text("")
        disk.rules(Rule("*", "^/b$", "error-before", 1.0, error=errno.ESTALE))
        for _ in range(3):
            with pytest.raises(OSError) as raised:
                os.stat(disk.mount / "b")
            assert raised.value.errno == errno.ESTALE


def test_a_lock_is_held_between_hosts_and_who_waits_for_it_can_be_killed(tmp_path):
    import fcntl

    with other_hosts(tmp_path, Caches()) as (there, here), (there / "lock").open("w") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        with (here / "lock").open() as theirs, pytest.raises(BlockingIOError):
            fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
        waiting = calling("import fcntl; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX)", here / "lock")
        time.sleep(0.5)
        waiting.kill()
        assert waiting.wait(60) == -signal.SIGKILL


def test_a_mount_whose_server_died_is_gone_at_the_next_start_and_others_stay(tmp_path):
    with FaultFS(tmp_path / "living", tmp_path / "living-mount") as living:
        dead = FaultFS(tmp_path / "dead", tmp_path / "dead mount")
        dead.__enter__()
        assert dead._server is not None
        dead._server.kill()
        dead._server.wait()
        with pytest.raises(OSError):
            os.listdir(dead.mount)
        faultfs.unmount_stale()
        assert os.listdir(dead.mount) == [] and not os.path.ismount(dead.mount) and os.path.ismount(living.mount)
    assert not os.path.ismount(living.mount)


def test_a_mount_ends_with_the_process_that_made_it(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from tools.faults.faultfs import FaultFS\n"
        "FaultFS(Path(sys.argv[1]) / 'b', Path(sys.argv[1]) / 'm').__enter__(); print('up', flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, cwd=faultfs.HERE.parents[1])
    assert done.stdout == b"up\n", done.stderr
    deadline = time.monotonic() + 20
    while os.path.ismount(tmp_path / "m") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.ismount(tmp_path / "m")


def test_what_a_machine_lacks_is_named(monkeypatch, tmp_path):
    faultfs._missing.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        with pytest.raises(faultfs.Unavailable, match="fusermount3 .Debian: fuse3.*C compiler .*libfuse3-dev"):
            faultfs.build()
    finally:
        faultfs._missing.cache_clear()
