"""Compiled kernels of one node reach the next; nothing of it can fail a run, and nobody else can put code there."""

from __future__ import annotations

import os
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relax_hpc.files.errors import RunError
from relax_hpc.files.node_disk import fill_once, node_disk
from relax_hpc.files.publish import read_json, replace, to_json, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.roles.common.caches import FOLDERS, Caches, _checksum


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    write_file(run.identity, to_json({"id": "f00"}))
    return run


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*FOLDERS, "SLURM_TMPDIR"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "1")


def on_node(name: str, run: RunDir) -> Caches:
    """A role's process begins on a node that has this disk."""
    disk = run.root.parent / name
    disk.mkdir(exist_ok=True)
    for variable in FOLDERS:
        os.environ.pop(variable, None)
    os.environ["SLURM_TMPDIR"] = str(disk)
    caches = Caches(run, "trainer")
    caches.warm()
    return caches


def kernel() -> Path:
    return Path(os.environ["TRITON_CACHE_DIR"]) / "abc" / "kernel.cubin"


def compile_one(content: bytes) -> None:
    kernel().parent.mkdir(parents=True)
    kernel().write_bytes(content)


def test_what_one_node_compiled_the_next_one_has(run: RunDir) -> None:
    first = on_node("a", run)
    first.keep()
    assert not run.caches.exists(), "nothing was compiled"
    first, second = on_node("a", run), on_node("b", run)
    compile_one(b"second")
    second.keep()
    assert on_node("a", run) and not kernel().exists(), "a node that has begun keeps what it has"
    compile_one(b"first")
    first.keep()
    assert len(list(run.caches.iterdir())) == 2, "the first one counts"
    on_node("c", run)
    assert kernel().read_bytes() == b"second" and kernel().is_relative_to(run.root.parent / "c")


def test_two_nodes_that_pack_at_once_leave_one(run: RunDir) -> None:
    packing = [on_node("a", run), on_node("b", run)]
    for node, caches in zip("ab", packing, strict=True):
        on_node(node, run)
        compile_one(node.encode())
        folder = kernel().parents[2]
        caches._pack(folder, [kernel()])  # both had looked before either was done
    assert len(list(run.caches.iterdir())) == 2
    on_node("c", run)
    assert kernel().read_bytes() == b"a"


def test_a_damaged_or_hostile_tar_is_not_used(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    first = on_node("a", run)
    compile_one(b"good")
    first.keep()
    manifest, packed = next(run.caches.glob("*.json")), next(run.caches.glob("*.tar"))
    about = read_json(manifest)
    packed.write_bytes(packed.read_bytes().replace(b"good", b"evil"))
    on_node("b", run)
    assert not kernel().exists() and "checksum" in caplog.text
    outside = run.root.parent / "outside"
    for node, (name, target) in {
        "c": ("../../escaped", ""),
        "d": (str(outside), ""),
        "e": ("link", str(outside)),
    }.items():
        caplog.clear()
        with tarfile.open(packed, "w") as tar:
            member = tar.gettarinfo(manifest, name)
            member.name = name  # gettarinfo would make an absolute one relative
            if target:
                member.type, member.linkname, member.size = tarfile.SYMTYPE, target, 0
            with manifest.open("rb") as file:
                tar.addfile(member, None if target else file)
        replace(manifest, to_json(about | {"checksum": _checksum(packed)}))
        on_node(node, run)
        assert "no cache on this node" in caplog.text and name in caplog.text
        found = {path.name for path in run.root.parent.rglob("*")}
        assert not found & {"escaped", "outside", "link"}


def test_variables_that_are_set_stay_and_outside_of_jobs_nothing_is_set(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    monkeypatch.setenv("SLURM_TMPDIR", str(run.root))
    Caches(run, "trainer").warm()
    assert os.environ["TRITON_CACHE_DIR"] == "/mine" and "inductor" in os.environ["TORCHINDUCTOR_CACHE_DIR"]
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    Caches(run, "trainer").warm()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_a_folder_that_others_can_write_is_refused(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    on_node("a", run)
    folder = node_disk()
    folder.chmod(0o777)
    with pytest.raises(RunError, match=r"not a folder that you alone can write.*drwxrwxrwx.*TMPDIR"):
        node_disk()
    on_node("a", run)
    assert "TRITON_CACHE_DIR" not in os.environ and "no cache" in caplog.text
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))
    with pytest.raises(RunError, match="alone can write"):
        node_disk()


def test_a_folder_is_filled_once_and_whole_or_not_at_all(tmp_path: Path) -> None:
    folder, filled = tmp_path / "x" / "folder", []

    def fill(draft: Path) -> None:
        (draft / "half").write_text("")
        time.sleep(0.1)
        filled.append(draft)

    def fail(draft: Path) -> None:
        (draft / "half").write_text("")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fill_once(folder, fail)
    (folder.parent / ".folder.new-killed").mkdir()
    with ThreadPoolExecutor(4) as several:
        list(several.map(lambda _: fill_once(folder, fill), range(4)))
    assert len(filled) == 1 and sorted(p.name for p in folder.parent.iterdir()) == [".folder.lock", "folder"]
