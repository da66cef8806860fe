"""Kill real processes of real runs, at random and at chosen moments: nothing is lost, nothing is trained twice."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import relax_hpc as package
from relax_hpc.algorithms import make_algorithm
from relax_hpc.data import PromptCursor, PromptSources
from relax_hpc.data.examples import ExampleLoader
from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch.create import open_or_create
from relax_hpc.monitor.analysis.audit import audit
from relax_hpc.monitor.analysis.report import render
from relax_hpc.monitor.analysis.trace import write
from relax_hpc.recipe import load_recipe
from relax_hpc.roles.training.sft import read
from relax_hpc.spool.ledger import Ledger
from relax_hpc.telemetry import read_metrics
from relax_hpc.trainers import make_trainer
from tests import metric_lists
from tests.runs import SMALL, audited, outcome, pid_of, relax_hpc, start, step_now, steps_of, wait_for, write_recipe
from tools.bench.bits import ENOUGH_GRADIENTS, flip_a_bit, gradient_fraction, same_bits
from tools.bench.chaos import monkey

KILLS, STEPS = 6, 48


def incarnations(run: RunDir) -> list[int]:
    """Of the trainer that committed each step."""
    return [json.loads(path.read_text())["incarnation"] for path in sorted(run.ledger.rglob("*.json"))]


def test_killed_anywhere_at_staleness_0_the_final_weights_have_the_same_bits(tmp_path):
    roles = ["supervisor", "trainer-0", "rollout-0", "scorer-0"]
    scored = (
        "algorithm.kl_coef=0.01",
        "algorithm.old_logprobs=recomputed",
        "scorer.scores=['recomputed', 'reference']",
    )
    sets = ("async.max_staleness=0", *scored)
    calm = monkey(tmp_path, "calm", STEPS, 0, roles, lambda: None, *sets)
    calm.drive(0, STEPS)
    killed = monkey(tmp_path, "killed", STEPS, 1, roles, lambda: None, *sets)
    killed.drive(KILLS, STEPS)
    assert len(killed.kills) == KILLS
    assert audited(killed.run).trained == audit(calm.run.root).trained
    assert same_bits(killed.run, calm.run, STEPS)


@pytest.mark.quick
def test_one_bit_of_one_token_that_is_trained_on_makes_other_weights(tmp_path):
    """The control of the tests here: what they compare at the end depends on all that was trained on."""
    steps = 10
    calm, flipped = (
        monkey(tmp_path, name, steps, 0, [], lambda: None, "async.max_staleness=0") for name in ("calm", "flipped")
    )
    calm.drive(0, steps)
    flipped.drive_until(2)
    request = flip_a_bit(flipped.run)
    flipped.drive(0, steps)
    assert audited(flipped.run).trained == audited(calm.run).trained
    assert request in {shard.stem for shard in calm.run.shards.rglob("*.h5")}, "both trained on the same requests"
    assert not same_bits(flipped.run, calm.run, steps)


def test_two_trainer_processes_and_a_worker_on_their_devices_survive_the_loss_of_each_and_keep_the_bits(tmp_path):
    sets = ("async.max_staleness=0", "trainer.processes=2")
    calm = monkey(tmp_path, "calm", 24, 0, [], lambda: None, *sets)
    calm.drive(0, 24)
    # its workers have the trainer's devices in turn, which makes no difference to the bits either
    roles = ["trainer-0", "trainer-1", "rollout-0"]
    killed = monkey(tmp_path, "killed", 24, 2, roles, lambda: None, *sets, "run.placement=colocate")
    killed.drive(3, 24)
    audited(killed.run)
    assert same_bits(killed.run, calm.run, 24)


def test_a_critic_in_processes_of_its_own_killed_anywhere_leaves_both_models_with_the_same_bits(tmp_path):
    ppo = "algorithm={name='ppo', group_size=4, kl_coef=0.01, critic={learning_rate=1e-3}}"
    sets = ("async.max_staleness=0", ppo, "scorer.scores=['reference']", "critic.processes=2")
    steps = 16
    calm = monkey(tmp_path, "calm", steps, 0, [], lambda: None, *sets)
    calm.drive(0, steps)
    killed = monkey(tmp_path, "killed", steps, 6, ["critic-0", "critic-1", "trainer-0"], lambda: None, *sets)
    killed.drive(4, steps)
    audited(killed.run)
    assert same_bits(killed.run, calm.run, steps)
    critics = [RunDir(monkey.run.critic).checkpoint(steps) / "critic.safetensors" for monkey in (calm, killed)]
    first, second = (path.read_bytes() for path in critics)
    assert first == second
    learned = read_metrics(killed.run.metrics / "critic-0.jsonl")[0]
    assert len({line["step"] for line in learned if line["kind"] == "critic"}) == steps


@pytest.mark.parametrize("late", ["wait", "drop"])
def test_killed_workers_at_staleness_2_keep_the_bound_and_lose_nothing(tmp_path, late):
    sets = ("async.max_staleness=2", f"async.on_stale={late}", "rollout.workers=2")
    killed = monkey(tmp_path, "killed", 40, 3, ["rollout-0", "rollout-1", "trainer-0"], lambda: None, *sets)
    killed.drive(4, 40)
    audited(killed.run)
    assert max(s["age_max"] for s in steps_of(killed.run)) <= 2


def test_killed_anywhere_with_weights_by_broadcast_the_final_weights_have_the_same_bits(tmp_path):
    sets = ("async.max_staleness=0", "rollout.workers=2")
    calm = monkey(tmp_path, "calm", 24, 0, [], lambda: None, *sets)
    calm.drive(0, 24)
    roles = ["rollout-0", "rollout-1", "trainer-0"]
    killed = monkey(tmp_path, "killed", 24, 4, roles, lambda: None, *sets, "weights.transport=collective")
    killed.drive(3, 24)
    audited(killed.run)
    assert same_bits(killed.run, calm.run, 24)
    logs = "".join(path.read_text() for path in killed.run.logs.glob("trainer-0.*.log"))
    assert "weights are broadcast to ['rollout-" in logs
    manifests, written = killed.run.weights.glob("v????????.l*.json"), killed.run.weights.glob("v*.i*")
    assert len(list(manifests)) > len(list(written)), "the others came by broadcast alone"


def test_supervised_fine_tuning_killed_anywhere_has_the_bits_of_one_go_and_needs_no_workers(tmp_path):
    steps = 12
    sets = ("algorithm={name='sft'}", "trainer.data_workers=1")
    killed = monkey(tmp_path, "killed", steps, 5, ["trainer-0"], lambda: None, *sets)
    killed.drive(2, steps)
    run = killed.run
    assert audited(run).trained == steps * 8 and gradient_fraction(run) >= ENOUGH_GRADIENTS
    assert {path.stem for path in run.heartbeats.iterdir()} == {"trainer-0"} and not list(run.weights.iterdir())
    recipe = load_recipe(run.recipe)
    trainer, algorithm = make_trainer(recipe, run.model, 0, 1), make_algorithm(recipe.algorithm)
    trainer.begin_training()
    sources = PromptSources.of(recipe, AutoTokenizer.from_pretrained(run.model), recipe.model.context, run.model)
    cursor, ledger = PromptCursor(sources, recipe.run.seed), Ledger(run)
    examples = ExampleLoader(sources, recipe.run.seed)
    for step in range(steps):
        entry = ledger.find(step)
        assert entry.learned == tuple((ref.source, ref.index, ref.epoch) for ref in cursor.draw(8))
        trainer.step(read(entry, examples), algorithm, step)
    kept = load_file(run.checkpoint(steps) / "model.safetensors")
    assert all(torch.equal(kept[name], tensor) for name, tensor in trainer.export())

    asked = "evaluation={every=2, prompts=4, holdout=0.1}"
    relax_hpc("run", run.root, "--fork", "scored", "--set", f"run.steps={steps + 3}", "--set", asked)
    scored = RunDir(tmp_path / "scored")
    assert [s["step"] for s in steps_of(scored)] == [12, 13, 14]
    assert {e["version"] for e in package.open_run(scored.root).evals().to_dict("records")} == {12, 14, 15}
    assert {path.name[:9] for path in scored.weights.glob("v*.json")} == {"v00000012", "v00000014", "v00000015"}
    for line in steps_of(scored):
        assert line.keys() <= metric_lists.listed()["step"].names | metric_lists.COMMON
    view = package.open_run(scored.root)
    assert "loss" in render(view) and write(view, tmp_path / "trace.json")
    with pytest.raises(RunError, match="relax-hpc export"):
        open_or_create(scored.root, ["algorithm={name='grpo'}"], fork="reinforced")


@contextlib.contextmanager
def going_on(folder: Path) -> Iterator[tuple[RunDir, list[subprocess.Popen[str]]]]:
    """A run that goes on until the test ends it; a list of processes to clean up."""
    recipe = write_recipe(
        folder, SMALL.replace("steps = 6", "steps = 100000").replace("max_restarts", "hang_s = 8.0\nmax_restarts")
    )
    run, processes = RunDir(folder / "small"), []
    process = start("run", recipe)
    processes.append(process)
    wait_for(lambda: run.exists and step_now(run) >= 3)
    yield run, processes
    for each in processes:
        with contextlib.suppress(ProcessLookupError):
            each.send_signal(signal.SIGTERM)
    for each in processes:
        try:
            each.wait(600)
        except subprocess.TimeoutExpired:
            each.kill()
    for role in ("trainer-0", "rollout-0"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid_of(run, role) or 0, signal.SIGKILL) if pid_of(run, role) else None


@pytest.fixture
def endless(tmp_path):
    with going_on(tmp_path) as run:
        yield run


def test_a_trainer_that_wakes_up_after_its_successor_began_commits_nothing(endless):
    run, processes = endless
    zombie = pid_of(run, "trainer-0")
    os.kill(zombie, signal.SIGSTOP)  # first, so that it cannot notice that its supervisor goes
    processes[0].kill()
    processes[0].wait()
    before = _committed(run)
    processes.append(start("run", run.root))
    wait_for(lambda: step_now(run) > before + 3 and pid_of(run, "trainer-0") != zombie)
    os.kill(zombie, signal.SIGCONT)
    wait_for(lambda: not _alive(zombie))
    last = read_json(run.weights / "latest.json")
    wait_for(lambda: step_now(run) > last["number"] + 3)
    relax_hpc("stop", run.root)
    processes[1].wait(600)
    assert incarnations(run) == sorted(incarnations(run)), "the superseded trainer committed after its successor"
    audited(run)


def test_a_second_run_of_a_live_one_is_refused_and_a_dead_supervisor_is_followed(endless):
    run, processes = endless
    refused = relax_hpc("run", run.root, code=2).stderr
    assert f"pid {processes[0].pid}" in refused and "relax-hpc stop" in refused
    processes[0].kill()
    processes[0].wait()
    before = incarnations(run)[-1]  # its roles may still make steps until they see that they are orphans
    processes.append(start("run", run.root))
    wait_for(lambda: incarnations(run)[-1] > before)
    relax_hpc("stop", run.root)
    assert processes[1].wait(600) == 0
    audited(run)


def test_a_zombie_that_publishes_a_request_long_consumed_and_removed_changes_nothing(tmp_path):
    recipe = write_recipe(tmp_path, SMALL + '\n[spool]\nkeep = "needed"\n')
    relax_hpc("run", recipe, "--set", "run.keep_checkpoints=1")
    run = RunDir(tmp_path / "small")
    consumed = run.shard("r000000-000")
    assert not consumed.exists(), "retention kept what no checkpoint replays"
    consumed.write_bytes(b"what a zombie made")
    relax_hpc("run", run.root, "--set", "run.steps=8")
    assert outcome(run)["outcome"] == "done" and [s["step"] for s in steps_of(run)] == list(range(8))


def test_requests_that_kill_their_workers_end_as_failed_groups_with_the_reason(tmp_path):
    deadly = tmp_path / "deadly.py"
    deadly.write_text(
        "import os\n"
        "class Deadly:\n"
        "    def reset(self, prompt): self.prompt = prompt\n"
        "    def step(self, answer):\n"
        "        from relax_hpc.environments import Turn\n"
        "        if self.prompt.index % 16 == 0: os.kill(os.getppid(), 9)\n"
        "        return Turn(done=True)\n"
        "    def close(self): pass\n"
    )
    text = SMALL.replace('task = "basic', f'environment = "{deadly}:Deadly"\ntask = "basic')
    recipe = write_recipe(tmp_path, text)
    relax_hpc(
        "run",
        recipe,
        "--set",
        "rollout.max_attempts=2",
        "--set",
        "run.steps=4",
        "--set",
        "rollout.max_failed_fraction=1.0",
    )
    run = RunDir(tmp_path / "small")
    entries = [json.loads(p.read_text()) for p in sorted(run.ledger.rglob("*.json"))]
    reasons = {r for e in entries for r in e["filtered"].values()}
    assert any("2 workers died on the request" in r for r in reasons)
    assert run.checkpoint_steps()[-1] == 4


def _committed(run: RunDir) -> int:
    return max(int(p.stem) for p in run.ledger.rglob("*.json"))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A dead child of init may stay a zombie for a moment.
    with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.fixture(scope="module")
def unending(tmp_path_factory):
    """One for the tests after which it goes on as before: the last ones here, for it takes the processor meanwhile."""
    with going_on(tmp_path_factory.mktemp("unending")) as (run, _):
        yield run


@pytest.mark.parametrize("role", ["rollout-0", "trainer-0"])
def test_a_role_that_hangs_is_found_by_its_heartbeat_and_started_again(unending, role):
    run = unending
    hung, step = pid_of(run, role), step_now(run)
    os.kill(hung, signal.SIGSTOP)
    wait_for(lambda: (pid_of(run, role) or hung) != hung and step_now(run) > step + 3)
    reasons = [
        r.get("reason", "") for r in read_metrics(run.metrics / "supervisor.jsonl")[0] if role[:7] in str(r.get("role"))
    ]
    assert any("no heartbeat for" in reason for reason in reasons)
    with pytest.raises(ProcessLookupError):
        os.kill(hung, 0)


def test_a_role_that_died_is_found_by_its_end_and_not_by_its_silence(unending):
    run = unending
    victim = pid_of(run, "rollout-0")
    died = time.time()
    os.kill(victim, signal.SIGKILL)
    lost = wait_for(
        lambda: [
            r for r in read_metrics(run.metrics / "supervisor.jsonl")[0] if r["kind"] == "lost" and r["time"] > died
        ]
    )
    assert lost[0]["role"] == "rollout-0" and lost[0]["reason"] == "killed by SIGKILL"
