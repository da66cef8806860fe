"""`relax-hpc simulate`: simulated runs keep the real book's promises, agree with arithmetic, and take their times from metrics."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from relax_hpc.cli import app
from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.planning.simulation.file_calls import calls_per_second
from relax_hpc.planning.simulation.model import Simulation
from relax_hpc.planning.simulation.outcome import Outcome, summarize
from relax_hpc.planning.simulation.setup import Setup, Trace
from relax_hpc.planning.simulation.sweep import recommend
from relax_hpc.planning.simulation.times import Floats, Lognormal, Measured, Times
from relax_hpc.spool.planner import Choice
from relax_hpc.spool.request import OnStale

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TRAIN_S, PUBLISH_S, FETCH_S = 100.0, 10.0, 5.0


@dataclass
class InTurn:
    """Requests that last as long as said, in the order in which they are asked for; then the last one's time."""

    seconds: list[float]
    drawn: int = field(default=0)

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Floats, Floats]:
        found = [self.seconds[min(i, len(self.seconds) - 1)] for i in range(self.drawn, self.drawn + count)]
        self.drawn += count
        return np.array(found), np.ones(count)


def times(generate: float | Any, train: float = TRAIN_S, **other: float) -> Times:
    requests = Measured(np.array([generate]), np.ones(1)) if isinstance(generate, int | float) else generate
    seconds = {"fetch_s": FETCH_S, "shard_s": 0.0, "checkpoint_s": 0.0, "restart_s": 50.0, "worker_lost_s": 15.0}
    seconds |= {"worker_restart_s": 60.0} | other
    return Times(requests, np.array([train]), np.array([PUBLISH_S]), **seconds)


def setup(workers: int, staleness: int, n: int, on_stale: OnStale = "wait", steps: int = 40, **other: Any) -> Setup:
    about = {"workers_per_node": 2, "groups_per_request": 2, "samples_per_prompt": 4, "checkpoint_every": 10, **other}
    return Setup(workers=workers, max_staleness=staleness, requests_per_step=n, on_stale=on_stale, steps=steps, **about)


def mean_step_s(trace: Trace) -> float:
    return float(np.diff(trace.ended_s)[5:].mean())


# closed forms: looking for what is new adds at most some seconds to hundreds


@pytest.mark.parametrize("generate", [30.0, 400.0])
def test_on_policy_nothing_overlaps(generate: float) -> None:
    took = mean_step_s(Simulation(setup(4, 0, 4), times(generate)).run())
    assert took == pytest.approx(FETCH_S + generate + TRAIN_S + PUBLISH_S, abs=2)


@pytest.mark.parametrize("generate", [30.0, 400.0])
def test_one_version_stale_the_slower_side_is_what_a_step_takes(generate: float) -> None:
    run, slower = setup(4, 1, 4, steps=20), max(FETCH_S + generate, TRAIN_S + PUBLISH_S)
    trace = Simulation(run, times(generate)).run()
    assert mean_step_s(trace) == pytest.approx(slower, abs=2)
    said = summarize(run, None, trace)
    assert said.samples_s == pytest.approx(4 * 2 * 4 / slower, rel=0.008), (
        "the first steps, which fill the pipeline, left out"
    )
    assert said.step_p95_s == pytest.approx(slower, abs=2)
    assert sum(trace.trainer_s.values()) == pytest.approx(trace.ended_s[-1])


def test_more_workers_are_never_slower() -> None:
    took = [mean_step_s(Simulation(setup(w, 1, 8), times(300.0)).run()) for w in (1, 2, 3, 4, 6, 8, 16)]
    assert all(more <= fewer + 1 for fewer, more in zip(took, took[1:], strict=False))
    assert took[0] == pytest.approx(8 * 300 + FETCH_S, rel=0.01)
    both = (FETCH_S + 300 + TRAIN_S + PUBLISH_S) / 2
    assert took[-1] == pytest.approx(both, rel=0.01), (
        "two batches are generated at once, each from its version to the next but one"
    )


def test_tokens_out_of_the_bound_are_masked_and_the_order_goes_on() -> None:
    """One request of 1000 s beside others of 100 s: a version each 210 s. Step 5 takes it, and version 4, of 840 s, made the rest."""
    run, requests = setup(2, 1, 1, "mask", steps=12), [1000.0, 100.0]
    trace = Simulation(run, times(InTurn(requests), fetch_s=0.0)).run()
    assert trace.ledger[5][0] == ("r000000-000",)
    assert trace.masked_tokens == pytest.approx(0.84, abs=0.01) and max(trace.ages) == 1
    slow = Simulation(run, times(InTurn(requests), fetch_s=20.0)).run()
    assert slow.ledger[5][0] == ("r000000-000",), "a version each 230 s"
    # five versions, the first included, were each taken for 20 s: it ends at 1100 s, of which version 4 made the last 160
    assert slow.masked_tokens == pytest.approx(0.84, abs=0.01)


def test_training_time_that_faults_leave_is_daly_s() -> None:
    """A fault each M s, segments of N steps and a checkpoint, restarts of R s that can fail too: M e^(R/M) (e^(segment/M) - 1)."""
    mtbf, restart, checkpoint, every = 4000.0, 200.0, 40.0, 10
    run = setup(8, 1, 1, steps=4000, checkpoint_every=every, trainer_mtbf_s=mtbf)
    trace = Simulation(run, times(10.0, train=20.0, restart_s=restart, checkpoint_s=checkpoint)).run()
    useful = every * (20.0 + PUBLISH_S)
    expected = useful / (mtbf * math.exp(restart / mtbf) * (math.exp((useful + checkpoint) / mtbf) - 1))
    said = summarize(run, None, trace)
    assert trace.trainer_faults > 25
    assert said.effective == pytest.approx(expected, abs=0.02)
    calm = summarize(run, None, Simulation(replace(run, trainer_mtbf_s=math.inf), times(10.0, train=20.0)).run())
    assert calm.effective == 1 and said.samples_s / calm.samples_s == pytest.approx(said.effective, abs=0.02)


# the planner's promises


class Watched(Simulation):
    """Checks that whoever is not asked would have said no."""

    def _held_up(self, step: int) -> bool:
        held_up = super()._held_up(step)
        if held_up:
            assert self.planner.choose(step, self.first, self.rollouts.in_progress()) is None
        return held_up

    def _choose(self, step: int) -> Generator[Any, Any, Choice | None]:
        choice = yield from super()._choose(step)
        assert choice is None or self.setup.on_stale == "mask" or all(i in self.first for i in choice.take)
        return choice


RANDOM_SETUPS = st.builds(
    setup,
    workers=st.integers(1, 9),
    staleness=st.integers(0, 3),
    n=st.integers(1, 5),
    on_stale=st.sampled_from(["wait", "drop", "mask"]),
    steps=st.just(25),
    seed=st.integers(0, 99),
    trainer_mtbf_s=st.sampled_from([math.inf, 3000.0]),
    node_mtbf_s=st.sampled_from([math.inf, 500.0]),
)


@settings(max_examples=100, deadline=None)
@given(run=RANDOM_SETUPS, train=st.sampled_from([1.0, 20.0, 150.0]), sigma=st.floats(0, 1.5))
def test_every_request_is_trained_once_and_no_token_is_too_old(run: Setup, train: float, sigma: float) -> None:
    requests = Lognormal(mean=1000, sigma=sigma, longest=10**6, samples=2, base_s=1.0, token_s=0.03)
    simulation = Watched(run, times(requests, train=train))
    trace = simulation.run()
    stems = sorted(i.partition("x")[0] for take, _ in trace.ledger for i in take)
    assert stems == [f"r{batch:06d}-{k:03d}" for batch in range(run.steps) for k in range(run.requests_per_step)]
    assert simulation.planner.outstanding == {}, "all that was asked for was trained on"
    assert not simulation.complete and not simulation.drawn, "nothing is left of it"
    assert max(trace.ages, default=0) <= run.max_staleness
    assert run.on_stale == "drop" or not any(drop for _, drop in trace.ledger)
    assert (run.on_stale == "mask") or trace.masked_tokens == 0
    assert sum(trace.trainer_s.values()) == pytest.approx(trace.ended_s[-1]), "the trainer does one thing at a time"
    assert 0 <= trace.idle_s <= run.workers * trace.ended_s[-1] * (1 + 1e-9)
    assert (run.trainer_mtbf_s < math.inf) or trace.trainer_s["lost"] == 0


def test_the_same_seed_gives_the_same_run() -> None:
    requests = Lognormal(mean=1000, sigma=1.0, longest=10**6, samples=2, base_s=1.0, token_s=0.03)
    faulty = setup(5, 2, 4, "drop", trainer_mtbf_s=2000.0, node_mtbf_s=900.0)
    first, again = (Simulation(faulty, times(requests)).run() for _ in range(2))
    assert first == again
    assert Simulation(replace(faulty, seed=1), times(requests)).run() != first


def test_workers_claim_the_first_request_by_name_that_the_newest_weights_may_start() -> None:
    rollouts = Simulation(setup(1, 1, 1), times(100.0)).rollouts
    rollouts.put({"r000002-000": 0, "r000000-000": 2, "r000001-000": 1, "r000001-001": 0}, {})
    assert [rollouts.claim() for _ in range(3)] == ["r000001-001", "r000002-000", None]
    rollouts.announce()
    assert [rollouts.claim() for _ in range(2)] == ["r000001-000", None]
    rollouts.announce()
    rollouts.withdraw(["r000003-000"])
    assert rollouts.claim() == "r000000-000" and rollouts.started["r000000-000"] == 2


def test_what_a_lost_worker_generated_holds_nothing_up_once_it_is_given_back() -> None:
    """A request of version 0 lasts 1000 s, so step 1 waits for it; its worker is lost at 500 s, and 15 s later it may start later."""
    simulation = Simulation(setup(2, 1, 1, steps=3), times(InTurn([1000.0, 100.0]), fetch_s=0.0))

    def fault() -> Generator[Any, Any, None]:
        yield simulation.env.timeout(500.0)
        runner = next(w for w in simulation.rollouts.workers if w.request == "r000000-000")
        runner.process.interrupt()

    simulation.env.process(fault())
    trace = simulation.run()
    assert trace.ended_s[1] == pytest.approx(515 + TRAIN_S + PUBLISH_S, abs=1)
    assert ("r000000-000",) in [take for take, _ in trace.ledger]


def test_a_worker_that_is_lost_on_its_way_to_a_request_leaves_it_to_another() -> None:
    never = 1e7
    simulation = Simulation(setup(2, 0, 1, steps=3, workers_per_node=1), times(100.0, worker_restart_s=never))
    rollouts, lost = simulation.rollouts, []
    call = rollouts.call

    def called(count: int) -> None:
        before = set(rollouts.waiting)
        call(count)
        if not lost and (gone := before - set(rollouts.waiting)):
            lost.append(gone.pop())
            simulation.env.timeout(0).callbacks.append(lambda _: lost[0].process.interrupt())

    rollouts.call = called  # type: ignore[method-assign]
    assert simulation.run().ended_s[-1] < never and len(lost) == 1


def test_a_request_that_replaces_a_dropped_one_takes_as_long() -> None:
    """A request of 1000 s beside others of 100 s is dropped twice, then waited for: each time from its beginning."""
    trace = Simulation(setup(2, 1, 1, "drop", steps=12), times(InTurn([1000.0, 100.0]))).run()
    dropped = {request: step for step, (_, drop) in enumerate(trace.ledger) for request in drop}
    assert list(dropped) == ["r000000-000", "r000000-000x1"]
    taken = next(step for step, (take, _) in enumerate(trace.ledger) if take == ("r000000-000x2",))
    again = trace.ended_s[dropped["r000000-000x1"]]
    assert trace.ended_s[taken] > again + 1000 and max(np.diff(trace.ended_s)) > 500, "the trainer waited for it"


def test_faults_without_end_are_said() -> None:
    with pytest.raises(RunError, match="checkpoint_every = 10"):
        Simulation(setup(2, 1, 1, trainer_mtbf_s=60.0), times(10.0)).run()


@pytest.mark.parametrize(("workers", "per_request", "idle"), [(2, 197, 41), (8, 202, 57), (32, 191, 70)])
def test_file_calls_are_those_of_the_benchmark(workers: int, per_request: float, idle: float) -> None:
    """The table of docs/benchmarks.md: two requests a second that cost no time, then none."""
    assert calls_per_second(workers, 1, workers, 2.0) / 2 == pytest.approx(per_request, rel=0.07)
    assert calls_per_second(workers, 1, workers, 0.0) == pytest.approx(idle, rel=0.07)


def test_the_cheapest_of_the_fast_ones_is_recommended() -> None:
    run = setup(4, 1, 4)
    one = summarize(run, None, Simulation(run, times(30.0)).run())
    rows: list[Outcome] = [
        replace(one, workers=4, samples_s=9.0),
        replace(one, workers=8, samples_s=9.7, max_staleness=1),
        replace(one, workers=8, samples_s=9.8, max_staleness=4),
        replace(one, workers=16, samples_s=10.0),
        replace(one, workers=2, samples_s=12.0, on_stale="drop", dropped=0.2),
    ]
    best, why = recommend(rows)
    assert best is rows[1] and "97% of the most (16 workers" in why
    assert recommend([*rows, replace(one, mtbf_h=10.0)])[0].mtbf_h == 10.0, "the worst that was asked for"


# a run's metrics


RECIPE = """
[run]
checkpoint_every = 5
[model]
name = "tiny"
[algorithm]
group_size = 2
[trainer]
prompts_per_step = 4
[rollout]
workers = 2
groups_per_request = 2
max_new_tokens = 16
[[source]]
task = "chain_sum"
"""


def a_run(folder: Path, steps: int = 10) -> RunDir:
    """Requests of 20 and 40 s, steps of 7 s (1 s of it at none of what is measured), publishing 1 s, fetching 2 s, one restart."""
    run = RunDir(folder)
    run.create()
    run.identity.write_text("{}")
    run.recipe.write_text(RECIPE)
    step = {
        "kind": "step",
        "incarnation": 1,
        "replayed": False,
        "wait_s": 3.0,
        "train_s": 6.0,
        "publish_s": 1.0,
        "step_s": 11.0,
    }
    lines: dict[str, list[dict[str, Any]]] = {
        "trainer-0": [step | {"step": s, "time": 11.0 * s} for s in range(steps)],
        "rollout-0": [
            {"kind": "request", "attempt": 0, "request": f"r{i:06d}-000", "samples": 4, "tokens": 40 * (1 + i % 2), "publish_s": 0.5,
             "generate_s": 20.0 * (1 + i % 2) + 3.0, "swap_s": 3.0, "sync_s": 2.0 * (i % 2)}
            for i in range(1, 9)
        ],
        "supervisor": [{"kind": "lost", "role": "trainer", "time": 200.0}],
    }  # fmt: skip
    slow = {"train_s": 99.0, "step_s": 999.0, "generate_s": 999.0, "sync_s": 99.0}
    lines["trainer-0"][0] |= slow
    lines["trainer-0"][5:6] = [
        lines["trainer-0"][5] | {"step_s": 15.0},
        {"kind": "checkpoint", "step": 5, "seconds": 4.0},
    ]
    lines["trainer-0"].append(
        step | slow | {"step": 4, "time": 342.0, "incarnation": 2, "replayed": True, "wait_s": 2.0}
    )
    lines["rollout-0"].insert(0, lines["rollout-0"][0] | slow)
    lines["rollout-0"].append(lines["rollout-0"][0] | {"request": "e000000-000", "generate_s": 1.0})
    for role, records in lines.items():
        (run.metrics / f"{role}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def simulate(*words: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["simulate", *map(str, words)])
    return done.exit_code, done.stdout, done.stderr


def test_times_of_a_run_are_those_of_its_metrics(tmp_path: Path) -> None:
    from relax_hpc.monitor.analysis import RunView
    from relax_hpc.planning.simulation.assume import Asked
    from relax_hpc.planning.simulation.calibrate import calibrated
    from relax_hpc.recipe import load_recipe

    run = a_run(tmp_path / "run")
    recipe = load_recipe(run.recipe)
    with (run.metrics / "rollout-0.jsonl").open("a") as file:
        file.write('{"kind": "abort", "request": "r000002-000", "generate_s": 5.0}\n')
    found, notes = calibrated(RunView(run.root), recipe, Asked())
    assert isinstance(found.requests, Measured)
    assert sorted(found.requests.seconds.tolist()) == [20.0] * 3 + [25.0] + [40.0] * 4, (
        "without swaps, evaluations, the first"
    )
    assert found.train.tolist() == [7.0] * 9 and found.publish.tolist() == [1.0] * 9
    assert (found.fetch_s, found.checkpoint_s, found.shard_s) == (2.0, 4.0, 0.5)
    assert found.restart_s == pytest.approx(342.0 - 2.0 - 99.0 - 1.0 - 200.0)
    assert any("median of 4" in note for note in notes)
    assert calibrated(RunView(run.root), recipe, Asked(train_s=50.0, fetch_s=0.0))[0].train.tolist() == [50.0] * 9


def test_a_run_is_simulated_without_torch(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    words = ["simulate", str(run.root), "--staleness", "0,1", "--workers", "2,4", "--steps", "60", "--json"]
    code = (
        f"import sys; sys.argv = ['relax-hpc', *{words!r}]\nfrom relax_hpc.cli import app\n"
        "try: app()\nexcept SystemExit as e: assert not e.code\n"
        "assert not {'torch', 'transformers', 'h5py', 'pandas'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    about = json.loads(done.stdout)
    rows = {(row["workers"], row["max_staleness"]): row for row in about["rows"]}
    # two requests a step of 30 s on average, the slower of two 35 s; training 7 s and publishing 1 s
    assert rows[2, 0]["samples_s"] == pytest.approx(8 / (2 + 35 + 0.5 + 8), rel=0.06)
    assert rows[4, 1]["samples_s"] > 1.5 * rows[2, 0]["samples_s"]
    assert about["recommended"] in about["rows"]


def test_the_table_of_a_recipe() -> None:
    code, out, _ = simulate(
        RECIPES / "qwen3-4b-grpo.toml", "--workers", "8,16", "--on-stale", "wait,mask", "--steps", 40, "--mtbf", "20"
    )
    assert code == 0 and "recommended:" in out and "assum" not in out.partition("times:")[0]
    assert [line.split()[:4] for line in out.splitlines() if line.split()[1:3] in (["1", "1"], ["2", "1"])] == [
        ["8", "1", "1", "wait"], ["8", "1", "1", "mask"], ["16", "2", "1", "wait"], ["16", "2", "1", "mask"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on-stale", "never"], "--on-stale never: there is no such policy; use any of wait, drop, mask"),
        (["--on-stale", "mask"], "async.on_stale = 'mask' swaps weights in mid-generation"),
        (["--workers", "0"], "--workers 0: expected whole numbers from 1"),
        (["--staleness", "1;2"], "--staleness 1;2: expected whole numbers"),
        (["--mtbf", "-1"], "--mtbf -1: expected hours above 0"),
        (["--answer-tokens", "1000"], "an answer has 16 tokens at most"),
    ],
)
def test_what_cannot_be_simulated_is_said(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    code, _, error = simulate(tmp_path / "recipe.toml", *words)
    assert code == 2 and said in error


def test_a_run_that_tells_too_little_is_refused(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", steps=6)
    (run.metrics / "trainer-0.jsonl").write_text(
        (run.metrics / "trainer-0.jsonl").read_text().replace('"step_s": 15.0', '"step_s": 15.0, "replayed": true')
    )
    code, _, said = simulate(run.root)
    assert code == 2 and "4 training steps and 8 requests" in said and "recipe.toml" in said
    code, _, said = simulate(run.root, "--sigma", 1)
    assert code == 2 and "--sigma is for a recipe" in said
    code, _, said = simulate(run.root, "--config", "config.json")
    assert code == 2 and "--site and --config are for a recipe" in said
    code, _, said = simulate(run.root, "--set", "rollout.groups_per_request=4")
    assert code == 2 and "rollout.groups_per_request" in said
    for path in run.metrics.iterdir():
        path.unlink()
    code, _, said = simulate(run.root)
    assert code == 2 and "0 training steps and 0 requests" in said and "let the run go on" in said
    assert simulate(tmp_path)[0] == 2
