"""A rollout worker between requests: what it reads of weights, and what becomes of a request whose weights cannot be had."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from relax_hpc import open_run
from relax_hpc.engines import EngineRestarted
from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe import dump_recipe, load_recipe
from relax_hpc.records import Finish
from relax_hpc.roles.common.process import RoleProcess, Stop
from relax_hpc.roles.rollout.worker import RolloutWorker
from relax_hpc.spool.queue import RequestQueue
from relax_hpc.spool.request import Request
from relax_hpc.spool.shard import Shard
from relax_hpc.telemetry import read_metrics
from relax_hpc.weights import FilePublisher
from tests import tiny
from tests.runs import wait_for


class Setup:
    """A worker, and the trainer's side of its run."""

    def __init__(self, folder: Path, **tables: Any) -> None:
        self.run = RunDir(folder)
        self.run.create()
        rollout = {"device": "cpu"} | tables.pop("rollout", {})
        recipe = tiny.recipe(model={"context": 256}, rollout=rollout, **tables)
        self.run.recipe.write_text(dump_recipe(recipe))
        self.run.identity.write_bytes(to_json({"id": "test"}))
        self.weights = load_file(tiny.folder(recipe, self.run.model) / "model.safetensors")
        (commit_dir := self.run.lease / "000001").mkdir()
        self.publisher = FilePublisher(self.run, commit_dir, 1)
        about = argparse.Namespace(
            run=folder, name="rollout-0", attempt=0, supervisor=None, role="rollout", claim_dir="w"
        )
        self.process = RoleProcess(about, self.run, load_recipe(self.run.recipe))
        self.worker = RolloutWorker(self.process, "w")

    def publish(self, version: int, pinned: Collection[int] = ()) -> None:
        given = [(name, tensor + version) for name, tensor in self.weights.items()]
        self.publisher.publish(version, lambda: given, pinned=pinned)

    def release(self, batch: int) -> None:
        RequestQueue(self.run).put([Request(f"r{batch:06d}-000", ((0, 1),), 1, 1, 0)])

    def evaluate(self, version: int) -> None:
        RequestQueue(self.run).put([Request(f"e{version:06d}-000", ((0, 1), (0, 2)), 2, 1, version)])

    def generate(self) -> None:
        claim, waited_s = self.worker.wait_for_claim()
        self.worker.generate(claim, waited_s)
        wait_for(self.run.shard(claim.request.id).exists)

    def versions_of(self, request: str) -> set[int]:
        """That made its tokens, and that its shard says."""
        with Shard(self.run.shard(request)) as shard:
            return {*shard.versions(0, int(shard.offsets[-1])).tolist(), shard.meta["version"]}

    def open_requests(self) -> list[str]:
        return sorted(os.listdir(self.run.open_requests))


@pytest.fixture
def setup(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Setup]:
    """With the tables that the test asks for."""
    made = Setup(tmp_path / "run", **getattr(request, "param", {}))
    yield made
    made.worker.publisher.close()
    made.worker.runner.close()


def test_versions_are_read_with_a_request_not_before(setup: Setup) -> None:
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
    assert seen == [0], "a version was read that nothing was generated with"
    assert setup.worker.held is not None and setup.worker.held.number == setup.worker.engine.version == 3
    assert claim.request_file.name == "r000000-000.a0.v3"
    setup.worker.generate(claim, waited_s)
    setup.worker.publisher.close()
    setup.worker.report_published()
    (said,), _ = read_metrics(setup.run.metrics / "rollout-0.jsonl")
    assert 0 < said["sync_s"] < said["wait_s"] == waited_s and said["swap_s"] == 0 < said["generate_s"]


def test_a_request_whose_weights_are_damaged_is_open_again_and_no_worker_died_on_it(setup: Setup) -> None:
    setup.publish(0)
    setup.worker.sync()
    setup.publish(1)
    for partial in setup.run.weights.glob("v00000001.*/part-*"):
        data = bytearray(partial.read_bytes())
        data[-1] ^= 1
        partial.write_bytes(data)
    setup.release(0)
    with pytest.raises(RunError, match="resume with"):
        setup.worker.wait_for_claim()
    assert setup.open_requests() == ["r000000-000.a0.v1"]


def test_a_worker_that_is_asked_to_stop_while_it_waits_for_weights_gives_its_request_back(setup: Setup) -> None:
    setup.publish(0)
    setup.worker.sync()
    setup.publish(1)
    for folder in setup.run.weights.glob("v00000001.*.i*"):
        shutil.rmtree(folder)
    setup.release(0)

    def stop() -> None:
        wait_for(lambda: any(setup.run.weights.glob("wanted/*")) and not setup.open_requests())
        setup.process.stopping = True

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Stop):
        setup.worker.wait_for_claim()
    thread.join()
    assert setup.open_requests() == ["r000000-000.a0.v1"]


def test_an_evaluation_is_generated_by_the_version_that_it_names_however_many_came_since(setup: Setup) -> None:
    setup.publish(0)
    setup.evaluate(0)
    for version in range(1, 7):
        setup.publish(version, pinned=[0])
    setup.worker.sync()
    assert setup.worker.held is not None and setup.worker.held.number == 6
    setup.generate()
    assert setup.versions_of("e000000-000") == {0}
    setup.release(0)
    setup.generate()
    assert setup.versions_of("r000000-000") == {6}, "training goes on with the newest"


def test_an_evaluation_whose_engine_was_lost_goes_on_with_the_same_version(setup: Setup) -> None:
    setup.publish(0)
    setup.evaluate(0)
    generate = setup.worker.engine.generate

    def lost(*arguments: Any, **named: Any) -> Any:
        setup.worker.engine.generate = generate  # type: ignore[method-assign]
        setup.publish(1, pinned=[0])
        raise EngineRestarted("the engine was lost, and is there again")

    setup.worker.engine.generate = lost  # type: ignore[method-assign]
    setup.generate()
    assert setup.versions_of("e000000-000") == {0}


def test_an_evaluation_whose_weights_are_gone_is_open_again_and_the_run_says_so(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_hpc.roles.rollout.worker.GONE_S", 0.01)
    for version in range(6):
        setup.publish(version)
    setup.evaluate(0)
    with pytest.raises(
        RunError, match=r"e000000-000 is to be generated by version 0, whose weights are gone.*gives it up"
    ):
        setup.worker.wait_for_claim()
    assert setup.open_requests() == ["e000000-000.a0.v0"]


def test_nothing_is_kept_of_an_evaluation_that_another_version_generated(setup: Setup) -> None:
    """Such as by a server whose weights somebody else changed."""
    setup.publish(0)
    setup.evaluate(0)
    claim, waited_s = setup.worker.wait_for_claim()
    setup.worker.engine.version = 3
    with pytest.raises(
        RunError, match=r"e000000-000 was generated by versions .*\(3, 0\).*not by the one that it names"
    ):
        setup.worker.generate(claim, waited_s)
    assert not setup.run.shard("e000000-000").exists()


def odd(**options: Any) -> dict[str, Any]:
    """Tables with prompts of which the second makes its environment raise in the second turn."""
    name = f"{Path(__file__).with_name('user_code.py')}:Odd"
    source = {"prompts": "odd.jsonl", "environment": name, "environment_options": options, "reward": "exact"}
    return {"source": [source], "rollout": {"max_turns": 3}}


@pytest.fixture
def odd_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"prompt {i}", "answer": "step2 raise" if i == 1 else str(i)} for i in range(3)]
    Path("odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.usefixtures("odd_prompts")
@pytest.mark.parametrize("setup", [odd(turns=3)], indirect=True)
def test_an_environment_that_raises_fails_its_group_alone_and_what_there_is_of_it_can_be_looked_at(
    setup: Setup,
) -> None:
    setup.publish(0)
    RequestQueue(setup.run).put([Request("r000000-000", ((0, 0), (0, 1), (0, 2)), 2, 1, 0)])
    setup.generate()
    with Shard(setup.run.shard("r000000-000")) as shard:
        fine, failed, last = (shard.group(g) for g in range(3))
    assert fine.reason == last.reason == "" and all(s.finish is not Finish.FAILED for s in fine.samples + last.samples)
    assert failed.reason.endswith("user_code.py:Odd' raised KeyError in step")
    assert failed.detail.startswith("source 0, prompt 1: KeyError: 'key'")
    rows = open_run(setup.run.root).trajectories()
    rows = rows[rows.status == "failed"]
    assert set(rows.reason) == {failed.reason} and set(rows.detail) == {failed.detail}
    assert (
        list(rows.prompt_index) == [1, 1]
        and set(rows.finish) <= {"failed", "length", "stop"}
        and (rows.length > 0).all()
    )


@pytest.mark.usefixtures("odd_prompts")
@pytest.mark.parametrize("setup", [odd(turns=3, long=300)], indirect=True)
def test_an_observation_that_outgrows_the_context_ends_its_sample_at_the_length_limit(setup: Setup) -> None:
    setup.publish(0)
    RequestQueue(setup.run).put([Request("r000000-000", ((0, 0), (0, 2)), 2, 1, 0)])
    setup.generate()
    with Shard(setup.run.shard("r000000-000")) as shard:
        groups = [shard.group(g) for g in range(2)]
    assert [g.reason for g in groups] == ["", ""]
    for sample in (s for g in groups for s in g.samples):
        assert sample.finish is Finish.LENGTH and sample.loss_mask.all(), "the observation is no part of the sample"


@pytest.mark.parametrize("setup", [{"rollout": {"max_attempts": 1}}], indirect=True)
def test_a_request_that_others_died_on_is_seen_in_the_trajectories(setup: Setup) -> None:
    setup.publish(0)
    RequestQueue(setup.run).put([Request("r000000-000", ((0, 0), (0, 2)), 2, 1, 0)])
    os.rename(setup.run.open_requests / "r000000-000.a0.v0", setup.run.open_requests / "r000000-000.a1.v0")
    setup.generate()
    rows = open_run(setup.run.root).trajectories()
    assert list(rows.status) == ["failed"] * 4 and set(rows.finish) == {"failed"} and set(rows.length) == {0}
    assert set(rows.reason) == {"1 workers died on the request (rollout.max_attempts = 1)"} and set(rows.turns) == {0}
