"""Failed groups once more: what a person asks for when the cause is mended, and what a successor finds then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch.redo import redo_failed
from relax_hpc.records import Finish, Group, Prompt, Sample
from relax_hpc.spool import partial_rollouts
from relax_hpc.spool.ledger import Ledger
from relax_hpc.spool.queue import RequestQueue, publish_shard
from relax_hpc.spool.shard_writer import encode
from tests import tiny
from tests.unit.test_batch_scheduler import WORKER, Trainer, generate, in_progress, names


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    RequestQueue(run).open_claim_dir(WORKER)
    return run


def sample() -> Sample:
    return Sample(np.arange(3, dtype=np.int32), np.ones(3, np.uint8), np.zeros(3, np.float32), [(0, 0)], Finish.STOP)


def fail(run: RunDir, reason: str, samples: int = 2) -> None:
    """Every open request is generated with weights 0, and its group fails."""
    queue = RequestQueue(run)
    while claim := queue.claim(WORKER, 0):
        [(source, index)] = claim.request.prompts
        prompt = Prompt(source, index, "x", sample().tokens, "1")
        group = Group(prompt, [sample() for _ in range(samples)], reason)
        meta = {"version": 0, "samples_per_prompt": 2, "seed": claim.request.seed, "aborts": 0}
        publish_shard(run, claim, encode(claim.request.id, [group], meta), WORKER)


def stopped(run: RunDir, reason: str, samples: int = 2) -> None:
    """A run whose first step had too many failed groups."""
    trainer = Trainer(run, 1)
    trainer.selection.max_failed = 0.5
    assert trainer.entry() is None
    fail(run, reason, samples)
    with pytest.raises(RunError, match=r"step 0: 2 of 2 groups failed.*KeyError: 1;.*--code new.*--redo generate"):
        trainer.entry()
    assert Ledger(run).find(0) is None, "what failed is in the ledger, and can not be made once more"


@pytest.mark.parametrize(
    ("how", "reason", "samples", "scores"),
    [
        ("score", "reward 'x' on source 0, prompt 1: KeyError: 1", 2, True),
        ("generate", "reward 'x' on source 0, prompt 1: KeyError: 1", 2, False),
        ("score", "reward 'x' on source 0, prompt 1: KeyError: 1", 1, False),
        ("score", "environment 'y': KeyError: 1", 2, False),
    ],
)
def test_failed_groups_are_scored_or_generated_again_and_trained_on_once(
    run: RunDir, how: Literal["score", "generate"], reason: str, samples: int, scores: bool
) -> None:
    stopped(run, reason, samples)
    assert set(redo_failed(run, tiny.recipe(), how)) == names(0, 1)
    assert not list(run.shards.rglob("*.h5")) and len(list(run.quarantine.glob("*.h5"))) == 4
    assert {json.loads(p.read_text())["request"] for p in run.quarantine.glob("*.json")} == names(0, 1)
    assert in_progress(run) == (names(0, 1) if scores else set())
    successor = Trainer(run, 2)
    assert successor.entry() is None and in_progress(run) == names(0, 1)
    queue = RequestQueue(run)
    queue.raise_oldest(5)  # of what nobody has started
    claim = queue.claim(WORKER, 7)
    assert claim is not None and claim.request == successor.scheduler.planner.outstanding[claim.request.id]
    partial = partial_rollouts.read(run, claim.request, claim.request_file)
    if scores:
        assert claim.request_file.name.endswith(".a0.v0.p1"), "its deadline counts from its oldest token"
        assert partial is not None and partial.turns == [[0], [0]] and not partial.cut
    else:
        assert partial is None and claim.request_file.version == 7
    queue.put_back(claim)
    generate(run, 7 if not scores else 0)
    for step in range(2):
        assert {taken.request for taken in successor.train().take} == names(step)


def test_what_a_step_took_or_did_not_fail_stays(run: RunDir) -> None:
    trainer = Trainer(run, 1)
    assert trainer.entry() is None
    fail(run, "reward 'x': KeyError")
    trainer.train()
    assert redo_failed(run, tiny.recipe(), "generate") == sorted(names(1))
    assert {p.stem for p in run.shards.rglob("*.h5")} == names(0)
    successor = Trainer(run, 2)
    assert successor.train().step == 0 and successor.entry() is None and in_progress(run) >= names(1)
    generate(run, 1)
    assert redo_failed(run, tiny.recipe(), "generate") == []
