"""The trainer's side of the spool over restarts: what a new trainer finds is what the old one had, whenever it died."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from relax_hpc.algorithms.filters import make_filters, zero_std
from relax_hpc.files.errors import RunError
from relax_hpc.files.node_cache import NodeCache
from relax_hpc.files.publish import publish, read_json, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.analysis.audit import audit
from relax_hpc.recipe import dump_recipe
from relax_hpc.records import Finish, Group, Prompt, Sample
from relax_hpc.roles.common.columns import Columns
from relax_hpc.roles.common.load_batch import load_batch
from relax_hpc.roles.common.quarantine import MOST, Quarantine
from relax_hpc.roles.training.arrivals import Arrivals
from relax_hpc.roles.training.batch_scheduler import BatchScheduler
from relax_hpc.roles.training.evaluation import Evaluations
from relax_hpc.roles.training.retention import Retention
from relax_hpc.roles.training.sample_reuse import SampleReuse
from relax_hpc.roles.training.selection import GroupSelection
from relax_hpc.roles.training.trainer import TrainerRole
from relax_hpc.spool.ledger import Entry, Ledger, Taken, sealed
from relax_hpc.spool.planner import RequestPlanner
from relax_hpc.spool.queue import RequestQueue, publish_shard
from relax_hpc.spool.reading import Shards
from relax_hpc.spool.request import Request
from relax_hpc.spool.shard_writer import encode
from relax_hpc.telemetry import Telemetry, read_metrics
from relax_hpc.weights import FilePublisher
from tests import tiny
from tests.unit.test_requests import Counting

WORKER = "w"
FLAT = {f"r{batch:06d}-{k:03d}" for batch, k in ((0, 0), (0, 2), (1, 1), *((3, k) for k in range(9)))}
"""Requests whose groups no step wants."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    RequestQueue(run).open_claim_dir(WORKER)
    return run


class Trainer:
    """One incarnation: a batch scheduler, and the steps that it makes."""

    def __init__(
        self, run: RunDir, number: int, on_stale: Any = "wait", staleness: int = 1, state: Any = None, step: int = 0,
        extra_requests: int = 0, scored: tuple[str, ...] = (), sample_reuse: int = 0, solved_at: float | None = None,
    ) -> None:  # fmt: skip
        """refills: with these many, steps take two groups whose rewards differ; scored: columns that they need."""
        for old in run.lease.glob("000001/i??????"):
            old.rename(old.with_name(old.name + ".over"))
        commit_dir = run.lease / "000001" / f"i{number:06d}"
        commit_dir.mkdir(parents=True)
        planner = RequestPlanner(2, 1, 2, staleness, on_stale, 0, Counting(), staleness, batches=10**6)
        planner.wanted, planner.extra_requests = (2 if extra_requests else 0), extra_requests
        ledger = Ledger(run, commit_dir)
        recipe = tiny.recipe(
            trainer={"prompts_per_step": 2}, rollout={"groups_per_request": 1}, algorithm={"group_size": 2}
        )
        self.retention = Retention(run, recipe, commit_dir, ledger, context=64)
        node_cache = Shards(run, None)
        self.said: list[dict[str, Any]] = []
        columns = Columns(run, scored, commit_dir, lambda kind, **about: self.said.append({"kind": kind, **about}))
        quarantine = Quarantine(run, commit_dir, lambda kind, **about: self.said.append({"kind": kind, **about}))
        self.arrivals = Arrivals(node_cache, columns, quarantine, self.retention)
        self.selection = GroupSelection([zero_std], planner.wanted, solved_at)
        self.scheduler = BatchScheduler(
            planner,
            ledger,
            RequestQueue(run, commit_dir=commit_dir),
            self.arrivals,
            self.selection,
            self.retention,
            SampleReuse(ledger, node_cache, sample_reuse, staleness),
        )
        self.step = step
        self.scheduler.begin(state)

    def entry(self) -> Entry | None:
        return self.scheduler.next_entry(self.step, self.step, 0)

    def train(self) -> Entry:
        entry = self.entry()
        assert entry is not None
        self.step += 1
        self.scheduler.settle(entry, self.step)
        return entry

    def state(self) -> Any:
        return self.scheduler.state_dict()


def generate(run: RunDir, version: int, count: int = 100, request: str | None = None) -> list[str]:
    """A worker that holds `version` generates requests."""
    generated: list[str] = []
    queue = RequestQueue(run)
    while len(generated) < count and (claim := queue.claim(WORKER, version)):
        if request is None or claim.request.id == request:
            publish_shard(run, claim, image(claim.request.id, version, flat=claim.request.id in FLAT), WORKER)
            generated.append(claim.request.id)
    return generated


def image(request: str, version: int, flat: bool = False) -> Any:
    """One group of two samples, whose rewards are the same where it is `flat`."""
    samples = [
        Sample(
            np.arange(3, dtype=np.int32), np.ones(3, np.uint8), np.zeros(3, np.float32), [(0, version)], Finish.STOP, reward=reward
        )
        for reward in (1.0, 1.0 if flat else 0.0)
    ]  # fmt: skip
    return encode(
        request,
        [Group(Prompt(0, 0, "x", np.arange(2, dtype=np.int32), "1"), samples)],
        {"version": version, "run": "this"},
    )


def sample(version: int = 0) -> Sample:
    return Sample(
        np.arange(3, dtype=np.int32), np.ones(3, np.uint8), np.zeros(3, np.float32), [(0, version)], Finish.STOP
    )


def in_progress(run: RunDir) -> set[str]:
    return set(RequestQueue(run).in_progress())


def names(*batches: int) -> set[str]:
    return {f"r{b:06d}-{k:03d}" for b in batches for k in range(2)}


def test_requests_come_out_and_steps_go_on(run: RunDir) -> None:
    trainer = Trainer(run, 1)
    assert trainer.entry() is None
    assert in_progress(run) == names(0, 1)
    generate(run, 0)
    for step in range(4):
        entry = trainer.train()
        assert {t.request for t in entry.take} == names(step)
        assert in_progress(run) == names(step + 2)
        generate(run, step + 1)


@pytest.mark.parametrize("lost", ["nothing", "all open requests"])
def test_killed_after_a_ledger_commit_the_entry_is_adopted_and_nothing_is_asked_for_twice(
    run: RunDir, lost: str
) -> None:
    trainer = Trainer(run, 1)
    state = trainer.state()
    trainer.entry()
    generate(run, 0)
    first = trainer.train()
    generate(run, 1, count=1)
    second = trainer.entry()  # committed; killed before it was trained
    assert second is not None
    if lost == "all open requests":
        for path in run.open_requests.iterdir():
            path.unlink()
    successor = Trainer(run, 2, state=state)
    assert [successor.train(), successor.train()] == [first, second]
    assert not successor.scheduler.live
    assert successor.entry() is None
    assert successor.scheduler.live
    assert set(successor.scheduler.planner.outstanding) == names(2, 3)
    published = {p.stem for p in run.shards.rglob("*.h5")}
    assert in_progress(run) == names(2, 3) - published
    assert len(os.listdir(run.open_requests)) == len(in_progress(run))
    generate(run, 2)
    assert {t.request for t in successor.train().take} == names(2)


def test_a_claim_that_its_worker_still_generates_is_not_asked_for_again(run: RunDir) -> None:
    trainer = Trainer(run, 1)
    state = trainer.state()
    trainer.entry()
    claim = RequestQueue(run).claim(WORKER, 0)
    successor = Trainer(run, 2, state=state)
    assert successor.entry() is None
    assert claim is not None and not [n for n in os.listdir(run.open_requests) if n.startswith(claim.request.id)]


def test_a_request_that_is_published_while_a_successor_looks_for_it_is_not_asked_for_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(run, 1)
    state = trainer.state()
    trainer.entry()
    successor, queue = Trainer(run, 2, state=state), RequestQueue(run)
    claim, looks = queue.claim(WORKER, 0), successor.scheduler.queue.in_progress
    assert claim is not None

    def published_first() -> dict[str, int]:
        if claim.path.exists():
            publish_shard(run, claim, image(claim.request.id, 0), WORKER)
        return looks()

    monkeypatch.setattr(successor.scheduler.queue, "in_progress", published_first)
    assert successor.entry() is None
    assert in_progress(run) == names(0, 1) - {claim.request.id}


def test_a_request_is_not_dropped_that_was_started_with_newer_weights_than_it_asked_for(run: RunDir) -> None:
    """Staleness 1: batch 1 may start from version 0 and was started from 1, so it is due by step 2, not by step 1."""
    trainer = Trainer(run, 1, on_stale="drop")
    trainer.entry()
    generate(run, 0, count=2)
    assert {t.request for t in trainer.train().take} == names(0)
    queue = RequestQueue(run)
    for claim in [c for _ in range(4) if (c := queue.claim(WORKER, 1))]:
        if claim.request.batch == 2:
            publish_shard(run, claim, image(claim.request.id, 1), WORKER)
    entry = trainer.entry()
    assert entry is not None and {t.request for t in entry.take} == names(2) and entry.dropped == ()


def test_a_late_request_is_replaced_and_its_shard_is_counted_when_it_comes(run: RunDir) -> None:
    trainer = Trainer(run, 1, on_stale="drop", staleness=0)
    trainer.scheduler.planner.ahead = 0
    trainer.entry()
    queue = RequestQueue(run)
    first, second = queue.claim(WORKER, 0), queue.claim(WORKER, 0)
    assert first is not None and second is not None and trainer.entry() is None
    publish_shard(run, first, image(first.request.id, 0), WORKER)
    # A third one, so that the batch is full without the slow one.
    planner = trainer.scheduler.planner
    extra = Request("r000000-002", ((0, 9),), 2, 5, 0)
    planner.outstanding[extra.id] = extra
    queue.put([extra])
    generate(run, 0)
    entry = trainer.train()
    assert [d.request for d in entry.dropped] == [second.request.id]
    replacement = entry.dropped[0].replacement
    assert replacement in in_progress(run) and replacement in planner.outstanding
    assert trainer.scheduler.stale_arrivals() == []
    used, before = trainer.retention.used_bytes, trainer.state()
    publish_shard(run, second, image(second.request.id, 0), WORKER)
    assert trainer.scheduler.stale_arrivals() == [(second.request.id, 3.0)]
    assert trainer.retention.used_bytes == used + run.shard(second.request.id).stat().st_size
    assert trainer.scheduler.stale_arrivals() == []
    # Dropped before the checkpoint, come after the restart.
    resumed = Trainer(run, 2, on_stale="drop", staleness=0, state=before, step=1)
    assert resumed.scheduler.stale_arrivals() == [(second.request.id, 3.0)]


def prompts_in(run: RunDir) -> dict[str, Any]:
    return {p.name.split(".")[0]: read_json(p)["prompts"] for p in run.open_requests.iterdir()}


@pytest.mark.parametrize("killed", ["released", "checkpointed", "claimed", "generated", "committed", "never"])
def test_groups_that_do_not_pass_are_replaced_and_a_successor_takes_the_same(run: RunDir, killed: str) -> None:
    """On-policy: of step 0 the requests 0 and 2 do not pass, so that 2 and 3 are asked for; of step 1, request 1."""
    trainer = Trainer(run, 1, staleness=0, extra_requests=4)
    state = trainer.state()
    assert trainer.entry() is None and set(generate(run, 0)) == names(0)
    assert trainer.entry() is None and prompts_in(run) == {"r000000-002": [[0, 2]]}
    if killed == "checkpointed":
        state = trainer.state()
    if killed in ("claimed", "generated"):
        claim = RequestQueue(run).claim(WORKER, 0)
        assert claim is not None
        if killed == "generated":
            publish_shard(run, claim, image(claim.request.id, 0, flat=True), WORKER)
    if killed == "committed":
        assert generate(run, 0) == ["r000000-002"] and trainer.entry() is None and generate(run, 0) == ["r000000-003"]
        trainer.entry()
    if killed != "never":
        trainer = Trainer(run, 2, staleness=0, extra_requests=4, state=state)
        if killed != "committed":
            assert [trainer.entry() for _ in range(3)] == [None] * 3
            asked = {"claimed": [], "generated": ["r000000-003"]}.get(killed, ["r000000-002"])
            assert list(prompts_in(run)) == asked
    if killed == "claimed":
        publish_shard(run, claim, image(claim.request.id, 0, flat=True), WORKER)
    for _ in range(2):
        generate(run, 0)
        trainer.entry() if killed != "committed" else None
    entry = trainer.train()
    assert [t.request for t in entry.take] == [f"r000000-{k:03d}" for k in range(4)] and entry.extra_requests == 2
    assert list(entry.filtered) == ["r000000-000/0", "r000000-002/0"]
    if killed == "committed":
        assert trainer.entry() is None
    assert prompts_in(run) == {"r000001-000": [[0, 4]], "r000001-001": [[0, 5]]}
    assert len(list(run.shards.rglob("*.h5"))) == 4
    assert trainer.scheduler.outstanding == 2


def test_what_passes_beyond_a_full_batch_stays_out_of_the_loss_and_a_batch_that_cannot_be_filled_is_short(
    run: RunDir,
) -> None:
    trainer = Trainer(run, 1, staleness=0, extra_requests=3)
    trainer.scheduler.planner.oversample = 2.0
    taken = []
    for step in range(4):
        for _ in range(6):
            if (entry := trainer.entry()) is not None:
                break
            generate(run, step)
        assert entry is not None
        trainer.train()
        taken.append((len(entry.take), entry.filtered))
    surplus = "surplus: the batch has its 2 groups"
    assert taken[0] == (4, {f"r000000-{k:03d}/0": "all 2 rewards are 1.0" for k in (0, 2)})
    assert taken[1] == (4, {"r000001-001/0": "all 2 rewards are 1.0", "r000001-003/0": surplus})
    assert taken[2] == (4, {f"r000002-{k:03d}/0": surplus for k in (2, 3)})
    assert taken[3][0] == 2 + 3 + 2 == len(taken[3][1]), "its batch, the refills and what oversampling asks for"


def test_a_filter_that_returns_no_reason_writes_no_entry(run: RunDir) -> None:
    (run.root / "mine.py").write_text("def keep(group): return True\n")
    trainer = Trainer(run, 1)
    trainer.selection.filters = make_filters([f"{run.root}/mine.py:keep"])
    assert trainer.entry() is None
    generate(run, 0)
    with pytest.raises(RunError, match=r"mine.py:keep' returned True \(bool\) for source 0, prompt 0"):
        trainer.entry()
    assert Ledger(run).find(0) is None
    assert Trainer(run, 2).train().step == 0  # whoever has a filter that is right goes on


def test_a_full_disk_while_requests_are_released_again_loses_none(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(run, 1)
    calls = iter(range(100))

    def full(*args: Any, **options: Any) -> bool:
        if next(calls) in (1, 4):
            raise OSError(errno.ENOSPC, "full")
        return publish(*args, **options)

    monkeypatch.setattr("relax_hpc.spool.queue.publish", full)
    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            trainer.entry()
    assert trainer.entry() is None
    assert in_progress(run) == names(0, 1)


def test_requests_that_a_power_failure_emptied_are_released_again(run: RunDir) -> None:
    trainer = Trainer(run, 1)
    state = trainer.state()
    trainer.entry()
    for path in run.open_requests.iterdir():
        path.write_bytes(b"")
    assert Trainer(run, 2, state=state).entry() is None
    assert set(generate(run, 0)) == names(0, 1)


def test_a_fenced_trainer_takes_nothing(run: RunDir) -> None:
    old = Trainer(run, 1)
    old.entry()
    Trainer(run, 2)
    generate(run, 0)
    with pytest.raises(FileNotFoundError):
        old.entry()
    assert not list(run.ledger.rglob("*.json"))


def test_a_fenced_trainer_withdraws_nothing(run: RunDir) -> None:
    """It does not know the extra requests of its successor, which would wait for them."""
    old = Trainer(run, 1, staleness=0, extra_requests=4)
    new = Trainer(run, 2, staleness=0, extra_requests=4)
    assert new.entry() is None and set(generate(run, 0)) == names(0)
    assert new.entry() is None and in_progress(run) == {"r000000-002"}
    with pytest.raises(FileNotFoundError):
        old.entry()
    assert in_progress(run) == {"r000000-002"}


def evaluations(run: RunDir) -> Evaluations:
    recipe = tiny.recipe(
        run={"steps": 4},
        evaluation={"every": 2},
        trainer={"prompts_per_step": 2},
        rollout={"groups_per_request": 1},
        algorithm={"group_size": 2},
    )
    (commit_dir := run.lease / "000001").mkdir(exist_ok=True)
    said = Telemetry(run, "trainer-0", 0).metrics
    return Evaluations(run, recipe, RequestQueue(run), [(0, i) for i in range(3)], Quarantine(run, commit_dir, said))


def test_a_score_is_asked_for_once_and_told_once(run: RunDir) -> None:
    asked = evaluations(run)
    for version in (0, 0, 1):
        asked.request(version, 0)
    assert in_progress(run) == {"e000000-000", "e000000-001"}
    assert list(asked.collect()) == [] and asked.needs(1) == {0} and asked.needs(2) == {0, 2}
    generate(run, 1)
    (score,) = asked.collect()
    assert (score.version, score.lineage, score.all.prompts, score.all.failed) == (0, 0, 2, 0)
    asked.request(0, 0)
    assert list(asked.collect()) == [] and asked.pending == {} and in_progress(run) == set() == asked.needs(1)


def test_a_version_of_another_lineage_is_evaluated_by_itself_and_drawn_alike(run: RunDir) -> None:
    asked = evaluations(run)
    asked.request(2, 0)
    asked.request(2, 1)
    assert in_progress(run) == {"e000002-000", "e000002-001", "e000002l1-000", "e000002l1-001"}
    requests = {name.partition(".")[0]: read_json(run.open_requests / name) for name in os.listdir(run.open_requests)}
    assert requests["e000002-001"]["seed"] == requests["e000002l1-001"]["seed"] != requests["e000002-000"]["seed"]
    generate(run, 2)
    assert {(score.version, score.lineage) for score in asked.collect()} == {(2, 0), (2, 1)}


def test_an_evaluation_whose_weights_are_gone_is_given_up_by_the_successor(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    evaluations(run).request(2, 0)
    generate(run, 2, count=1)
    successor = evaluations(run)
    successor.resume()
    assert in_progress(run) == set() and successor.pending == {}
    assert "the evaluation of version 2 (lineage 0) is given up: its weights are not on disk" in caplog.text
    successor.request(2, 0)
    assert in_progress(run) == {"e000002-001"}, "published again, it can be generated after all"


def publish_weights(run: RunDir, version: int) -> None:
    FilePublisher(run, run.lease / "000001", 1).publish(version, lambda: [("w", torch.zeros(2))])


def test_an_evaluation_whose_requests_a_power_failure_emptied_is_asked_for_again(run: RunDir) -> None:
    evaluations(run).request(2, 0)
    publish_weights(run, 2)
    generate(run, 2, count=1)
    for path in run.open_requests.iterdir():
        path.write_bytes(b"")
    successor = evaluations(run)
    successor.resume()
    generate(run, 2)
    assert [score.version for score in successor.collect()] == [2]


def test_a_damaged_shard_of_an_evaluation_is_generated_again_by_its_version_while_that_is_there(run: RunDir) -> None:
    asked = evaluations(run)
    asked.request(2, 0)
    publish_weights(run, 2)
    generate(run, 2)
    flip(run.shard("e000002-001"))
    assert list(asked.collect()) == [] and asked.needs(3) == {2}, "its weights stay"
    assert in_progress(run) == {"e000002-001"} and len(list(run.quarantine.glob("e000002-001.0.*"))) == 2
    generate(run, 3)
    (score,) = asked.collect()
    assert (score.version, asked.pending) == (2, {})


def test_an_evaluation_that_is_damaged_for_good_is_reported_and_the_run_goes_on(run: RunDir) -> None:
    """Once for the weights are gone; of another version the shards are damaged again and again."""
    asked = evaluations(run)
    for version, times in ((0, 1), (2, MOST + 1)):
        asked.request(version, 0)
        for _ in range(times):
            assert (version, 0) in asked.pending
            generate(run, version)
            flip(run.shard(f"e{version:06d}-000"))
            assert list(asked.collect()) == []
        publish_weights(run, 2)
    assert asked.pending == {} and in_progress(run) == set() == asked.needs(1)
    records, _ = read_metrics(run.metrics / "trainer-0.jsonl")
    failed = [(r["version"], r["reason"]) for r in records if r["kind"] == "eval_failed"]
    assert [version for version, _ in failed] == [0, 2]
    assert "e000000-000.h5" in failed[0][1] and "its weights are not on disk any more" in failed[0][1]
    assert "3 shards of this request" in failed[1][1]


def test_a_score_that_an_earlier_trainer_asked_for_is_waited_for(run: RunDir) -> None:
    evaluations(run).request(2, 0)
    publish_weights(run, 2)
    generate(run, 2, count=1)
    successor = evaluations(run)
    successor.resume()
    assert in_progress(run) == {"e000002-001"}
    generate(run, 3)
    (score,) = successor.collect()
    assert score.version == 2


def test_a_score_that_was_complete_but_not_told_is_told_by_the_successor(run: RunDir) -> None:
    evaluations(run).request(2, 0)
    generate(run, 2)
    successor = evaluations(run)
    successor.resume()
    (score,) = successor.collect()
    assert score.version == 2
    Telemetry(run, "trainer-0", 0).metrics("eval", version=2, lineage=0)
    third = evaluations(run)
    third.resume()
    assert list(third.collect()) == [] and in_progress(run) == set()


def test_groups_are_trained_on_once_more_within_the_bound_and_the_audit_knows_of_it(run: RunDir) -> None:
    """What version 0 made is taken at steps 0 to 2, where the bound is 2."""
    trainer = Trainer(run, 1, staleness=2, sample_reuse=3)
    trainer.entry()
    role = SimpleNamespace(
        run=run,
        columns=(),
        shard_reader=trainer.arrivals.shard_reader,
        bound=2,
        recipe=tiny.recipe(algorithm={"sample_reuse": 3}, **{"async": {"max_staleness": 2}}),
    )
    telemetry, reused, state = Telemetry(run, "trainer-0", 0), {}, trainer.state()
    for step in range(6):
        generate(run, step)
        entry = trainer.train()
        batch = TrainerRole.read_batch(role, entry)  # type: ignore[arg-type]
        telemetry.trained(step, 1, batch.rollouts.ids)
        reused[step] = entry.reused
        own = len(entry.take) - len(entry.filtered)
        assert len(np.unique(batch.rollouts.group)) == own + len(entry.reused)
    # Of the others all samples have one reward, or from step 3 on they are out of the bound.
    assert reused == {0: {}, 1: {"r000000-001/0": 0}, 2: {"r000001-000/0": 1}, 3: {}, 4: {}, 5: {}}
    successor = Trainer(run, 2, staleness=2, sample_reuse=3, state=state)
    assert [successor.train().reused for _ in range(6)] == list(reused.values())

    folder = run.checkpoint(6)
    folder.mkdir()
    (folder / "DONE").touch()
    (folder / "state.json").write_bytes(to_json({"step": 6} | successor.state()))
    run.identity.write_bytes(to_json({"id": "test"}))
    run.recipe.write_text(dump_recipe(role.recipe))
    found = audit(run.root)
    assert (found.lost, found.twice, found.torn, found.over_bound, found.mixed) == ([], [], [], [], [])
    path = run.ledger_entry(5)
    entry, whole = Ledger(run).find(5), path.read_bytes()
    assert entry is not None
    path.write_bytes(whole.replace(b'"lineage": 0', b'"lineage": 1'))
    assert [str(path) in line and "checksum" in line for line in audit(run.root).torn] == [True]
    path.write_bytes(sealed(dataclasses.replace(entry, reused={"r000000-001/0": 0})))
    found = audit(run.root)
    assert found.over_bound == ["step 5: r000000-001/0 once more"] and found.lost[:1] == ["r000000-001/0"]
    path.write_bytes(sealed(entry))
    path, entry = run.ledger_entry(2), Ledger(run).find(2)
    assert entry is not None
    path.write_bytes(sealed(dataclasses.replace(entry, reused={})))
    assert audit(run.root).twice == ["r000001-000/0", "r000001-000/1"]
    for name, version, weights in (("e000002-000", 2, "a"), ("e000002-001", 3, "a"), ("e000004l1-000", 4, "b")):
        group = Group(Prompt(0, 0, "", np.zeros(1, np.int32)), [sample(version)])
        publish(
            run.shard(name), encode(name, [group], {"version": 2, "lineage": int("l1" in name), "weights": weights})
        )
    publish(run.weights / "v00000002.l0.json", to_json({"checksum": "c"}))
    assert audit(run.root).mixed == [
        "e000002-001 was generated by versions [(2, 0), (3, 0)] (number, lineage)",
        "e000004l1-000 was generated by versions [(2, 1), (4, 1)] (number, lineage)",
        "version 2 (lineage 0) was evaluated with weights ['a', 'c']",
    ]


def test_an_entry_says_how_many_samples_of_each_source_were_solved(run: RunDir) -> None:
    trainer = Trainer(run, 1, solved_at=1.0)
    assert trainer.entry() is None
    queue = RequestQueue(run)
    claims = [queue.claim(WORKER, 0) for _ in range(2)]
    for claim, source, rewards in zip(claims, (3, 0), ((1.0, 1.0), (0.5, 1.5)), strict=True):
        assert claim is not None
        samples = [dataclasses.replace(sample(), raw_reward=reward) for reward in rewards]
        groups = [
            Group(Prompt(source, 0, "x", np.arange(2, dtype=np.int32), "1"), samples, reason)
            for reason in ("", "failed")
        ]
        publish_shard(run, claim, encode(claim.request.id, groups, {"version": 0}), WORKER)
    entry = trainer.train()
    assert entry.solved == {"3": (2, 2), "0": (1, 2)}, "what the filter keeps out counts, what failed does not"
    assert f"{claims[0].request.id}/0" in entry.filtered  # type: ignore[union-attr]
    found = Ledger(run).find(0)
    assert found is not None and {k: tuple(v) for k, v in found.solved.items()} == entry.solved


@pytest.mark.parametrize("on_stale", ["wait", "mask"])
def test_tokens_beyond_the_bound_are_masked_where_the_recipe_says_so_and_refused_elsewhere(
    run: RunDir, on_stale: Any
) -> None:
    """A sample begun with version 2 and ended with 4, trained at step 5 with a bound of 1: what the trainer's role takes."""
    trainer = Trainer(run, 1)
    assert trainer.entry() is None
    claim = RequestQueue(run).claim(WORKER, 4)
    assert claim is not None
    spans = [(0, 2), (2, 3), (3, 4)]
    sample = Sample(
        np.arange(5, dtype=np.int32), np.array([1, 1, 1, 1, 0], np.uint8), np.zeros(5, np.float32), spans, Finish.STOP
    )
    group = Group(Prompt(0, 0, "x", np.arange(2, dtype=np.int32), "1"), [sample, sample])
    publish_shard(run, claim, encode(claim.request.id, [group], {"version": 2}), WORKER)
    entry = Entry(5, 1, 0, (Taken(claim.request.id, 2),), {}, ())
    engine = {"engine": "sglang"} if on_stale == "mask" else {}
    role = SimpleNamespace(
        run=run,
        columns=(),
        shard_reader=trainer.arrivals.shard_reader,
        bound=1,
        recipe=tiny.recipe(rollout=engine, **{"async": {"on_stale": on_stale}}),
    )
    if on_stale == "wait":
        with pytest.raises(RunError, match="1 to 3 versions old, the bound is 1"):
            TrainerRole.read_batch(role, entry)  # type: ignore[arg-type]
        return
    batch = TrainerRole.read_batch(role, entry)  # type: ignore[arg-type]
    rollouts, masked = batch.rollouts, batch.masked
    assert rollouts.loss_mask.tolist() == [0, 0, 0, 1, 0] * 2 and masked == 6


def flip(path: Path, column: str = "tokens") -> None:
    """A bit of a published shard's column."""
    with h5py.File(path, "r", locking=False) as file:
        where = file[column].id.get_offset()
    image = bytearray(path.read_bytes())
    image[where] ^= 1
    path.write_bytes(image)


@pytest.mark.parametrize("reused", ["in place", "after a restart"])
def test_a_damaged_shard_that_no_step_took_is_quarantined_and_its_request_generated_again(
    run: RunDir, reused: str
) -> None:
    trainer = Trainer(run, 1, staleness=0)
    assert trainer.entry() is None, "requests are open now"
    generate(run, 0)
    flip(run.shard("r000000-000"))
    if reused == "after a restart":
        trainer = Trainer(run, 2, staleness=0)
    assert trainer.entry() is None and in_progress(run) == {"r000000-000"}
    assert read_json(run.quarantine / "r000000-000.0.reason.json")["reason"].startswith(
        f"'{run.shard('r000000-000')}': column"
    )
    assert [(s["kind"], s["request"], s["times"]) for s in trainer.said] == [("damaged_shard", "r000000-000", 1)]
    assert trainer.entry() is None, "what was quarantined is neither waited for nor an error"
    generate(run, 0)
    assert {t.request for t in trainer.train().take} == names(0)


def test_another_requests_shard_under_a_requests_name_is_quarantined(run: RunDir) -> None:
    trainer = Trainer(run, 1, staleness=0)
    assert trainer.entry() is None, "requests are open now"
    generate(run, 0)
    run.shard("r000000-000").write_bytes(run.shard("r000000-001").read_bytes())
    assert trainer.entry() is None and in_progress(run) == {"r000000-000"}


def test_a_request_whose_shards_are_damaged_again_and_again_ends_the_run_and_is_named(run: RunDir) -> None:
    trainer = Trainer(run, 1, staleness=0)
    assert trainer.entry() is None, "requests are open now"
    for _ in range(MOST):
        generate(run, 0)
        flip(run.shard("r000000-001"))
        assert trainer.entry() is None
    generate(run, 0)
    flip(run.shard("r000000-001"))
    with pytest.raises(RunError, match="r000000-001.*3 shards of this request.*memory of the nodes"):
        trainer.entry()


def test_a_superseded_trainer_moves_nothing_to_quarantine(run: RunDir) -> None:
    old = Trainer(run, 1, staleness=0)
    assert old.entry() is None
    generate(run, 0)
    flip(run.shard("r000000-000"))
    Trainer(run, 2, staleness=0)
    with pytest.raises(FileNotFoundError):
        old.entry()
    assert run.shard("r000000-000").exists() and in_progress(run) == set()


@pytest.mark.parametrize("column", ["tokens", "logprobs", "samples"])
def test_a_damaged_shard_that_a_step_took_stops_the_run_and_says_what_can_be_done(run: RunDir, column: str) -> None:
    trainer = Trainer(run, 1, staleness=0)
    assert trainer.entry() is None, "requests are open now"
    generate(run, 0)
    trainer.train()
    flip(run.shard("r000000-001"), column)
    entry = Trainer(run, 2, staleness=0).entry()
    assert entry is not None, "a replay takes what the ledger says"
    with pytest.raises(RunError, match=f"step 0 .*r000000-001.*column '{column}'.*from a copy.*--fork NAME"):
        load_batch(entry, run, Shards(run, None), ())
    assert run.shard("r000000-001").exists()


def test_a_damaged_copy_in_a_nodes_memory_is_removed_and_the_published_shard_read(run: RunDir, tmp_path: Path) -> None:
    run.identity.write_bytes(to_json({"id": "this"}))
    trainer = Trainer(run, 1, staleness=0)
    assert trainer.entry() is None, "requests are open now"
    generate(run, 0)
    trainer.arrivals.shard_reader = shards = Shards(run, tmp_path / "memory")
    for request in names(0):
        shards.put(request, run.shard(request).read_bytes())
        flip(shards.copy(request))
    assert {t.request for t in trainer.train().take} == names(0)
    assert [shards.copy(request) for request in names(0)] == [None, None]


def test_a_nodes_memory_holds_no_more_copies_than_readers_may_want(run: RunDir, tmp_path: Path) -> None:
    run.identity.write_bytes(to_json({"id": "this"}))
    cache, published = NodeCache(run, tmp_path / "memory", most=2), ["r000000-000", "r000000-001", "r000000-002"]
    for name in published:
        publish(run.shard(name), b"".join(image(name, 0)))
        cache.put(name, run.shard(name).read_bytes())
    assert [cache.copy(name) is not None for name in published] == [False, True, True]


def test_a_copy_in_a_nodes_memory_is_of_the_very_file_that_is_published(run: RunDir, tmp_path: Path) -> None:
    """The node generated the request, its shard was damaged on the disk alone, and another node has generated it again."""
    run.identity.write_bytes(to_json({"id": "this"}))
    trainer = Trainer(run, 1, staleness=0)
    assert trainer.entry() is None, "requests are open now"
    generate(run, 0)
    path, shards = run.shard("r000000-000"), Shards(run, tmp_path / "memory")
    shards.put("r000000-000", path.read_bytes())
    assert shards.copy("r000000-000") is not None
    flip(path)
    assert trainer.entry() is None and shards.copy("r000000-000") is None
    generate(run, 0)
    other = b"".join(image("r000000-000", 7))
    path.write_bytes(other)
    assert shards.read("r000000-000", lambda shard: shard.first_version) == 7
    shards.put("r000000-000", other)
    assert [shards.copy("r000000-000")] == list((tmp_path / "memory").rglob("*.h5"))
