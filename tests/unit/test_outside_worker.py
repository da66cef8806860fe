"""The worker in docs/slurm.md, as it stands there, against a queue made by hand."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_hpc.files.publish import replace, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Finish, Group, Prompt, Sample
from relax_hpc.slurm.rollout_nodes import RolloutNodes
from relax_hpc.spool.queue import RequestQueue
from relax_hpc.spool.request import Request
from relax_hpc.spool.shard import Shard
from relax_hpc.telemetry import Telemetry, read_heartbeat
from relax_hpc.weights.file import FilePublisher
from tests.runs import wait_for

PAGE = Path(__file__).parents[2] / "docs" / "slurm.md"
VERSION = 3


def documented() -> Callable[..., None]:
    """`work` of the page."""
    [code] = [b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "def work(" in b]
    assert len(code.splitlines()) <= 40
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    found: Callable[..., None] = namespace["work"]
    return found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """Two requests that version 3 may start, and one that it may not."""
    run = RunDir(tmp_path)
    run.create()
    (commit_dir := run.lease / "000001").mkdir()
    FilePublisher(run, commit_dir, 1).publish(VERSION, lambda: [("w", torch.full((2,), float(VERSION)))])
    RequestQueue(run).put(Request(f"r{batch:06d}-000", ((0, 5), (0, 6)), 2, 1, batch) for batch in (2, 3, 4))
    yield run
    end(run)


def end(run: RunDir) -> None:
    replace(run.outcome, to_json({"outcome": "stopped"}))


def groups(request: Request, number: int) -> list[Group]:
    """What an engine would make of a request."""
    one = lambda: Sample(
        np.array([number], np.int32), np.ones(1, np.uint8), np.zeros(1, np.float32), [(0, number)], Finish.STOP
    )
    prompt = lambda index: Prompt(0, index, "", np.array([1], np.int32))
    return [Group(prompt(index), [one() for _ in range(request.samples_per_prompt)]) for _, index in request.prompts]


def start(run: RunDir, generate: Callable[..., list[Group]], loaded: dict[int, dict[str, Any]]) -> threading.Thread:
    def load(number: int, tensors: Iterable[tuple[str, Any]]) -> None:
        loaded[number] = dict(tensors)

    thread = threading.Thread(target=documented(), args=(run.root, load, generate), daemon=True)
    thread.start()
    return thread


def test_it_generates_what_its_version_may_start_and_leaves_with_the_run(run: RunDir) -> None:
    loaded: dict[int, dict[str, Any]] = {}
    thread = start(run, lambda request, number, alive: groups(request, number), loaded)
    wait_for(lambda: all(run.shard(f"r{batch:06d}-000").exists() for batch in (2, 3)))
    end(run)
    thread.join(30)
    assert not thread.is_alive()
    assert loaded[VERSION]["w"].tolist() == [VERSION, VERSION]
    with Shard(run.shard("r000003-000")) as shard:
        assert shard.first_version == VERSION and shard.meta["worker"].startswith("outside-")
        assert [g.prompt.index for g in map(shard.group, range(2))] == [5, 6]
    assert set(RequestQueue(run).in_progress()) == {"r000004-000"}, (
        "it claimed a request that its weights may not start"
    )
    [agent] = run.heartbeats.glob("node-agent-*.json")
    assert (read_heartbeat(run, agent.stem) or {})["state"] == "gone"


def test_it_generates_an_evaluation_by_the_version_that_it_names(run: RunDir) -> None:
    publisher = FilePublisher(run, run.lease / "000001", 1)
    for number in range(VERSION + 1, VERSION + 6):
        given = {"w": torch.full((2,), float(number))}
        publisher.publish(number, given.items, pinned=[VERSION])
    RequestQueue(run).put([Request(f"e{VERSION:06d}-000", ((0, 7),), 1, 1, VERSION)])
    thread = start(run, lambda request, number, alive: groups(request, number), {})
    wait_for(lambda: run.shard(f"e{VERSION:06d}-000").exists() and run.shard("r000004-000").exists())
    end(run)
    thread.join(30)
    for request, version in ((f"e{VERSION:06d}-000", VERSION), ("r000004-000", VERSION + 5)):
        with Shard(run.shard(request)) as shard:
            assert (shard.first_version, shard.meta["version"]) == (version, version)


def test_what_it_holds_is_given_back_when_it_falls_silent(run: RunDir) -> None:
    held, done = threading.Event(), threading.Event()

    def hang(request: Request, number: int, alive: Callable[[], None]) -> list[Group]:
        held.set()
        done.wait(60)
        return groups(request, number)

    thread = start(run, hang, {})
    assert held.wait(30)
    recipe = Recipe.model_validate(
        {
            "model": {"path": str(run.root)},
            "source": [{"task": "chain_sum"}],
            "supervision": {"node_agent_silent_s": 0.5},
        }
    )
    agents = RolloutNodes(run, recipe, Telemetry(run, "supervisor", attempt=0))
    agents.look()
    assert len(agents.alive()) == 1 and len(os.listdir(run.open_requests)) == 2
    wait_for(lambda: (agents.look(), len(os.listdir(run.open_requests)) == 3)[1], 30)
    assert agents.alive() == [] and RequestQueue(run).workers() == []
    end(run)
    done.set()
    thread.join(30)
    assert not thread.is_alive()
