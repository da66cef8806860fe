"""What is published over a file system that fails: whichever call goes wrong, a name has all of its content, on the disk, or is not there,
and who tries again loses nothing. Each error names a file, and none passes for success."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from relax_hpc import checkpoint
from relax_hpc.files import folder_checksums, publish, tensor_files
from relax_hpc.files.run_dir import RunDir
from relax_hpc.spool import reading
from relax_hpc.spool.ledger import Entry, Ledger, Taken
from relax_hpc.spool.queue import RequestQueue, publish_shard
from relax_hpc.spool.reading import Shards
from relax_hpc.spool.request import Request
from relax_hpc.spool.shard import DamagedShard
from tests.unit.test_shard_damage import shard
from tools.faults.calls import Faults, inject

DATA = [b"first ", b"and second piece" * 9000]
WHOLE = b"".join(DATA)
ENTRY = Entry(step=3, incarnation=1, lineage=0, take=(Taken("r000000-000", 0),), time=1.0)
REQUEST = Request("r000000-000", ((0, 0),), 4, 0, 0)
KINDS = (("before", errno.EIO), ("lost", errno.EIO), ("before", errno.ENOSPC))


def commit_dir(run: RunDir) -> Path:
    return run.lease / "000001" / "i000001"


def replaced(run: RunDir) -> Path:
    return run.root / "replaced"


def whole_file(path: Path, contents: tuple[bytes, ...] = (WHOLE,)) -> bool:
    assert not path.exists() or path.read_bytes() in contents
    return path.exists() and path.read_bytes() == WHOLE


def commit_entry(run: RunDir) -> None:
    ledger = Ledger(run, commit_dir(run))
    assert ledger.find(3) in (None, ENTRY)
    assert ledger.commit(ENTRY) == ENTRY == ledger.find(3)


def generate(run: RunDir) -> None:
    """A worker that publishes its request; what one before it, which died, had claimed was given back."""
    queue = RequestQueue(run)
    if queue.workers():
        queue.give_back("w", lost=True)
    if not queue.in_progress() and not run.shard(REQUEST.id).exists():
        queue.put([REQUEST])
    queue.open_claim_dir("w")
    claim = queue.claim("w", 0)
    if claim is not None:
        publish_shard(run, claim, DATA, "w")
    assert queue.in_progress() == {}


def write_checkpoint(run: RunDir) -> None:
    folder = checkpoint.begin(commit_dir(run), 3)
    tensor_files.write(folder / "model.safetensors", [("w", torch.arange(5000.0))], durable=True)
    checkpoint.commit(run, folder, 3, {"said": 1})


def whole_checkpoint(run: RunDir) -> bool:
    for step in run.checkpoint_steps():
        folder_checksums.compare_all(run.checkpoint(step))
        assert set(os.listdir(run.checkpoint(step))) == {"model.safetensors", "state.json", "DONE"}
    return run.checkpoint_steps() == [3]


@pytest.mark.parametrize(
    ("act", "is_whole", "calls"),
    [
        (lambda run: publish.publish(run.root / "new", DATA), lambda run: whole_file(run.root / "new"), {"writev", "fsync", "link"}),
        (lambda run: publish.replace(replaced(run), DATA), lambda run: whole_file(replaced(run), (WHOLE, b"old")), {"writev", "fsync", "rename"}),
        (commit_entry, lambda run: Ledger(run).find(3) in (None, ENTRY) and run.ledger_entry(3).exists(), {"writev", "fsync", "link", "read"}),
        (generate, lambda run: whole_file(run.shard(REQUEST.id)), {"writev", "fsync", "link", "read"}),
        (write_checkpoint, whole_checkpoint, {"writev", "fsync", "rename"}),
    ],
    ids=["publish", "replace", "ledger", "shard", "checkpoint of tensor files"],
)  # fmt: skip
def test_whichever_call_fails_a_name_has_all_of_its_content_on_the_disk_and_the_next_attempt_succeeds(
    tmp_path: Path, act: Callable[[RunDir], object], is_whole: Callable[[RunDir], bool], calls: set[str]
) -> None:
    wrong = set[str]()
    for kind, (how, error) in enumerate(KINDS):
        number, hit = 0, "none yet"
        while hit:
            number += 1
            run = RunDir(tmp_path / f"run{kind}-{number}")
            run.create()
            commit_dir(run).mkdir(parents=True)
            replaced(run).write_bytes(b"old")
            hit = attempt(run, act, is_whole, number, how, error)
            act(run)
            assert is_whole(run), hit
            wrong.add(hit.partition(" ")[0])
    assert calls <= wrong


def attempt(
    run: RunDir, act: Callable[[RunDir], object], is_whole: Callable[[RunDir], bool], number: int, how: str, error: int
) -> str:
    """`act` with its call `number` failing; which one that was."""
    with pytest.MonkeyPatch.context() as patch:
        faults = inject(patch, run.root)
        named_early = watch_flushes(faults, number, how, error)
        try:
            act(run)
        except OSError as failure:
            assert failure.errno == error and failure.filename, f"call {number}, {faults.hit}: {failure}"
        else:
            with faults.spared():
                assert is_whole(run), f"call {number}, {faults.hit}: an error passed for success"
    is_whole(run)  # not torn, if it is there
    assert not named_early, f"call {number}, {faults.hit}: {named_early} had a name before they were on the disk"
    return faults.hit


def watch_flushes(faults: Faults, number: int, how: str, error: int) -> list[str]:
    """Have the call `number` fail; the list gets the files that are given their name before they were flushed."""
    faults.error = error
    early, flushed = list[str](), set[str]()

    def rule(n: int, call: str, path: str) -> str | None:
        if call == "fsync" and n != number:
            flushed.add(path)
        if call in ("link", "rename") and "/open/" not in path and "/claimed/" not in path:  # requests are not flushed
            with faults.spared():
                files = [path] if os.path.isfile(path) else [entry.path for entry in os.scandir(path)]
            early.extend(file for file in files if file not in flushed)
        return how if n == number else None

    faults.rule = rule
    return early


def test_a_shard_that_the_file_system_fails_to_give_is_damaged_only_when_that_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PAUSE_S", 0.001)
    run = RunDir(tmp_path / "run")
    run.create()
    run.identity.write_bytes(publish.to_json({"id": "mine"}))
    path = run.shard("r000001-000")
    path.parent.mkdir(parents=True, exist_ok=True)
    for lengths in ((5, 9), (400_000, 9)):  # read at once when it is opened, and piece by piece
        shard(path, lengths)
        size = Shards(run, None).read("r000001-000", lambda one: one.bytes)
        for often, call in ((2, "open"), (2, "preadv"), (99, "open")):
            with monkeypatch.context() as patch:
                faults, left = inject(patch, path.parent), often

                def rule(n: int, name: str, of: str, call: str = call) -> str | None:
                    nonlocal left
                    left -= name == call
                    return "before" if name == call and left >= 0 else None

                faults.rule, faults.error = rule, errno.ESTALE
                reads = lambda: Shards(run, None).read("r000001-000", lambda one: (one.rollouts(), one.bytes)[1])
                if often == 99:
                    with pytest.raises(DamagedShard, match="r000001-000.*[Ss]tale"):
                        reads()
                else:
                    assert reads() == size


@pytest.mark.parametrize("error", [errno.ENOENT, errno.ESTALE])
@pytest.mark.parametrize("call", ["read", "close"])
def test_a_file_that_was_replaced_while_it_was_read_is_read_again_and_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    """GlusterFS opens a file when it is first read, and closes it likewise: what was replaced in between is "no such file"."""
    path = tmp_path / "latest.json"
    publish.replace(path, publish.to_json({"number": 3}))
    faults = inject(monkeypatch, tmp_path)
    left = iter([call, call])
    wanted = next(left, None)

    def rule(n: int, name: str, of: str) -> str | None:
        nonlocal wanted
        if name != wanted:
            return None
        wanted = next(left, None)
        return "before"

    faults.rule, faults.error = rule, error
    assert publish.read_json(path) == {"number": 3}
    assert wanted is None, "it failed twice"
    path.unlink()
    assert publish.read_json(path) is None
