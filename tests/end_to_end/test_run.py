"""The whole road on one machine, by the command line: begin, finish, go on, stop, fork, debug, export, look."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import relax_hpc as package
from relax_hpc.cli import app
from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch.evaluate import evaluate
from relax_hpc.launch.resume import resume
from relax_hpc.monitor.analysis.audit import audit
from relax_hpc.spool.shard import Shard
from relax_hpc.supervise.fork_server import ForkServer
from relax_hpc.telemetry import read_metrics
from tests import metric_lists, trace_rules
from tests.runs import SMALL, audited, command, outcome, relax_hpc, start, step_now, steps_of, wait_for, write_recipe

EVALUATION = """
[evaluation]
every = 3
prompts = 16
holdout = 0.2
samples = 2
temperature = 0.8
[[evaluation.source]]
task = "chain_sum"
size = 12
limit = 5
template = "{{metadata[expression]}} = "
config = {{min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1}}
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with evaluations that was made to its end, once for this module."""
    folder = tmp_path_factory.mktemp("runs")
    exact = SMALL.replace("max_new_tokens = 6", "max_new_tokens = 6\nlogprob_diff_warning = 0")
    recipe = write_recipe(folder, exact + EVALUATION + "\n[[tracking]]\nname = 'tensorboard'\n")
    done = relax_hpc("run", recipe)
    return recipe, RunDir(folder / "small"), done.stdout


def tokens_of(path):
    with Shard(path) as shard:
        return shard.read("tokens").tolist()


@pytest.mark.quick
def test_a_run_ends_done_with_every_step_trained_once(finished):
    _, run, _ = finished
    assert outcome(run)["outcome"] == "done" and outcome(run)["step"] == 6
    steps = steps_of(run)
    assert [s["step"] for s in steps] == [0, 1, 2, 3, 4, 5]
    assert all(s["samples"] == 32 and 0 <= s["age_max"] <= 1 for s in steps)
    assert audited(run).trained == 6 * 32


def test_that_engine_and_trainer_differ_is_said_once_and_stays_in_the_status(finished):
    """By rounding alone here, and the limit is 0; the tokens of step 0 are those of version 0, later ones are of the version before."""
    _, run, _ = finished
    steps = steps_of(run)
    [found] = package.open_run(run.root).metrics("trainer-0", "engine_differs")
    assert found["step"] == 0 and 0 < found["engine_diff"] == steps[0]["engine_diff"] < 1e-4
    assert all(("engine_diff" in s) == (s["age_max"] == 0) for s in steps)
    assert "engine and trainer differ" in relax_hpc("status", run.root).stdout
    assert "engine and trainer differ" in "".join(log.read_text() for log in run.logs.glob("trainer-0.*.log"))


def test_the_first_and_the_last_version_are_scored_on_prompts_that_training_never_sees(finished):
    _, run, _ = finished
    view = package.open_run(run.root)
    scored = {e["version"] for e in view.evals().to_dict("records")}
    assert {0, 6} <= scored
    rows = view.trajectories()
    evaluated = rows[rows.status == "evaluation"]
    assert not set(evaluated.prompt) & set(rows[rows.status == "trained"].prompt)
    assert set(evaluated.groupby(["request", "group"]).size()) == {2}, "answers a prompt"
    last = view.eval_sources().query("version == 6").set_index("name")
    assert last.prompts.to_dict() == {"basic_arithmetic": 16, "chain_sum": 5}
    assert last.samples.to_dict() == {"basic_arithmetic": 32, "chain_sum": 10}
    for name, source in (("basic_arithmetic", 0), ("chain_sum", 1)):
        mine = evaluated[(evaluated.source == source) & evaluated.request.str.startswith("e000006")]
        best = mine.groupby("prompt_index").raw_reward.max()
        assert last.score[name] == pytest.approx(mine.raw_reward.mean())
        assert last["pass@2"][name] == pytest.approx((best >= 1).mean())
        assert 0 <= last.low[name] <= last.score[name] <= last.high[name] <= 1


def test_eval_generates_what_the_run_generated_and_only_what_is_missing(finished):
    _, run, _ = finished
    found = evaluate(run.root, None, [])
    own = package.open_run(run.root).metrics("trainer-0", "eval")[-1]
    told = found.score.to_json()
    assert found.step == own["version"] == 6 and not found.seen
    assert told == {key: own[key] for key in told}, "the same weights, requests and seeds: the same answers"
    shards = sorted((found.folder / "evals").glob("*.h5"))
    before = tokens_of(shards[0])
    shards[0].unlink()
    generated: list[object] = []
    evaluate(run.root, None, [], advance=lambda: generated.append(None))
    assert len(generated) == 1 and tokens_of(shards[0]) == before
    with pytest.raises(RunError, match="holds something else.*--output"):
        evaluate(run.root, None, ["evaluation.solved_at=0.5"])
    with pytest.raises(RunError, match="is an evaluation, no run"):
        resume(RunDir(found.folder), [], ForkServer(RunDir(found.folder)))
    shown = json.loads(CliRunner().invoke(app, ["eval", str(run.root), "--json"]).stdout)
    assert shown.pop("folder") == str(found.folder) and shown.pop("step") == 6 and shown == told
    assert set(package.open_run(found.folder).trajectories().status) == {"evaluation"}
    table = CliRunner().invoke(app, ["eval", str(run.root)]).stdout
    assert "chain_sum" in table and "pass@2" in table and str(found.folder) in table


def test_eval_says_what_it_cannot_do(finished, tmp_path):
    recipe, run, _ = finished
    for wrong, target, options in (
        ("has no checkpoint of step 5: it has", run.root, {"step": 5}),
        ("neither a run .* nor a model", tmp_path, {}),
        ("say by a RECIPE", run.model, {}),
        ("only runs have checkpoints", run.model, {"step": 2}),
    ):
        with pytest.raises(RunError, match=wrong):
            evaluate(target, None, [], **options)
    plain = tmp_path / "plain.toml"
    plain.write_text(SMALL.format(root=tmp_path))
    with pytest.raises(RunError, match=r"has no \[evaluation\] table"):
        evaluate(run.root, plain, [])
    more = evaluate(run.root, recipe, ["evaluation.holdout=0.5"], output=tmp_path / "more")
    assert "0.5 here and 0.2 in the run" in more.seen
    other = shutil.copytree(run.model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(RunError, match="do not fit its config.json.*gate_proj"):
        evaluate(other, recipe, [], output=tmp_path / "wrong")


def test_the_same_command_says_that_a_finished_run_is_done(finished):
    recipe, run, _ = finished
    for target in (recipe, run.root):
        assert "done already: 6 steps" in relax_hpc("run", target).stdout.replace("\n", " ")


def test_another_recipe_of_the_same_name_is_refused_and_named(finished):
    recipe, _, _ = finished
    error = relax_hpc("run", recipe, "--set", "trainer.learning_rate=1e-2", code=2).stderr
    assert "trainer.learning_rate" in error and "0.001" in error and "0.01" in error and "run.name" in error


def test_a_key_that_may_not_change_on_resume_points_to_fork(finished):
    _, run, _ = finished
    error = relax_hpc("run", run.root, "--set", "algorithm.group_size=8", code=2).stderr
    assert "algorithm.group_size" in error and "--fork" in error


@pytest.mark.quick
def test_exports_a_model_that_from_pretrained_loads(finished, tmp_path):
    _, run, _ = finished
    relax_hpc("export", run.root, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    recipe, _, _ = finished
    scored = evaluate(tmp_path / "model", recipe, [], output=tmp_path / "scored")
    own = package.open_run(run.root).metrics("trainer-0", "eval")[-1]
    assert (scored.step, scored.score.all.prompts) == (None, own["prompts"])
    text = tokenizer("1 + 2 = ", return_tensors="pt")
    assert model.generate(**text, max_new_tokens=3).shape[1] > text["input_ids"].shape[1]
    assert "has no checkpoint of step 5" in relax_hpc("export", run.root, tmp_path / "x", "--step", "5", code=2).stderr


@pytest.mark.quick
def test_status_report_and_shards_work_after_the_end(finished):
    _, run, _ = finished
    shown = relax_hpc("status", run.root).stdout
    assert "done" in shown and "chain_sum" in shown and "pass@2" in shown
    relax_hpc("report", run.root)
    page = (run.root / "report.html").read_text()
    assert "<svg" in page and "<td>chain_sum</td>" in page
    assert "trained" in relax_hpc("shards", "stats", run.root).stdout
    relax_hpc("shards", "validate", run.root)
    relax_hpc("trace", run.root)
    events = trace_rules.read(run.root / "trace.json")
    heads = [e["cat"] for e in events if e["ph"] == "f"]
    assert heads.count("request") == 12, "a request that no step is seen to take"
    taken = {head for head in heads if head != "request"}
    assert "v0" in taken and len(taken) > 1, "which of the later versions a worker takes depends on its pace"


def test_every_metric_is_on_the_page_that_lists_them_and_every_listed_one_is_written(finished):
    _, run, _ = finished
    kinds, seen = metric_lists.listed(), {}
    for role in ("trainer-0", "rollout-0"):
        for line in read_metrics(run.metrics / f"{role}.jsonl")[0]:
            seen.setdefault(line["kind"], []).append(line)
            assert not kinds[line["kind"]].complaint(line), line
    assert {"step", "eval", "checkpoint", "publish", "request"} <= set(seen)
    usual = {
        "entropy",
        "kl",
        "logprob_diff_max",
        "importance_max",
        "clip_high",
        "pg_loss",
        "forward_backward_s",
        "optimize_s",
    }
    assert all(usual <= set(line) for line in seen["step"])
    assert all(0 < o["longest_s"] <= o["generate_s"] for o in seen["request"])


def test_the_follower_copied_all_to_tensorboard_before_the_run_ended(finished):
    _, run, _ = finished
    events = EventAccumulator(str(run.tracking / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (s["step"], pytest.approx(s["loss"])) for s in steps_of(run)
    ]


def test_snapshot_and_resolved_recipe_are_in_the_run(finished):
    _, run, _ = finished
    assert (run.snapshot / "code" / "relax_hpc" / "cli" / "__init__.py").exists()
    assert json.loads((run.snapshot / "versions.json").read_text())["packages"]["torch"]
    assert "max_staleness = 1" in run.recipe.read_text()


def test_ctrl_c_checkpoints_and_the_run_goes_on_with_more_steps(tmp_path):
    recipe = write_recipe(tmp_path, SMALL.replace("steps = 6", "steps = 100000"))
    run = RunDir(tmp_path / "small")
    process = start("run", recipe)
    wait_for(lambda: run.exists and step_now(run) >= 3)
    assert "is held by pid" in relax_hpc("run", run.root, code=2).stderr
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert outcome(run)["outcome"] == "stopped"
    stopped_at = outcome(run)["step"]
    relax_hpc("run", run.root, "--set", f"run.steps={stopped_at + 2}")
    assert [s["step"] for s in steps_of(run)] == list(range(stopped_at + 2)), "a step was repeated or left out"
    assert f'"step": {stopped_at}' in run.changes.read_text()
    found = audit(run.root)
    assert (found.lost, found.twice) == ([], [])


def test_a_run_whose_terminal_is_closed_checkpoints_before_it_ends(tmp_path):
    recipe, run = write_recipe(tmp_path), RunDir(tmp_path / "small")
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # below nohup it is ignored, and a run heeds that
        os.execv(
            sys.executable, command("run", recipe, "--set", "run.steps=5000", "--set", "run.checkpoint_every=1000")
        )
    os.set_blocking(terminal, False)

    def three_steps_made():
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 1 << 20)
        return step_now(run) >= 3

    wait_for(three_steps_made)
    os.close(terminal)  # the kernel sends SIGHUP to whoever works there, and refuses whatever they print from now on
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) >= 0, "killed"
    ended = outcome(run)
    assert ended["outcome"] == "stopped" and run.checkpoint_steps()[-1] == ended["step"] >= 3
    assert audited(run).trained == ended["step"] * 32


def test_stop_from_another_process(tmp_path):
    recipe = write_recipe(tmp_path, SMALL.replace("steps = 6", "steps = 100000"))
    run = RunDir(tmp_path / "small")
    process = start("run", recipe)
    wait_for(lambda: run.exists and step_now(run) >= 1)
    relax_hpc("stop", run.root)
    assert process.wait(30) == 0 and outcome(run)["outcome"] == "stopped"
    assert "is not running" in relax_hpc("stop", run.root, code=2).stderr


def test_fork_starts_a_new_run_from_a_checkpoint(finished):
    _, run, _ = finished
    relax_hpc("run", run.root, "--fork", "forked", "--set", "run.steps=8", "--set", "trainer.learning_rate=1e-4")
    forked = RunDir(run.root.parent / "forked")
    assert [s["step"] for s in steps_of(forked)] == [6, 7]
    assert steps_of(forked)[0]["learning_rate"] == pytest.approx(1e-4)


def test_rollout_only_generates_and_train_only_trains_on_that(tmp_path):
    recipe = write_recipe(tmp_path)
    relax_hpc("run", recipe, "--debug", "rollout-only", "--set", "run.name=generated")
    generated = RunDir(tmp_path / "generated")
    assert all(s["version"] == 0 for s in steps_of(generated))
    assert len(list(generated.shards.rglob("*.h5"))) >= 12
    relax_hpc("run", recipe, "--debug", "train-only", "--from", generated.root, "--set", "run.name=trained")
    trained = RunDir(tmp_path / "trained")
    assert [s["step"] for s in steps_of(trained)] == list(range(6))
    assert not list(trained.shards.rglob("*.h5"))
    assert steps_of(trained)[-1]["raw_reward"] == steps_of(generated)[-1]["raw_reward"]


def test_a_spool_with_a_node_cache_trains_the_same_and_leaves_nothing_there(finished, tmp_path):
    _, run, _ = finished
    node_cache = tmp_path / "memory"
    recipe = write_recipe(tmp_path, SMALL.replace("max_staleness = 1", "max_staleness = 0"))
    sets = ("--set", f"spool.node_cache={node_cache}", "--set", "spool.compression=lz4")
    sets += ("--set", f"weights.node_cache={node_cache}", "--set", "weights.full_every=4")
    relax_hpc("run", recipe, "--set", "run.name=plain")
    relax_hpc("run", recipe, *sets, "--set", "run.name=cached")
    plain, cached = (RunDir(tmp_path / name) for name in ("plain", "cached"))
    assert node_cache.is_dir() and not list(node_cache.iterdir())
    assert [s["loss"] for s in steps_of(plain)] == [s["loss"] for s in steps_of(cached)]
    assert len(list(cached.shards.rglob("*.h5"))) == len(list(plain.shards.rglob("*.h5")))
