"""A rollout worker between orders: what it reads of weights, and what becomes of an order whose weights cannot be had."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from relax_hpc.engines import EngineRestarted
from relax_hpc.recipe import dump_recipe
from relax_hpc.roles.process import RoleProcess, Stop
from relax_hpc.roles.rollout import RolloutWorker
from relax_hpc.run_dir import RunDir, RunError, to_json
from relax_hpc.spool.orders import Order
from relax_hpc.spool.queue import Queue
from relax_hpc.spool.shard import Shard
from relax_hpc.telemetry import read_metrics
from relax_hpc.weights import FilePublisher
from tests import tiny
from tests.runs import wait_for


class Setup:
    """A worker, and the trainer's side of its run."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDir(folder)
        self.run.create()
        recipe = tiny.recipe(model={"context": 256}, rollout={"device": "cpu"})
        self.run.recipe.write_text(dump_recipe(recipe))
        self.run.identity.write_bytes(to_json({"id": "test"}))
        self.weights = load_file(tiny.folder(recipe, self.run.model) / "model.safetensors")
        (via := self.run.lease / "000001").mkdir()
        self.publisher = FilePublisher(self.run, via, 1)
        about = argparse.Namespace(
            run=folder, name="rollout-0", attempt=0, supervisor=None, role="rollout", workplace="w"
        )
        self.process = RoleProcess(about)
        self.worker = RolloutWorker(self.process, "w")

    def publish(self, version: int, pinned: Collection[int] = ()) -> None:
        given = [(name, tensor + version) for name, tensor in self.weights.items()]
        self.publisher.publish(version, lambda: given, pinned=pinned)

    def release(self, batch: int) -> None:
        Queue(self.run).put([Order(f"o{batch:06d}-000", ((0, 1),), 1, 1, 0)])

    def evaluate(self, version: int) -> None:
        Queue(self.run).put([Order(f"e{version:06d}-000", ((0, 1), (0, 2)), 2, 1, version)])

    def play(self) -> None:
        claim, waited_s = self.worker.wait_for_claim()
        self.worker.play(claim, waited_s)
        wait_for(self.run.shard(claim.order.id).exists)

    def versions_of(self, order: str) -> set[int]:
        """That made its tokens, and that its shard says."""
        with Shard(self.run.shard(order)) as shard:
            return {*shard.versions(0, int(shard.offsets[-1])).tolist(), shard.meta["version"]}

    def open_orders(self) -> list[str]:
        return sorted(os.listdir(self.run.open_orders))


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    made = Setup(tmp_path / "run")
    yield made
    made.worker.publisher.close()
    made.worker.player.close()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_versions_are_read_with_an_order_not_before(setup: Setup) -> None:
    seen: list[int] = []

    def trainer() -> None:
        wait_for(lambda: setup.worker.held is not None)
        for version in (1, 2, 3):
            setup.publish(version)
        time.sleep(0.3)  # many looks
        seen.append(setup.worker.held.number if setup.worker.held else -1)
        setup.release(0)

    setup.publish(0)
    thread = threading.Thread(target=trainer)
    thread.start()
    claim, waited_s = setup.worker.wait_for_claim()
    thread.join()
    assert seen == [0], "a version was read that nothing was played with"
    assert setup.worker.held is not None and setup.worker.held.number == setup.worker.engine.version == 3
    assert claim.ticket.name == "o000000-000.a0.v3"
    setup.worker.play(claim, waited_s)
    setup.worker.publisher.close()
    setup.worker.report_published()
    (said,), _ = read_metrics(setup.run.metrics / "rollout-0.jsonl")
    assert 0 < said["sync_s"] < said["wait_s"] == waited_s and said["swap_s"] == 0 < said["generate_s"]


def test_an_order_whose_weights_are_damaged_is_open_again_and_no_worker_died_on_it(setup: Setup) -> None:
    setup.publish(0)
    setup.worker.take()
    setup.publish(1)
    for part in setup.run.weights.glob("v00000001.*/part-*"):
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(data)
    setup.release(0)
    with pytest.raises(RunError, match="resume with"):
        setup.worker.wait_for_claim()
    assert setup.open_orders() == ["o000000-000.a0.v1"]


def test_a_worker_that_is_asked_to_stop_while_it_waits_for_weights_gives_its_order_back(setup: Setup) -> None:
    setup.publish(0)
    setup.worker.take()
    setup.publish(1)
    for folder in setup.run.weights.glob("v00000001.*.i*"):
        shutil.rmtree(folder)
    setup.release(0)

    def stop() -> None:
        wait_for(lambda: any(setup.run.weights.glob("wanted/*")) and not setup.open_orders())
        setup.process.stopping = True

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Stop):
        setup.worker.wait_for_claim()
    thread.join()
    assert setup.open_orders() == ["o000000-000.a0.v1"]


def test_an_evaluation_is_played_by_the_version_that_it_names_however_many_came_since(setup: Setup) -> None:
    setup.publish(0)
    setup.evaluate(0)
    for version in range(1, 7):
        setup.publish(version, pinned=[0])
    setup.worker.take()
    assert setup.worker.held is not None and setup.worker.held.number == 6
    setup.play()
    assert setup.versions_of("e000000-000") == {0}
    setup.release(0)
    setup.play()
    assert setup.versions_of("o000000-000") == {6}, "training goes on with the newest"


def test_an_evaluation_whose_engine_was_lost_goes_on_with_the_same_version(setup: Setup) -> None:
    setup.publish(0)
    setup.evaluate(0)
    generate = setup.worker.engine.generate

    def lost(*arguments: Any, **named: Any) -> Any:
        setup.worker.engine.generate = generate  # type: ignore[method-assign]
        setup.publish(1, pinned=[0])
        raise EngineRestarted("the engine was lost, and is there again")

    setup.worker.engine.generate = lost  # type: ignore[method-assign]
    setup.play()
    assert setup.versions_of("e000000-000") == {0}


def test_an_evaluation_whose_weights_are_gone_is_open_again_and_the_run_says_so(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_hpc.roles.rollout.GONE_S", 0.01)
    for version in range(6):
        setup.publish(version)
    setup.evaluate(0)
    with pytest.raises(
        RunError, match=r"e000000-000 is to be played by version 0, whose weights are gone.*gives it up"
    ):
        setup.worker.wait_for_claim()
    assert setup.open_orders() == ["e000000-000.a0.v0"]


def test_nothing_is_kept_of_an_evaluation_that_another_version_played(setup: Setup) -> None:
    """Such as by a server whose weights somebody else changed."""
    setup.publish(0)
    setup.evaluate(0)
    claim, waited_s = setup.worker.wait_for_claim()
    setup.worker.engine.version = 3
    with pytest.raises(RunError, match=r"e000000-000 was played by versions .*\(3, 0\).*not by the one that it names"):
        setup.worker.play(claim, waited_s)
    assert not setup.run.shard("e000000-000").exists()
