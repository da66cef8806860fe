"""Partial rollouts: a request that is given back partly generated, and gone on with by another worker under newer weights."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from relax_hpc.files.publish import to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe import dump_recipe, load_recipe
from relax_hpc.records import Finish, Group, PartialRollout, Sample
from relax_hpc.roles.common.process import RoleProcess, Stop
from relax_hpc.roles.rollout import worker as worker_module
from relax_hpc.roles.rollout.episode import Episode
from relax_hpc.roles.rollout.streaming import Streaming
from relax_hpc.roles.rollout.worker import RolloutWorker
from relax_hpc.spool import partial_rollouts
from relax_hpc.spool.queue import Claim, RequestQueue
from relax_hpc.spool.request import Request
from relax_hpc.spool.shard import Shard
from relax_hpc.telemetry import read_metrics
from relax_hpc.weights import FilePublisher
from tests import metric_lists, tiny
from tools.faults.calls import inject

ORDER = Request("r000000-000", ((0, 1), (0, 2)), 4, 1, 0)
USER = Path(__file__).with_name("user_code.py")


class Setup:
    """A run with requests to generate, its trainer's side, and workers that look up at every token."""

    def __init__(self, folder: Path, partial: dict[str, Any], **tables: Any) -> None:
        self.run = RunDir(folder)
        self.run.create()
        asynchronous = {"on_stale": "mask", "partial": partial}
        rollout = {"device": "cpu", "max_new_tokens": 40} | tables.pop("rollout", {})
        recipe = tiny.recipe(model={"context": 256}, rollout=rollout, **{"async": asynchronous}, **tables)
        self.run.recipe.write_text(dump_recipe(recipe))
        self.run.identity.write_bytes(to_json({"id": "test"}))
        self.weights = load_file(tiny.folder(recipe, self.run.model) / "model.safetensors")
        (commit_dir := self.run.lease / "000001").mkdir()
        self.publisher = FilePublisher(self.run, commit_dir, 1)
        self.queue = RequestQueue(self.run)
        self.workers: list[RolloutWorker] = []
        self.publish(0)
        self.queue.put([ORDER])

    def publish(self, version: int) -> None:
        self.publisher.publish(version, lambda: self.of(version).items())

    def of(self, version: int) -> dict[str, torch.Tensor]:
        return {name: tensor * (1 + version / 4) for name, tensor in self.weights.items()}

    def worker(self, at: int = -1, then: Callable[[RolloutWorker], None] = lambda worker: None) -> RolloutWorker:
        """A new worker, which does `then` when it is about to make token number `at` of its request."""
        name = f"rollout-{len(self.workers)}"
        about = argparse.Namespace(
            run=self.run.root, name=name, attempt=0, supervisor=None, role="rollout", claim_dir=name
        )
        made = RolloutWorker(RoleProcess(about, self.run, load_recipe(self.run.recipe)), name)
        progress, said = made.progress, [0]

        def counting(state: str) -> None:
            if state == "generating":
                said[0] += 1
                if said[0] == at:
                    then(made)
            progress(state)

        made.progress = counting  # type: ignore[method-assign]
        self.workers.append(made)
        return made

    def generate(self, worker: RolloutWorker) -> Claim:
        claim, waited_s = worker.wait_for_claim()
        worker.generate(claim, waited_s)
        worker.publisher.close()
        worker.report_published()
        return claim

    def open_requests(self) -> list[str]:
        return sorted(os.listdir(self.run.open_requests))

    def partials(self) -> list[str]:
        return sorted(os.listdir(self.run.partial_rollouts))

    def lines(self, worker: RolloutWorker, kind: str) -> list[dict[str, Any]]:
        """Metrics, as the page lists them."""
        found = [r for r in read_metrics(self.run.metrics / f"{worker.process.name}.jsonl")[0] if r["kind"] == kind]
        assert not any(metric_lists.listed()[kind].complaint(line) for line in found), found
        return found

    def shard(self) -> list[Group]:
        with Shard(self.run.shard(ORDER.id)) as shard:
            shard.validate()
            return [shard.group(i) for i in range(len(shard.groups))]

    def check_logprobs(self, groups: list[Group]) -> None:
        """Each token of the model's has the logprob that the weights of its span give it after all that was before."""
        for version in (0, 1):
            model = AutoModelForCausalLM.from_pretrained(self.run.model).eval()
            model.load_state_dict(self.of(version), strict=False)
            for group in groups:
                for sample in group.samples:
                    whole = torch.tensor(np.concatenate([group.prompt.tokens, sample.tokens]))[None].long()
                    with torch.no_grad():
                        logits = model(whole).logits[0, len(group.prompt.tokens) - 1 : -1]
                    expected = logits.log_softmax(-1).numpy()[np.arange(len(sample.tokens)), sample.tokens]
                    starts = [start for start, _ in sample.spans]
                    made = np.repeat([v for _, v in sample.spans], np.diff([*starts, len(sample.tokens)]))
                    here = (made == version) & (sample.loss_mask == 1)
                    np.testing.assert_allclose(sample.logprobs[here], expected[here], atol=1e-4)


Make = Callable[..., Setup]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr("relax_hpc.engines.torch.PROGRESS_EVERY_S", 0.0)
    made: list[Setup] = []

    def setup(partial: dict[str, Any], **tables: Any) -> Setup:
        made.append(Setup(tmp_path / f"run{len(made)}", partial, **tables))
        return made[-1]

    yield setup
    for worker in made[0].workers:
        worker.publisher.close()
        worker.runner.close()


def test_at_a_publish_a_request_is_given_back_and_another_worker_goes_on_with_the_new_weights(make: Make) -> None:
    setup = make({})
    first = setup.worker(6, lambda worker: setup.publish(1))
    setup.generate(first)
    assert setup.open_requests() == ["r000000-000.a0.v0.p1"] and setup.partials() == ["r000000-000.p1.h5"]
    assert not setup.run.shard(ORDER.id).exists()
    partial = partial_rollouts.read(setup.run, ORDER, RequestQueue(setup.run).claim("rollout-0", 1).request_file)  # type: ignore[union-attr]
    assert (
        partial is not None
        and partial.cut
        and {len(s.tokens) for i, s in enumerate(partial.samples) if i in partial.cut} == {5}
    )
    [said] = setup.lines(first, "abort")
    assert (said["why"], said["aborts"], said["tokens"]) == ("publish", 1, partial.tokens)
    assert (said["cut_samples"], said["samples"], said["kept"]) == (len(partial.cut), 8, True)
    setup.queue.give_back("rollout-0", lost=True)  # and dies with it
    assert setup.open_requests() == ["r000000-000.a1.v0.p1"]
    second = setup.worker()
    setup.generate(second)
    assert setup.open_requests() == setup.partials() == []
    groups = setup.shard()
    samples = [s for g in groups for s in g.samples]
    for i, (was, now) in enumerate(zip(partial.samples, samples, strict=True)):
        kept = len(was.tokens)
        assert (
            now.tokens[:kept].tolist() == was.tokens.tolist() and now.logprobs[:kept].tolist() == was.logprobs.tolist()
        )
        assert now.spans == ([(0, 0), (kept, 1)] if i in partial.cut else [(0, 0)])
        assert 1 <= len(now.tokens) <= 40 and (now.finish == Finish.LENGTH) == (now.tokens[-1] != 1)
    setup.check_logprobs(groups)
    [line] = setup.lines(second, "request")
    assert (line["aborts"], line["continued_samples"], line["kept_tokens"]) == (1, len(partial.cut), partial.tokens)
    made = sum(len(s.tokens) for s in samples) - partial.tokens
    assert line["tokens_per_s"] == pytest.approx(made / line["generate_s"])


def test_a_time_limit_gives_back_too_and_after_max_aborts_a_request_is_generated_to_its_end(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "MAX_ABORTS", 2)
    setup = make({"abort_after_s": 1e-6})
    worker, seeds = setup.worker(), list[int]()
    for aborts in (1, 2):
        generate = worker.engine.generate
        worker.engine.generate = lambda *a, of=generate, **k: (seeds.append(a[3]), of(*a, **k))[1]  # type: ignore[method-assign]
        setup.generate(worker)
        worker = setup.worker(3, lambda worker: setup.publish(1))
        assert setup.partials() == [f"r000000-000.p{aborts}.h5"], "what it went on from is not needed any more"
    setup.generate(worker)
    assert {v for g in setup.shard() for s in g.samples for _, v in s.spans} == {0}, "it was protected"
    assert seeds[0] == ORDER.seed != seeds[1], "what is left was drawn by the numbers of its beginning"
    assert [line["why"] for w in setup.workers for line in setup.lines(w, "abort")] == ["time", "time"]


def test_a_worker_that_is_asked_to_stop_keeps_what_it_has_even_of_a_protected_request(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "MAX_ABORTS", 1)
    setup = make({})

    def stop(worker: RolloutWorker) -> None:
        worker.process.stopping = True

    setup.generate(setup.worker(5, lambda worker: setup.publish(1)))
    last = setup.worker(4, stop)
    setup.generate(last)
    assert setup.open_requests() == ["r000000-000.a0.v0.p2"] and setup.lines(last, "abort")[0]["why"] == "stop"
    with pytest.raises(Stop):
        last.wait_for_claim()


def test_turns_and_environments_go_on_where_they_were(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment is shown the answers that it had, or is restored from its state: the episodes are the same."""
    shown, restored = (_cut_in_the_second_turn(make, monkeypatch, name) for name in ("Counting", "Kept"))
    for one, other in zip(shown, restored, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and (one.reward, one.spans) == (other.reward, other.spans)
    steps = {(s.turns, s.extra["steps"]) for s in restored if s.turns == 3}
    assert steps == {(3, 2)}, "what was restored was shown its first answer again"


def _cut_in_the_second_turn(make: Make, monkeypatch: pytest.MonkeyPatch, name: str) -> list[Sample]:
    """Play three turns, by the second of which some samples have ended for good, with two workers."""
    source = {"task": "chain_sum", "environment": f"{USER}:{name}", "environment_options": {"turns": 3}}
    setup = make({}, source=[source], rollout={"max_turns": 3, "max_new_tokens": 30, "lockstep": True})
    first = setup.worker()
    generate, turn = first.engine.generate, [0]

    def spoken(*arguments: Any, **named: Any) -> Any:
        turn[0] += 1
        if turn[0] == 2:
            setup.publish(1)
        return generate(*arguments, **named)

    monkeypatch.setattr(first.engine, "generate", spoken)
    setup.generate(first)
    partial = partial_rollouts.read(setup.run, ORDER, setup.queue.claim("rollout-0", 1).request_file)  # type: ignore[union-attr]
    assert partial is not None and {len(begins) for begins in partial.turns} == {1, 2}
    assert {s.turns for s in partial.samples} == {1} and all(len(partial.turns[i]) == 2 for i in partial.cut)
    setup.queue.give_back("rollout-0", lost=False)
    second = setup.worker()
    setup.generate(second)
    groups = setup.shard()
    setup.check_logprobs(groups)
    tokenizer = AutoTokenizer.from_pretrained(setup.run.model)
    observation = tokenizer.encode("go on", add_special_tokens=False)
    for was, now in zip(partial.samples, (s for g in groups for s in g.samples), strict=True):
        assert now.tokens[: len(was.tokens)].tolist() == was.tokens.tolist()
        assert now.tokens[now.loss_mask == 0].tolist() == observation * (now.turns - 1)
        if now.turns == 3:
            said = now.text(tokenizer)
            assert now.reward == len(said) and now.spans[-1][1] == 1
    assert {s.turns for g in groups for s in g.samples} >= {1, 3}
    assert (partial.environments != {}) == (name == "Kept")
    return [s for g in groups for s in g.samples]


def test_episodes_by_themselves_go_on_where_they_were(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut as soon as one sample begins its second turn; others are in their first, or have ended."""
    source = {"task": "chain_sum", "environment": f"{USER}:Counting", "environment_options": {"turns": 3}}
    setup = make({}, source=[source], rollout={"max_turns": 3, "max_new_tokens": 30, "lockstep": False})
    ask, published = Streaming._ask, list[int]()

    def spoken(self: Streaming, number: int, episode: Episode) -> None:
        ask(self, number, episode)
        if len(episode.begins) == 2 and not published:
            setup.publish(1)
            published.append(number)

    monkeypatch.setattr(Streaming, "_ask", spoken)
    setup.generate(setup.worker())
    partial = partial_rollouts.read(setup.run, ORDER, setup.queue.claim("rollout-0", 1).request_file)  # type: ignore[union-attr]
    assert partial is not None and {1, 2} == {len(begins) for begins in partial.turns} and published[0] in partial.cut
    setup.queue.give_back("rollout-0", lost=False)
    setup.generate(setup.worker())
    groups = setup.shard()
    setup.check_logprobs(groups)
    observation = AutoTokenizer.from_pretrained(setup.run.model).encode("go on", add_special_tokens=False)
    for i, (was, now) in enumerate(zip(partial.samples, (s for g in groups for s in g.samples), strict=True)):
        assert now.tokens[: len(was.tokens)].tolist() == was.tokens.tolist()
        assert now.tokens[now.loss_mask == 0].tolist() == observation * (now.turns - 1)
        assert len(now.tokens) > len(was.tokens) or i not in partial.cut
    assert {version for g in groups for s in g.samples for _, version in s.spans} == {0, 1}


def test_an_environment_that_answers_otherwise_the_second_time_begins_anew(make: Make) -> None:
    source = {"task": "chain_sum", "environment": f"{USER}:Counting", "environment_options": {"turns": 2}}
    setup = make({}, source=[source], rollout={"max_turns": 2, "max_new_tokens": 30})
    claim, _ = setup.worker().wait_for_claim()
    prompts = setup.workers[0].runner.prompts(ORDER)
    sample = dataclasses.replace(
        _sample(), tokens=np.array([5, 6, 9, 7], np.int32), loss_mask=np.array([1, 1, 0, 1], np.uint8), turns=1
    )
    partial = PartialRollout(
        [Group(p, [sample] * 4) for p in prompts], [[0, 3]] * 8, [*range(8)]
    )  # the observation is not "go on"
    assert partial_rollouts.put_back(setup.run, setup.queue, claim, partial, "none")
    setup.generate(setup.workers[0])
    assert all(s.tokens[:4].tolist() != [5, 6, 9, 7] for g in setup.shard() for s in g.samples)


def test_of_two_parts_with_one_number_the_first_is_gone_on_from_and_a_broken_one_costs_its_tokens_only(
    make: Make,
) -> None:
    setup = make({})
    worker = setup.worker()
    prompts = worker.runner.prompts(ORDER)
    partial = lambda token: PartialRollout(
        [Group(p, [dataclasses.replace(_sample(), tokens=np.full(4, token, np.int32))] * 4) for p in prompts],
        [[0]] * 8,
        [*range(8)],
    )
    zombies, _ = worker.wait_for_claim()
    setup.queue.give_back("rollout-0", lost=True)
    other = setup.worker()
    claim, _ = other.wait_for_claim()
    assert partial_rollouts.put_back(setup.run, setup.queue, zombies, partial(5), "none")
    assert setup.open_requests() == [], "the request is not its own any more"
    assert not partial_rollouts.put_back(setup.run, setup.queue, claim, partial(6), "none")
    assert setup.open_requests() == ["r000000-000.a1.v0.p1"]
    claim, waited_s = other.wait_for_claim()
    found = partial_rollouts.read(setup.run, claim.request, claim.request_file)
    assert found is not None and found.samples[0].tokens.tolist() == [5, 5, 5, 5]
    (path,) = setup.run.partial_rollouts.iterdir()
    data = bytearray(path.read_bytes())
    at = data.index(np.full(4, 5, np.int32).tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert partial_rollouts.read(setup.run, claim.request, claim.request_file) is None
    other.generate(claim, waited_s)
    other.publisher.close()
    assert len(setup.shard()) == 2 and setup.partials() == []


def test_a_part_stays_until_the_next_one_is_there(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make({})
    worker = setup.worker()
    groups = [Group(p, [_sample()] * 4) for p in worker.runner.prompts(ORDER)]
    part = PartialRollout(groups, [[0]] * 8, [*range(8)])
    put_back = lambda: partial_rollouts.put_back(setup.run, setup.queue, worker.wait_for_claim()[0], part, "none")
    assert put_back() and setup.partials() == ["r000000-000.p1.h5"]
    faults = inject(monkeypatch, setup.run.partial_rollouts)
    faults.rule = lambda number, call, path: "before" if call == "link" else None
    with pytest.raises(OSError):
        put_back()
    faults.rule = lambda number, call, path: None
    assert setup.partials() == ["r000000-000.p1.h5"]
    setup.queue.give_back("rollout-0", lost=True)
    worker = setup.worker()
    assert put_back() and setup.partials() == ["r000000-000.p2.h5"]


def test_parts_of_requests_that_are_over_are_removed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    partial_rollouts.remove(run, [], 9)
    run.create()
    for request in ("r000001-000", "r000002-000", "r000005-000"):
        run.partial_rollout(request, 1).touch()
    partial_rollouts.remove(run, ["r000002-000"], 4)
    assert sorted(p.name for p in run.partial_rollouts.iterdir()) == ["r000002-000.p1.h5", "r000005-000.p1.h5"]


def _sample() -> Sample:
    return Sample(
        np.zeros(4, np.int32), np.ones(4, np.uint8), np.full(4, -1, np.float32), [(0, 0)], Finish.STOP, turns=0
    )
