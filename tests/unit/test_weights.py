"""The parts of weights: checksums, safetensors files, changes between versions, a node's copies, room in memory."""

from __future__ import annotations

import os
import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json, replace, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.files.tensor_files import as_bytes
from relax_hpc.weights import DamagedWeights, FilePublisher, FileReceiver, Version, delta
from relax_hpc.weights.contents import checksum
from relax_hpc.weights.file import READ_AGAIN_S
from relax_hpc.weights.parts import digest, in_threads
from relax_hpc.weights.versions import Versions, tensors_path

MIB = 1 << 20


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    run.identity.write_text('{"id": "test"}')
    (run.lease / "commit_dir").mkdir()
    return run


def publisher(run: RunDir, full_every: int = 1, node_cache: bool = True) -> FilePublisher:
    return FilePublisher(
        run,
        run.lease / "commit_dir",
        1,
        node_cache=run.root / "trainer" if node_cache else None,
        full_every=full_every,
        bucket_bytes=MIB // 2,
    )


def files(receiver: FileReceiver, version: Version) -> dict[str, Tensor]:
    """What an engine reads that takes files."""
    with receiver.fetch(version) as there:
        return {name: tensor for path in there.files for name, tensor in load_file(path).items()}


def fetched(receiver: FileReceiver, version: Version) -> dict[str, Tensor]:
    with receiver.fetch(version) as tensors:
        return dict(tensors)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all((as_bytes(a[n]) == as_bytes(b[n])).all() for n in a)


def steps(count: int, share: float = 0.003) -> list[dict[str, Tensor]]:
    """Versions of which each changes a few of the bits of the one before."""
    generator = torch.Generator().manual_seed(0)
    now = {f"layer.{i}": torch.randn(100_000 + i, generator=generator).bfloat16() for i in range(5)}
    now["scale"] = torch.ones((), dtype=torch.float32)
    versions = [now]
    for number in range(1, count):
        now = {n: t.clone() for n, t in now.items()}
        for tensor in list(now.values())[1:5]:  # layer.0 stays as it is
            at = torch.randint(tensor.numel(), (int(tensor.numel() * share),), generator=generator)
            tensor[at] += 1.0
        now["scale"] += number
        versions.append(now)
    return versions


def test_the_checksum_depends_on_content_alone() -> None:
    tensors = steps(1)[0]
    expected = checksum(digest(tensors.items()))
    assert checksum(digest(reversed(tensors.items()), bucket_bytes=MIB // 4)) == expected
    for name, changed in {
        "layer.3": tensors["layer.3"].view(torch.int16),
        "layer.1": tensors["layer.1"][:-1],
        "scale": tensors["scale"].reshape(1),
        "other": torch.zeros(0),
    }.items():
        assert checksum(digest((tensors | {name: changed}).items())) != expected, name


def test_any_reader_of_safetensors_takes_the_parts(run: RunDir) -> None:
    tensors = steps(1)[0] | {"at an odd place": torch.ones(3, dtype=torch.uint8), "empty": torch.zeros(0, 2)}
    version = publisher(run).publish(0, tensors.items)
    parts = sorted(tensors_path(run, version).glob("*.safetensors"))
    assert len(parts) > 3
    assert same(files(FileReceiver(run), version), tensors)


def test_changes_are_small_lossless_and_whole_versions_come_now_and_then(run: RunDir) -> None:
    trainer, worker, late = publisher(run, full_every=4), FileReceiver(run, run.root / "node"), FileReceiver(run)
    whole: list[int] = []
    sizes: list[int] = []
    for number, tensors in enumerate(steps(9)):
        version = trainer.publish(number, tensors.items)
        assert same(fetched(worker, version), tensors) and same(fetched(late, version), tensors)
        assert same(files(worker, version), tensors), "the node's copy is whole"
        assert same(files(late, version), tensors if number in (0, 4, 8) else {}), "changes are no version"
        folder = tensors_path(run, version)
        if read_json(folder / "index.json")["base"] is None:
            whole.append(number)
        sizes.append(sum(p.stat().st_size for p in folder.iterdir()))
        assert len(list((run.root / "node" / "relax_hpc-test" / "weights").glob("v*"))) <= 2
    assert whole == [0, 4, 8]
    assert max(size for n, size in enumerate(sizes) if n not in whole) < 0.05 * sizes[0]
    assert len(list(run.weights.glob("v*.i*"))) == 5, "6, 7, 8, and 4 and 5, which 6 and 7 are read by way of"


def test_signs_of_zero_and_kinds_of_nan_are_changes() -> None:
    base = torch.tensor([0.0, float("nan"), 1.0, 5.0] * 4096)
    new = base.clone()
    new[0] = -0.0
    new.view(torch.int32)[1] ^= 1
    made = delta.apply({"t": base}, dict(delta.encode("t", base, new)))["t"]
    assert (as_bytes(made) == as_bytes(new)).all() and delta.encode("t", base, base) == []
    assert (as_bytes(base[:1]) == 0).all(), "the base was changed in place"


def test_where_much_changed_the_whole_tensor_goes() -> None:
    base, new = torch.zeros(70_000).half(), torch.ones(70_000).half()
    assert [key for key, _ in delta.encode("t", base, new)] == ["whole:t"]
    assert [key for key, _ in delta.encode("t", base[1:], base)] == ["whole:t"], "another shape"


def tampered(run: RunDir, version: Version, **changes: object) -> None:
    path = tensors_path(run, version) / "index.json"
    about = read_json(path)
    replace(path, to_json({**about, "base": {**about["base"], **changes}}))


@pytest.mark.parametrize("wrong", [{"checksum": "0" * 32}, {"number": 0}])
def test_a_change_against_another_base_is_refused(run: RunDir, wrong: dict[str, object]) -> None:
    trainer = publisher(run, full_every=9)
    versions = [trainer.publish(n, tensors.items) for n, tensors in enumerate(steps(3))]
    tampered(run, versions[2], **wrong)
    with pytest.raises(DamagedWeights, match="checksum"):
        fetched(FileReceiver(run, run.root / "node"), versions[2])


def test_a_base_of_other_bits_is_refused_and_a_damaged_copy_is_replaced(run: RunDir) -> None:
    trainer, worker = publisher(run, full_every=9), FileReceiver(run, run.root / "node")
    tensors = steps(3)
    versions = [trainer.publish(n, t.items) for n, t in enumerate(tensors)]
    fetched(worker, versions[1])
    copies = run.root / "node" / "relax_hpc-test" / "weights"
    for path in copies.glob("v*/part-0000.safetensors"):
        flip(path)
    assert same(fetched(worker, versions[1]), tensors[1]), "this node's copy, damaged, was made again"
    for path in copies.glob("v*/part-0000.safetensors"):
        flip(path)
    assert same(fetched(worker, versions[2]), tensors[2]), "what a change is against was damaged: read from the disk"
    flip(tensors_path(run, versions[0]) / "part-0000.safetensors")
    with pytest.raises(DamagedWeights, match="checksum"):
        fetched(FileReceiver(run, run.root / "another node"), versions[2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_the_second_worker_of_a_node_maps_what_the_first_copied(run: RunDir) -> None:
    version = publisher(run, node_cache=False).publish(0, steps(1)[0].items)
    fetched(FileReceiver(run, run.root / "node"), version)
    for part in tensors_path(run, version).glob("part*"):
        part.write_bytes(b"")
    assert same(fetched(FileReceiver(run, run.root / "node"), version), steps(1)[0])
    with pytest.raises(DamagedWeights):
        fetched(FileReceiver(run, run.root / "another node"), version)


def test_a_version_missing_on_disk_is_asked_for_and_written_again(run: RunDir) -> None:
    trainer, tensors = publisher(run), steps(1)[0]
    version = trainer.publish(0, tensors.items)
    shutil.rmtree(tensors_path(run, version))
    shutil.rmtree(run.root / "trainer")
    assert not trainer.wanted()
    with pytest.raises(Exception, match="asked for it"):
        fetched(FileReceiver(run), version)
    trainer = publisher(run)
    assert trainer.wanted()
    assert trainer.publish(0, tensors.items) == version
    assert same(fetched(FileReceiver(run), version), tensors) and not trainer.wanted()


def test_two_buckets_are_the_most_that_is_held() -> None:
    lock, held, most = threading.Lock(), 0, 0

    def change(size: int) -> None:
        nonlocal held, most
        with lock:
            held += size
            most = max(most, held)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for i in range(100):
            change(MIB // 4)
            tensor = torch.zeros(MIB // 4, dtype=torch.uint8)
            weakref.finalize(tensor, change, -(MIB // 4))
            yield str(i), tensor
            del tensor

    def work(number: int, part: list[tuple[str, Tensor]]) -> int:
        time.sleep(0.02)
        return len(part)

    assert sum(in_threads(tensors(), work, 2 * MIB)) == 100
    assert MIB < most <= 4 * MIB, "bytes at once, of 25 MiB"


def test_what_fails_in_a_thread_fails_here_and_stops_the_rest() -> None:
    given = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for i in range(100):
            given.append(i)
            yield str(i), torch.zeros(MIB, dtype=torch.uint8)

    def work(number: int, part: list[tuple[str, Tensor]]) -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        in_threads(tensors(), work, 2 * MIB)
    assert len(given) < 10


def test_the_newest_version_is_known_a_second_later_though_stat_answers_from_a_cache(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = publisher(run, node_cache=False), FileReceiver(run)
    sender.publish(0, lambda: iter([("w", torch.zeros(4))]))
    now, path, stat = 1000.0, run.weights / "latest.json", os.stat
    monkeypatch.setattr(time, "monotonic", lambda: now)
    first, cached = receiver.newest(), stat(path)
    monkeypatch.setattr(os, "stat", lambda name, **more: cached if name == path else stat(name, **more))
    sender.publish(1, lambda: iter([("w", torch.ones(4))]))
    assert receiver.newest() == first
    now += READ_AGAIN_S + 0.01
    newest = receiver.newest()
    assert newest is not None and newest.number == 1


def test_a_damaged_name_of_the_newest_version_is_named_and_said_anew(run: RunDir) -> None:
    sender, path = publisher(run, node_cache=False), run.weights / "latest.json"
    export = lambda: iter([("w", torch.zeros(4))])
    sender.publish(0, export)
    for damage in (b"", b"{", b"[]", b'{"number": 3}'):
        path.write_bytes(damage)
        with pytest.raises(RunError, match=rf"'{path}', which names the newest weights, is damaged.*relax-hpc run"):
            FileReceiver(run).newest()
        publisher(run, node_cache=False).publish(0, export)
        newest = FileReceiver(run).newest()
        assert newest is not None and newest.number == 0


def test_a_fenced_trainer_announces_and_forgets_no_version(run: RunDir) -> None:
    """Its successor, which went on from an older checkpoint, compares what it replays with them."""
    sender = publisher(run, node_cache=False)
    for number in range(3):
        sender.publish(number, lambda: iter([("w", torch.ones(4))]))
    (run.lease / "commit_dir").rename(run.lease / "commit_dir.over")
    before = sorted(run.weights.glob("*.json"))
    sender.forget(2)
    with pytest.raises(FileNotFoundError):
        Versions(run, run.lease / "commit_dir", 1).announce(Version(3, 0, 1, "0"), {})
    assert len(before) == 4 and sorted(run.weights.glob("*.json")) == before


def test_names_that_are_no_versions_end_nothing(run: RunDir) -> None:
    for name in (
        "v00000000.l0.bak.json",
        "vabcdefgh.l0.i1",
        "v1.json",
        "v00000000.lx.json",
        "notes.json",
        "v00000000.l0.i1.old",
    ):
        (run.weights / name).write_text("not ours")
    sender = publisher(run, node_cache=False)
    for number in range(5):
        sender.publish(number, lambda: iter([("w", torch.ones(4))]))
    sender.forget(3)
    newest = FileReceiver(run).newest()
    assert newest is not None and newest.number == 4 and len(list(run.weights.glob("v*"))) > 6
