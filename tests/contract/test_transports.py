"""What every transport must do, whoever dies and when. A transport is added by adding it to TRANSPORTS."""

from __future__ import annotations

import functools
import itertools
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from relax_hpc.files.run_dir import RunDir
from relax_hpc.weights import (
    RENDEZVOUS,
    CollectivePublisher,
    CollectiveReceiver,
    DamagedWeights,
    FilePublisher,
    FileReceiver,
    Publisher,
    Receiver,
    Version,
    WeightsError,
    can_be_had,
)
from relax_hpc.weights.versions import tensors_path
from tests.runs import wait_for

torch.set_num_threads(1)
LIMIT_S = 3.0
"""How long one of a group may keep the others waiting."""


@dataclass
class Transport:
    """One run's transport, with hands to hurt it."""

    run: RunDir
    publisher: Callable[[Path, int], Publisher]
    receiver: Callable[[], Receiver]
    settle: Callable[[Publisher], None] = lambda publisher: None
    """Returns when what is published next reaches those who are there."""
    keeps_older: bool = True
    """Whether versions before the newest can be had for a while."""
    now: Remembering | None = None

    def incarnation(self, number: int) -> Path:
        """The folder of a new incarnation; the one before is fenced."""
        for old in self.run.lease.glob("000001/i??????"):
            old.rename(old.with_name(old.name + ".over"))
        commit_dir = self.run.lease / "000001" / f"i{number:06d}"
        commit_dir.mkdir(parents=True)
        return commit_dir

    def trainer(self, number: int) -> Remembering:
        if self.now is not None:
            self.now.publisher.close()
        self.now = Remembering(self.publisher(self.incarnation(number), number), self.settle)
        return self.now


class Remembering:
    """A trainer: its transport, and the weights that it holds."""

    def __init__(self, publisher: Publisher, settle: Callable[[Publisher], None]) -> None:
        self.publisher, self.settle = publisher, settle

    def publish(self, number: int, seed: int | None = None, pinned: Collection[int] = ()) -> Version:
        self.number, self.given = number, weights(number if seed is None else seed)
        self.settle(self.publisher)
        return self.publisher.publish(number, self.given.items, pinned=pinned)

    def look(self) -> None:
        """What it does all the time between two steps."""
        if self.publisher.wanted():
            self.publisher.publish(self.number, self.given.items)


def file_transport(run: RunDir) -> Transport:
    return Transport(run, lambda commit_dir, n: FilePublisher(run, commit_dir, n), lambda: FileReceiver(run))


def file_with_changes(run: RunDir) -> Transport:
    """The trainer on one node, which has a copy of its own; receivers on others, some of which had the version before."""
    nodes = itertools.count()

    def publisher(commit_dir: Path, number: int) -> Publisher:
        return FilePublisher(run, commit_dir, number, node_cache=run.root / "trainer", full_every=3, bucket_bytes=256)

    def receiver() -> Receiver:
        return FileReceiver(run, run.root / f"node-{next(nodes) % 3}")

    return Transport(run, publisher, receiver)


def by_group(run: RunDir, transport: str) -> Transport:
    """One worker, there from the beginning, in a group with the trainer."""
    rendezvous = RENDEZVOUS[transport]
    receiver = CollectiveReceiver(run, f"worker-{uuid.uuid4().hex}", rendezvous(run, LIMIT_S))

    def publisher(commit_dir: Path, number: int) -> Publisher:
        return CollectivePublisher(run, commit_dir, number, rendezvous(run, LIMIT_S, commit_dir), bucket_bytes=256)

    def settle(publisher: Publisher) -> None:
        assert isinstance(publisher, CollectivePublisher)
        wait_for(lambda: (publisher.wanted(), publisher.line)[1])

    return Transport(run, publisher, lambda: receiver, settle, keeps_older=False)


FILES = ["file", "file, changes"]
TRANSPORTS = {
    "file": file_transport,
    "file, changes": file_with_changes,
    **{t: functools.partial(by_group, transport=t) for t in ("gloo", "mpi")},
}
"""nccl: tests/distributed/test_weights_group.py."""


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Transport]:
    run = RunDir(tmp_path)
    run.create()
    run.identity.write_text('{"id": "contract"}')
    made = TRANSPORTS[request.param](run)
    yield made
    if made.now is not None:
        made.now.publisher.close()
    made.receiver().close()


def weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layer.weight": torch.randn(7, 5, generator=generator),
        "layer.bias": torch.randn(5, generator=generator).bfloat16(),
        "half": torch.randn(3, 1, 2, generator=generator).half(),
        "steps": torch.randint(-(2**40), 2**40, (4,), generator=generator),
        "scalar": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
        "odd values": torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 1e-45]),
    }


def fetch(transport: Transport, version: Version) -> dict[str, Tensor]:
    """As a worker does: what is not there yet is asked for."""
    for _ in range(2):
        try:
            with transport.receiver().fetch(version) as tensors:
                return {name: tensor.clone() for name, tensor in tensors}
        except WeightsError as error:
            if "asked for it" not in str(error) or transport.now is None:
                raise
            transport.now.look()
    raise AssertionError("asked for, and not brought")


def assert_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
        assert _bytes(got[name]) == _bytes(tensor), name


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def publish(publisher: Remembering, number: int, seed: int | None = None) -> Version:
    return publisher.publish(number, seed)


def newest(transport: Transport) -> Version:
    version = transport.receiver().newest()
    assert version is not None
    return version


@pytest.mark.quick
def test_the_same_bits_arrive(transport: Transport) -> None:
    assert transport.receiver().newest() is None
    version = publish(transport.trainer(1), 0)
    assert newest(transport) == version and (version.number, version.lineage) == (0, 0)
    assert_bits(fetch(transport, version), weights(0))


def test_a_late_joiner_gets_the_newest_and_its_neighbor_is_still_there(transport: Transport) -> None:
    publisher = transport.trainer(1)
    versions = [publish(publisher, n) for n in range(6)]
    assert newest(transport) == versions[5]
    for version in versions[4 if transport.keeps_older else 5 :]:
        assert_bits(fetch(transport, version), weights(version.number))


def test_a_retired_version_says_so(transport: Transport) -> None:
    publisher = transport.trainer(1)
    versions = [publish(publisher, n) for n in range(6)]
    with pytest.raises(WeightsError, match="version 0"):
        fetch(transport, versions[0])


def test_an_unknown_version_says_so(transport: Transport) -> None:
    publish(transport.trainer(1), 0)
    with pytest.raises(WeightsError, match="version 9"):
        fetch(transport, Version(9, 0, 1, "0" * 32))


def test_a_version_of_other_bits_is_refused(transport: Transport) -> None:
    version = publish(transport.trainer(1), 0)
    with pytest.raises(WeightsError):
        fetch(transport, Version(version.number, version.lineage, version.incarnation, "0" * 32))


@pytest.mark.quick
@pytest.mark.parametrize("transport", FILES, indirect=True)
def test_a_flipped_bit_on_disk_is_refused_before_a_tensor_is_given(transport: Transport) -> None:
    version = publish(transport.trainer(1), 0)
    path = tensors_path(transport.run, version) / "part-0000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedWeights, match="checksum"), transport.receiver().fetch(version):
        pytest.fail("a tensor was served")


def test_the_same_bits_again_are_the_same_version(transport: Transport) -> None:
    first = publish(transport.trainer(1), 0)
    assert publish(transport.trainer(2), 0) == first == newest(transport)


def test_a_replay_to_the_bit_changes_nothing_and_goes_on(transport: Transport) -> None:
    publisher = transport.trainer(1)
    before = [publish(publisher, n) for n in range(6)]
    successor = transport.trainer(2)
    for n in range(3, 6):
        assert publish(successor, n) == before[n]
        assert newest(transport) == before[5]
    sixth = publish(successor, 6)
    assert newest(transport) == sixth and (sixth.lineage, sixth.incarnation) == (0, 2)


@pytest.mark.quick
def test_a_replay_that_differs_opens_a_lineage(transport: Transport) -> None:
    publisher = transport.trainer(1)
    before = [publish(publisher, n) for n in range(6)]
    successor = transport.trainer(2)
    assert publish(successor, 3) == before[3]
    other = publish(successor, 4, seed=44)
    assert (other.number, other.lineage) == (4, 1) and newest(transport) == other
    assert_bits(fetch(transport, other), weights(44))
    if transport.keeps_older:
        assert_bits(fetch(transport, before[5]), weights(5))  # who reads it may finish
    fifth = publish(successor, 5, seed=55)
    assert fifth.lineage == 1 and newest(transport) == fifth


def test_a_lineage_goes_on_after_a_restart(transport: Transport) -> None:
    """The third trainer replays what the second began: version 3 of the old lineage, 4 and 5 of the new, then new ones."""
    first = transport.trainer(1)
    before = [publish(first, n) for n in range(7)]
    second = transport.trainer(2)
    publish(second, 3)
    changed = [publish(second, 4, seed=44), publish(second, 5, seed=55)]
    third = transport.trainer(3)
    assert publish(third, 3) == before[3]
    assert newest(transport) == changed[1], "a version that is no news must not take the place of a newer one"
    assert [publish(third, 4, seed=44), publish(third, 5, seed=55)] == changed
    assert newest(transport) == changed[1]
    sixth = publish(third, 6, seed=66)
    assert (sixth.number, sixth.lineage) == (6, 1) and newest(transport) == sixth
    assert_bits(fetch(transport, sixth), weights(66))


def test_a_name_belongs_to_one_content_for_ever(transport: Transport) -> None:
    seen: dict[tuple[int, int], str] = {}
    for incarnation, seeds in enumerate([[0, 1, 2, 3], [1, 2, 30], [10, 20], [1, 2, 3, 4], [2, 30]], 1):
        publisher = transport.trainer(incarnation)
        begin = 4 - len(seeds) if incarnation != 4 else 0
        for number, seed in enumerate(seeds, begin):
            version = publish(publisher, number, seed)
            assert seen.setdefault((version.number, version.lineage), version.checksum) == version.checksum
            if transport.keeps_older or version == newest(transport):
                assert_bits(fetch(transport, version), weights(seed))


def test_a_fenced_publisher_changes_nothing(transport: Transport) -> None:
    publisher = transport.trainer(1)
    versions = [publish(publisher, n) for n in range(3)]
    transport.incarnation(2)
    for number, seed in ((3, 3), (2, 22), (9, 9)):
        with pytest.raises(FileNotFoundError):
            publish(publisher, number, seed)
    assert newest(transport) == versions[2]
    for version in versions if transport.keeps_older else []:
        assert_bits(fetch(transport, version), weights(version.number))


FETCH = """
import sys
from relax_hpc.files.run_dir import RunDir
from relax_hpc.weights import FileReceiver
receiver = FileReceiver(RunDir(sys.argv[1]))
print("ready", flush=True)
while True:
    with receiver.fetch(receiver.newest()) as tensors:
        for name, tensor in tensors:
            tensor.clone()
"""


@pytest.mark.parametrize("transport", FILES[:1], indirect=True)
def test_file_receivers_killed_while_they_fetch_harm_nothing(transport: Transport) -> None:
    publisher = transport.trainer(1)
    publish(publisher, 0)
    for attempt in range(2):
        command = [sys.executable, "-c", FETCH, str(transport.run.root)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.05)
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        version = publish(publisher, attempt + 1)
        assert_bits(fetch(transport, version), weights(attempt + 1))


PUBLISH = """
import itertools, sys, torch
from pathlib import Path
from relax_hpc.files.run_dir import RunDir
from relax_hpc.weights import FilePublisher
publisher = FilePublisher(RunDir(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
print("ready", flush=True)
for number in itertools.count(int(sys.argv[4])):
    publisher.publish(number, lambda: [("w", torch.full((200_000,), float(number)))])
"""


def test_file_a_publisher_killed_at_any_moment_leaves_whole_versions(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    transport, begin = file_transport(run), 0
    for attempt in range(1, 3):
        commit_dir = transport.incarnation(attempt)
        command = [sys.executable, "-c", PUBLISH, str(run.root), str(commit_dir), str(attempt), str(begin)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        wait_for(lambda: transport.receiver().newest())
        time.sleep(0.05 + 0.03 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        version = newest(transport)
        got = fetch(transport, version)
        assert torch.equal(got["w"], torch.full((200_000,), float(version.number)))
        assert version.lineage == 0, "the same bits opened a lineage"
        begin = max(0, version.number - 2)


@pytest.mark.parametrize("transport", FILES, indirect=True)
def test_file_one_that_died_before_it_said_newest_is_made_good(transport: Transport) -> None:
    """Manifest published, then killed: the replay finds the version there, and workers must hear of it all the same."""
    run = transport.run
    publisher = transport.trainer(1)
    publish(publisher, 0)
    shutil.copy(run.weights / "latest.json", run.root / "before")
    first = publish(publisher, 1)
    shutil.copy(run.root / "before", run.weights / "latest.json")
    assert newest(transport).number == 0
    successor = transport.trainer(2)
    publish(successor, 0)
    assert newest(transport).number == 0
    assert publish(successor, 1) == first == newest(transport)


@pytest.mark.parametrize("transport", FILES, indirect=True)
def test_file_cut_to_nothing_is_refused(transport: Transport) -> None:
    version = publish(transport.trainer(1), 0)
    (path,) = transport.run.weights.glob("v*/part-0000.safetensors")
    path.write_bytes(b"")
    with pytest.raises(WeightsError, match="checksum"):
        fetch(transport, version)


def test_pinned_versions_can_be_had_after_any_number_of_others_and_no_longer(transport: Transport) -> None:
    """An evaluation's version, for who may just have come. Manifests stay with them, whatever checkpoints there are."""
    publisher = transport.trainer(1)
    pinned = [publisher.publish(n, pinned=[1, 4]) for n in range(9)][1:5:3]
    publisher.publisher.forget(7, pinned=[1, 4])
    for version in pinned:
        assert can_be_had(transport.run, version.number, version.lineage)
        assert_bits(fetch(transport, version), weights(version.number))
    publisher.publish(9, pinned=[4])
    publisher.publish(10, pinned=[4])
    assert not can_be_had(transport.run, 1, 0) and can_be_had(transport.run, 4, 0)
    with pytest.raises(WeightsError):
        fetch(transport, pinned[0])
    (part,) = transport.run.weights.glob("v00000004.*/part-0000.safetensors")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    assert not can_be_had(transport.run, 4, 0), "damaged"


@pytest.mark.parametrize("transport", FILES, indirect=True)
def test_file_keeps_no_more_tensors_than_it_says(transport: Transport) -> None:
    publisher = transport.trainer(1)
    for n in range(8):
        publish(publisher, n)
    assert 3 <= len(list(transport.run.weights.glob("v*.i*"))) <= 5, "three, and what they are a change against"
    publisher.publisher.forget(6)
    assert sorted(p.name[:9] for p in transport.run.weights.glob("v*.json")) == ["v00000006", "v00000007"]
    assert not list(transport.run.weights.glob(".*"))
