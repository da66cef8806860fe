"""PPO whose critic has a process of its own: what a person sees of it, the bound of its values, a fork, and a quota that it must keep up with."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from typer.testing import CliRunner

from relax_hpc.cli import app
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.analysis import RunView
from relax_hpc.monitor.analysis.audit import audit
from relax_hpc.spool.column import read_column
from relax_hpc.telemetry import read_metrics
from tests import metric_lists, trace_rules
from tests.runs import SMALL, audited, outcome, pid_of, start, step_now, steps_of, wait_for, write_recipe

STEPS = 16
PPO = (
    SMALL.replace("max_staleness = 1", "max_staleness = 2")
    .replace("steps = 6", f"steps = {STEPS}")
    .replace("checkpoint_every = 2", "checkpoint_every = 10")
    .replace('name = "grpo"', 'name = "ppo"\ncritic = {{learning_rate = 1e-3, warmup_steps = 2}}')
    + "\n[critic]\n"
)


def test_a_critic_beside_an_asynchronous_run_keeps_the_bound_and_is_seen(tmp_path: Path) -> None:
    run, process = RunDir(tmp_path / "small"), start("run", write_recipe(tmp_path, PPO))
    wait_for(lambda: step_now(run) >= 4)
    os.kill(wait_for(lambda: pid_of(run, "critic-0")), signal.SIGKILL)
    process.wait(300)

    assert outcome(run)["outcome"] == "done"
    audited(run)
    own = RunDir(run.critic)
    assert own.checkpoint_steps()[-1] == STEPS, "the run ends when the critic has learned all of it"
    steps = steps_of(run)
    moved = [s["grad_norm"] > 0 for s in steps]
    assert not any(moved[:2]), "the critic alone learns at first"
    assert all(moved[4:]), "steps 2 and 3 may have values of a critic that knows nothing, and no reward"
    last = {}
    for entry in (read_json(path) for path in sorted(run.ledger.rglob("*.json"))):
        for taken in entry["take"]:
            learned = int(taken["columns"]["values"].split("/")[0].removeprefix("critic "))
            assert 0 <= entry["step"] - learned <= 2
            last[taken["request"]] = learned
    assert max(last.values()) >= STEPS - 3
    kinds, lines = metric_lists.listed(), read_metrics(run.metrics / "critic-0.jsonl")[0]
    assert not [wrong for line in lines if (wrong := kinds[line["kind"]].complaint(line))]
    assert [line["step"] for line in lines if line["kind"] == "critic" and line["attempt"]][-1] == STEPS - 1
    assert {line["attempt"] for line in lines} == {0, 1}

    ask = lambda *words: CliRunner().invoke(app, [str(word) for word in words])
    assert f"{STEPS} steps learned" in " ".join(ask("status", run.root).stdout.split())
    request = sorted(last)[-1]
    column = read_column(run.column(request, "values"), "values")
    assert column is not None and abs(column.values).max() > 0
    assert "value " in " ".join(ask("shards", "show", run.root, request).stdout.split())
    ask("trace", run.root)
    drawn = [e["name"] for e in trace_rules.read(run.root / "trace.json") if e["ph"] == "X"]
    assert f"learn step {STEPS - 1}" in drawn and any(name.startswith("value r") for name in drawn)
    table = RunView(run.root).trajectories("arrow", columns=["loss_mask", "columns/values"])
    assert [len(v) for v in table["columns/values"]] == [len(v) for v in table["loss_mask"]]

    more = ("critic.processes=2", f"run.steps={STEPS + 8}", "spool.keep=needed", "spool.quota_gb=0.0004")
    said = ask("run", run.root, "--fork", "small-quota", *(word for one in more for word in ("--set", one)))
    forked = RunDir(tmp_path / "small-quota")
    assert said.exit_code == 0 and outcome(forked)["outcome"] == "done", said.output
    assert RunDir(forked.critic).checkpoint_steps()[-1] == STEPS + 8
    learned = [line for line in read_metrics(forked.metrics / "critic-0.jsonl")[0] if line["kind"] == "critic"]
    assert [line["step"] for line in learned] == list(range(STEPS, STEPS + 8))
    assert learned[0]["value_mean"] != 0, "it went on with what it knew"
    assert not audit(forked.root).lost
    saved = [m["step"] for m in read_metrics(forked.metrics / "trainer-0.jsonl")[0] if m["kind"] == "checkpoint"]
    assert [step for step in saved if step % 10], "the quota asked for checkpoints out of turn, and the critic kept up"
