"""Versions broadcast between real processes, and what happens when one of them dies, hangs or lies."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, Queue

import psutil
import pytest
import torch
from torch import Tensor

from relax_hpc.files.run_dir import RunDir
from relax_hpc.weights import CollectivePublisher, CollectiveReceiver, Version, WeightsError
from relax_hpc.weights.groups.gloo import GlooGroup
from relax_hpc.weights.groups.protocol import GroupError
from relax_hpc.weights.versions import latest, tensors_path
from tests.rendezvous import RENDEZVOUS
from tests.runs import wait_for

ROOT = Path(__file__).parents[2]
LIMIT_S = 3.0
SLACK_S = 5.0
TENSORS, ELEMENTS = 24, 2_000_000
"""More, after the half, than a group has on its way at once."""

WORKER = """
import sys, time, torch
from relax_hpc.files.run_dir import RunDir
from relax_hpc.weights import CollectiveReceiver, WeightsError
from tests.rendezvous import RENDEZVOUS
torch.set_num_threads(1)
run, held, group = RunDir(sys.argv[1]), None, 0
receiver = CollectiveReceiver(run, sys.argv[2], RENDEZVOUS[sys.argv[4]](run, float(sys.argv[3])))
while True:
    if receiver.sessions != group:
        group = receiver.sessions
        print("groups", group, flush=True)
    newest = receiver.newest()
    if newest is not None and newest != held:
        try:
            with receiver.fetch(newest) as tensors:
                sums = {float(tensor.float().mean()) for _, tensor in tensors}
            held = newest
            print("holds", newest.number, *sums, flush=True)
        except WeightsError:
            pass
    time.sleep(0.01)
"""

SENDER = """
import os, sys, time
import tests.distributed.test_weights_group as t
from relax_hpc.files.run_dir import RunDir
trainer = t.Trainer(RunDir(sys.argv[1]), 2, sys.argv[2])
trainer.gather({"b", "c"})
trainer.publish(7)
print("sends", flush=True)
trainer.publish(8, at_half=lambda: (time.sleep(1), os.kill(os.getpid(), 9)))  # when the first half has come
"""


class Worker:
    """A process that takes every version it can get, and what it says."""

    def __init__(self, run: RunDir, name: str, transport: str) -> None:
        command = [sys.executable, "-c", WORKER, str(run.root), name, str(LIMIT_S), transport]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        self.lines: Queue[str] = Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.strip())

    def says(self, expected: str, meanwhile: Callable[[], object] = lambda: None, timeout_s: float = 60) -> None:
        """Wait for a line, which comes before any other version."""
        deadline = time.monotonic() + timeout_s
        while True:
            meanwhile()
            try:
                line = self.lines.get(timeout=0.02)
            except Empty:
                assert time.monotonic() < deadline, f"'{expected}' never came"
                continue
            if line == expected:
                return
            assert not (line.startswith("holds") and expected.startswith("holds")), f"{line}, expected {expected}"


class Trainer:
    """What a trainer does with its transport."""

    def __init__(self, run: RunDir, incarnation: int, transport: str) -> None:
        self.run, self.commit_dir = run, run.lease / "000001" / f"i{incarnation:06d}"
        for old in run.lease.glob("000001/i??????"):
            old.rename(old.with_name(old.name + ".over"))
        self.commit_dir.mkdir(parents=True)
        rendezvous = RENDEZVOUS[transport](run, LIMIT_S, self.commit_dir)
        self.publisher = CollectivePublisher(run, self.commit_dir, incarnation, rendezvous, bucket_bytes=4 * ELEMENTS)
        self.number = -1

    def gather(self, names: set[str]) -> None:
        wait_for(lambda: (self.look(), self.publisher.joined == names)[1])

    def publish(self, number: int, at_half: Callable[[], None] = lambda: None) -> tuple[Version, float]:
        """And the seconds that it took."""
        self.number, began = number, time.monotonic()
        return self.publisher.publish(number, lambda: self.export(at_half)), time.monotonic() - began

    def export(self, at_half: Callable[[], None] = lambda: None) -> Iterator[tuple[str, Tensor]]:
        for i in range(TENSORS):
            if i == TENSORS // 2:
                at_half()
            yield f"layer.{i}", torch.full((ELEMENTS,), float(self.number)).bfloat16()

    def look(self) -> None:
        """Between two steps."""
        if self.publisher.wanted() and self.number >= 0:
            self.publisher.publish(self.number, self.export)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    return run


@pytest.fixture(params=["gloo", "mpi"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def start(run: RunDir, transport: str) -> Iterator[Callable[[str], Worker]]:
    workers: list[Worker] = []

    def begin(name: str) -> Worker:
        workers.append(Worker(run, name, transport))
        return workers[-1]

    yield begin
    for worker in workers:
        worker.process.kill()
        worker.process.wait()


def test_a_group_that_loses_members_and_gets_new_ones(
    run: RunDir, start: Callable[[str], Worker], transport: str
) -> None:
    before = set(Path("/dev/shm").glob("mpich_shm_*"))
    a, b, trainer = start("a"), start("b"), Trainer(run, 1, transport)
    on_disk = lambda version: tensors_path(run, version).exists()
    trainer.gather({"a", "b"})
    version, _ = trainer.publish(0)
    for worker in (a, b):
        worker.says("holds 0 0.0")
    assert not on_disk(version), "it came by files"

    # A receiver is killed in mid-broadcast: an error within the limit, the version goes by files, the others go on.
    version, seconds = trainer.publish(1, at_half=lambda: (a.process.kill(), a.process.wait())[0])
    assert seconds < LIMIT_S + SLACK_S
    b.says("holds 1 1.0", trainer.look)
    assert on_disk(version)
    trainer.gather({"b"})
    version, _ = trainer.publish(2)
    b.says("holds 2 2.0")
    assert not on_disk(version)

    # One that hangs holds nobody up for longer than the limit.
    version, seconds = trainer.publish(3, at_half=lambda: b.process.send_signal(signal.SIGSTOP))
    assert LIMIT_S / 2 < seconds < LIMIT_S + SLACK_S
    b.process.send_signal(signal.SIGCONT)
    b.says("holds 3 3.0", trainer.look)

    # One that comes late takes the version there is by files, and the next one from the group.
    c = start("c")
    c.says("holds 3 3.0", trainer.look)
    trainer.gather({"b", "c"})
    version, _ = trainer.publish(4)
    for worker in (b, c):
        worker.says("holds 4 4.0")
    assert not on_disk(version)

    # MPI crashes at the trainer: an error of that publish only.
    if transport == "mpi":
        child = trainer.publisher.line.group.child
        version, seconds = trainer.publish(5, at_half=lambda: os.kill(child.process.pid, signal.SIGSEGV))
        assert seconds < SLACK_S and not child.alive
        for worker in (b, c):
            worker.says("holds 5 5.0", trainer.look)
        assert on_disk(version)
        trainer.gather({"b", "c"})

    # A byte that changes on the wire: what arrives is not the version that was announced.
    group, broadcast = trainer.publisher.line.group, trainer.publisher.line.group.broadcast

    def flip(tensors: Sequence[Tensor], timeout_s: float | None = None) -> None:
        sent = [tensor.clone() for tensor in tensors]
        sent[-1][-1] ^= len(sent[-1]) >= 2 * ELEMENTS
        broadcast(sent, timeout_s)

    group.broadcast = flip
    version, _ = trainer.publish(6)
    for worker in (b, c):
        worker.says("holds 6 6.0", trainer.look)
    assert on_disk(version), "a worker took bits that nobody announced"

    # The sender is killed in mid-broadcast: an error within the limit; everybody holds what it held.
    trainer.publisher.close()
    for worker in (b, c):
        worker.says("groups 0")
    with subprocess.Popen(
        [sys.executable, "-c", SENDER, str(run.root), transport], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as sender:
        assert sender.stdout is not None and sender.stdout.readline() == "sends\n"
        assert sender.wait(60) == -signal.SIGKILL
    for worker in (b, c):
        worker.says("holds 7 7.0")
        worker.says("groups 0", timeout_s=LIMIT_S + SLACK_S)
    assert (latest(run) or version).number == 7
    successor = Trainer(run, 3, transport)
    successor.gather({"b", "c"})
    version, _ = successor.publish(8)
    for worker in (b, c):
        worker.says("holds 8 8.0")
    assert not on_disk(version) and version.incarnation == 3
    assert set(Path("/dev/shm").glob("mpich_shm_*")) <= before, "the dead left memory behind"


@pytest.mark.parametrize("transport", ["nccl"], indirect=True)
def test_what_speaks_nccl_is_killed_on_either_side(run: RunDir, start: Callable[[str], Worker]) -> None:
    """The rest is as with gloo, by which it is said what comes."""
    worker, trainer = start("a"), Trainer(run, 1, "nccl")
    trainer.gather({"a"})
    version, _ = trainer.publish(0)
    worker.says("holds 0 0.0")
    assert not tensors_path(run, version).exists(), "it came by files"
    for number, pid in enumerate((worker.process.pid, os.getpid()), 1):
        (child,) = speaking_nccl(pid)
        version, seconds = trainer.publish(number, at_half=child.kill)
        assert seconds < LIMIT_S + SLACK_S
        worker.says(f"holds {number} {float(number)}", trainer.look)
        assert tensors_path(run, version).exists()
        trainer.gather({"a"})
    version, _ = trainer.publish(3)
    worker.says("holds 3 3.0")
    assert not tensors_path(run, version).exists()
    trainer.publisher.close()
    wait_for(lambda: not speaking_nccl(worker.process.pid) and not speaking_nccl(os.getpid()))


def speaking_nccl(pid: int) -> list[psutil.Process]:
    """The living children of a process that do."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):  # it is gone, or nobody took leave of it yet
            if "nccl_process" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.mark.quick
@pytest.mark.parametrize("transport", ["gloo"], indirect=True)
def test_nobody_answers(run: RunDir, transport: str) -> None:
    """Names of the dead cost some seconds of a thread, once; the trainer publishes by files meanwhile."""
    (run.weights / "members").mkdir()
    (run.weights / "members" / "dead").write_text("{}")
    trainer = Trainer(run, 1, transport)
    version, seconds = trainer.publish(0)
    assert seconds < 2 and tensors_path(run, version).exists()
    with pytest.raises(GroupError, match="nobody answered"):
        RENDEZVOUS[transport](run, LIMIT_S, trainer.commit_dir).form(frozenset({"dead"}))
    assert not os.listdir(run.weights / "members")


@pytest.mark.parametrize("transport", RENDEZVOUS, indirect=True)
def test_tensors_of_all_sizes_a_long_description_of_them_and_others_later(run: RunDir, transport: str) -> None:
    """3000 names are many messages of a child; tensors that are not those described before end the group, and nothing else."""
    receiver, trainer = CollectiveReceiver(run, "a", RENDEZVOUS[transport](run, LIMIT_S)), Trainer(run, 1, transport)
    sizes = (
        {"none": 0} | {f"layer.{i}.router": 64 for i in range(3000)} | {"embedding": 3_000_000, "nothing": 0, "norm": 3}
    )
    fewer = {name: size for name, size in sizes.items() if name != "nothing"}
    trainer.publisher._bucket_bytes = 64 << 20

    def comes_by_group(number: int, sizes: dict[str, int]) -> bool:
        """A version arrives as it was sent; whether nothing was written for it."""
        given = {name: torch.randn(size) for name, size in sizes.items()}
        version = trainer.publisher.publish(number, given.items)
        while True:
            with contextlib.suppress(WeightsError), receiver.fetch(version) as read:
                got = dict(read)
                assert got.keys() == given.keys() and all(torch.equal(got[name], given[name]) for name in given)
                return not tensors_path(run, version).exists()
            assert trainer.publisher.wanted(), "it did not come, and nobody asked for it"
            trainer.publisher.publish(number, given.items)

    for number, other in enumerate(({**sizes, "norm": 5}, {**sizes, "head": 9}, fewer)):
        trainer.gather({"a"})
        assert comes_by_group(3 * number, sizes) and comes_by_group(3 * number + 1, sizes)
        assert not comes_by_group(3 * number + 2, other)
    trainer.publisher.close()
    receiver.close()


def test_gloo_s_time_limit_is_not_for_many_large_tensors_together(tmp_path: Path) -> None:
    """A receiver asks for all; each comes in time, all of them do not."""
    limit_s, gap_s, count = 2.0, 0.4, 8
    tensors = [torch.full((16 << 20,), i, dtype=torch.uint8) for i in range(count)]
    group = lambda rank: GlooGroup(torch.distributed.FileStore(str(tmp_path / "store"), 2), rank, 2, limit_s, True)

    def send() -> None:
        sender = group(0)
        for tensor in tensors:
            time.sleep(gap_s)
            sender.broadcast([tensor])

    sends = threading.Thread(target=send)
    sends.start()
    came = [torch.empty_like(tensor) for tensor in tensors]
    arrived: list[int] = []
    group(1).broadcast(came, arrived=arrived.append)
    sends.join()
    assert arrived == list(range(count)) and all(torch.equal(a, b) for a, b in zip(came, tensors, strict=True))
