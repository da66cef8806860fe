"""Columns: what a scorer says of a shard, who makes which, and what the trainer makes of damaged ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import publish
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch.prepare import check_scores
from relax_hpc.records import Rollouts
from relax_hpc.roles.scoring.pending_columns import PendingColumns
from relax_hpc.spool.column import DamagedColumn, encode, read_column
from relax_hpc.spool.queue import RequestQueue
from relax_hpc.spool.shard import Shard
from relax_hpc.trainers import BACKENDS, fit, make_scoring, make_trainer
from relax_hpc.weights import DamagedWeights, WeightsError, reference
from tests import tiny
from tests.unit.test_batch_scheduler import WORKER, Trainer, generate, names

KL = {"kl_coef": 0.1}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    RequestQueue(run).open_claim_dir(WORKER)
    return run


def reference_of(trainer: Any, rollouts: Rollouts) -> NDArray[np.float32]:
    if trainer.recipe.trainer.backend == "megatron":
        from relax_hpc.trainers.megatron.cpu import supported

        trainer._column = supported(trainer._column)
    return trainer._column("reference", rollouts, trainer.recipe.rollout.temperature, lambda: None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scorer_says_what_the_trainers_own_reference_says(backend: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    trainer = {"backend": backend}
    rollouts = tiny.random_rollouts(24)
    plain = tiny.recipe(algorithm=KL, rollout={"temperature": 0.7}, trainer=trainer)
    inside = make_trainer(plain, tiny.folder(plain, tmp_path), 0, 1)
    expected = reference_of(inside, rollouts)
    assert expected[rollouts.loss_mask == 1].std() > 0.5
    for budget in (16384, 40):
        scorer, budgeted = {"scores": ["reference"]}, trainer | {"tokens_per_micro_batch": budget}
        recipe = tiny.recipe(algorithm=KL, rollout={"temperature": 0.7}, scorer=scorer, trainer=budgeted)
        assert not make_trainer(recipe, tmp_path, 0, 1).reference, "the trainer holds none beside the scorer"
        models = make_scoring(recipe, tmp_path, 0, 1)
        models.hold("teacher", tmp_path)
        models.load("reference", dict(inside.export()), tmp_path)
        for name in ("teacher", "reference"):
            np.testing.assert_allclose(models.logprobs(name, rollouts), expected, atol=2e-6)
        other = {name: tensor * 1.1 for name, tensor in inside.export()}
        models.load("reference", other, tmp_path)
        assert np.abs(models.logprobs("reference", rollouts) - expected).max() > 0.1, "other weights are taken"
        del other["model.norm.weight"]
        with pytest.raises(RunError, match=r"model.norm.weight.*missing"):
            models.load("reference", other, tmp_path)


def column(shard: Shard, name: str = "reference", model: str = "m", first: float = -1.0) -> bytes:
    values = np.linspace(first, -2, int(shard.offsets[-1]), dtype=np.float32)
    return b"".join(encode(name, shard.request, shard.checksum, model, values))


def test_a_column_is_read_back_and_a_damaged_one_is_named(run: RunDir) -> None:
    Trainer(run, 1).entry()
    [request] = generate(run, 0, count=1)
    path = run.column(request, "reference")
    assert read_column(path, "reference") is None
    with Shard(run.shard(request)) as shard:
        whole = column(shard)
        assert publish(path, whole)
        found = read_column(path, "reference")
        assert found is not None and (found.request, found.shard, found.bytes) == (request, shard.checksum, len(whole))
        assert found.values[0] == -1 and found.version == f"m/{found.checksum}"
        part = shard.rollouts(np.array([1]), columns={"reference": found.values})
        assert part.columns["reference"].tolist() == found.values[3:].tolist()
    at = whole.index(found.values.tobytes())
    for broken in (whole[: len(whole) // 2], b"", whole[:at] + b"\x01" + whole[at + 1 :]):
        path.write_bytes(broken)
        with pytest.raises(DamagedColumn, match=request):
            read_column(path, "reference")
    path.write_bytes(whole)
    with pytest.raises(DamagedColumn, match="no column 'teacher'"):
        read_column(path, "teacher")


def score(run: RunDir, requests: Any, first: float = -1.0) -> None:
    """What scorers do, of weights `m`."""
    for request in requests:
        with Shard(run.shard(request)) as shard:
            assert publish(run.column(request, "teacher"), column(shard, "teacher", first=first))


def test_a_step_waits_for_columns_and_its_entry_names_them(run: RunDir) -> None:
    trainer = Trainer(run, 1, scored=("teacher",))
    trainer.entry()
    state = trainer.state()
    first, second, *_ = generate(run, 0)
    assert trainer.entry() is None and (trainer.scheduler.depth, trainer.scheduler.unscored) == (0, 4)
    score(run, [first])
    assert trainer.entry() is None and trainer.scheduler.depth == 1
    path = run.column(second, "teacher")
    path.write_bytes(b"torn")
    assert trainer.entry() is None and not path.exists(), "what is damaged is removed, so that a scorer makes it again"
    [said] = trainer.said
    assert (said["kind"], said["request"], said["column"]) == ("refused_column", second, "teacher")
    with Shard(run.shard(first)) as shard:
        publish(path, column(shard, "teacher"))
    assert trainer.entry() is None and "another shard" in trainer.said[-1]["reason"]
    score(run, [second])
    entry = trainer.train()
    assert {t.request for t in entry.take} == names(0) == {first, second}
    found = read_column(path, "teacher")
    assert found is not None and {t.request: t.columns for t in entry.take}[second] == {"teacher": found.version}
    room = trainer.retention.used_bytes
    assert room == sum(p.stat().st_size for p in [*run.shards.rglob("*.h5"), *run.columns.rglob("*.h5")])

    path.unlink()
    successor = Trainer(run, 2, state=state, scored=("teacher",))
    assert successor.entry() is None, "a step that is replayed waits for a column that is gone"
    score(run, [second])
    assert successor.entry() == entry
    retention = successor.retention
    retention.scan(excluding=())
    assert retention.used_bytes == room
    retention._recipe = tiny.recipe(
        spool={"keep": "needed"}, algorithm={"name": "opd", "teacher": "t"}, scorer={"scores": ["teacher"]}
    )
    retention.remove_before(1)
    assert not {p.name.partition(".")[0] for p in run.columns.rglob("*.h5")} & names(0), "columns go with their shards"
    assert retention.used_bytes == sum(
        p.stat().st_size for p in [*run.shards.rglob("*.h5"), *run.columns.rglob("*.h5")]
    )


def test_every_request_is_one_scorers_and_what_is_gone_is_missing_again(
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Trainer(run, 1).entry()
    requests = sorted(generate(run, 0))
    shares = [PendingColumns(run, run, ("teacher",), 0, rank, 2) for rank in range(2)]
    assert [len(share.requests()) for share in shares] == [2, 2]
    assert sorted(request for share in shares for request in share.requests()) == requests
    mine = shares[0].requests()
    score(run, mine)
    shares[0].done(mine[0])
    assert shares[0].requests() == mine[1:]
    monkeypatch.setattr("relax_hpc.roles.scoring.pending_columns.LOOK_AGAIN_S", -1.0)
    monkeypatch.setattr("relax_hpc.roles.scoring.pending_columns.SEEN_S", -1.0)
    assert shares[0].requests() == []
    run.column(mine[1], "teacher").unlink()
    assert shares[0].requests() == [mine[1]]

    monkeypatch.setattr("relax_hpc.roles.scoring.pending_columns.LOOK_BACK_S", -1.0)
    (run.shards / "0001").mkdir()
    (run.shards / "0002").mkdir()
    score(run, [mine[1]])
    assert shares[0].requests() == [] and not shares[0]._behind, "batches of long ago, all scored"
    run.column(mine[0], "teacher").unlink()
    assert shares[0].requests() == mine[:1], "a step that is replayed may need it"


def test_the_reference_is_kept_once_and_read_whole_or_not_at_all(tmp_path: Path) -> None:
    run, commit_dir = RunDir(tmp_path / "run"), tmp_path / "i1"
    run.create()
    commit_dir.mkdir()
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    with pytest.raises(WeightsError, match="not there yet"):
        reference.read(run)
    kept = reference.keep(run, commit_dir, lambda: tensors.items())
    before = os.stat(run.reference / "index.json").st_ino
    assert reference.keep(run, commit_dir, lambda: tensors.items()) == kept
    assert os.stat(run.reference / "index.json").st_ino == before, "the same bits are there"
    checksum, found = reference.read(run)
    assert checksum == kept and all(torch.equal(found[n], t) for n, t in tensors.items())
    tensors["a"] = tensors["a"] + 1
    assert reference.keep(run, commit_dir, lambda: tensors.items()) != kept and not list(commit_dir.iterdir())
    part = run.reference / "part-0000.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(DamagedWeights, match="checksum"):
        reference.read(run)
    commit_dir.rename(tmp_path / "i1.over")
    tensors["a"] = tensors["a"] + 1
    with pytest.raises(FileNotFoundError):
        reference.keep(run, commit_dir, lambda: tensors.items())


def test_a_score_that_an_algorithm_of_ones_own_does_not_need_is_refused() -> None:
    check_scores(tiny.recipe(algorithm=KL, scorer={"scores": ["reference"]}))
    factory = "relax_hpc.algorithms.grpo:GroupRelative"
    own = {"name": "own", "factory": factory, "options": {"config": tiny.recipe().algorithm}}
    with pytest.raises(RunError, match=r"scorer.scores has 'reference'.*'own' needs nothing only: leave it out"):
        check_scores(tiny.recipe(algorithm=own, scorer={"scores": ["reference"]}))


def test_a_scored_teacher_of_megatrons_is_refused_where_it_cannot_be_split(tmp_path: Path) -> None:
    other = tiny.recipe(model={"heads": 3, "kv_heads": 3, "hidden_size": 48})
    plan = {"backend": "megatron", "processes": 2, "parallel": {"tensor": 2}}
    beside = {"scores": ["teacher"], "processes": 2}
    recipe = tiny.recipe(
        algorithm={"teacher": str(tiny.folder(other, tmp_path / "other"))}, trainer=plan, scorer=beside
    )
    with pytest.raises(RunError, match=r"algorithm.teacher = .*tensor = 2 must divide the model's 3 attention heads"):
        fit.check(recipe, tiny.folder(recipe, tmp_path / "own"))
