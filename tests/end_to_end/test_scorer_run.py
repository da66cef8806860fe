"""A run whose reference, teacher and proximal policy are scorers': killed, its columns damaged, and gone on with to the same bits."""

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
from relax_hpc.recipe import load_recipe
from relax_hpc.telemetry import read_metrics
from tests import metric_lists, tiny, trace_rules
from tests.runs import STRONG, outcome, pid_of, start, step_now, steps_of, wait_for, write_recipe
from tools.bench.bits import ENOUGH_GRADIENTS, gradient_fraction

STEPS = 20
SCORED = (
    STRONG.replace("max_staleness = 1", "max_staleness = 0")
    .replace("steps = 6", f"steps = {STEPS}")
    .replace("checkpoint_every = 2", "checkpoint_every = 100")
    .replace(
        'name = "grpo"',
        'name = "grpo"\nkl_coef = 0.05\nteacher = "{root}/teacher"\nteacher_coef = 0.1\n'
        'old_logprobs = "recomputed"\ncorrection = {{ name = "tis" }}',
    )
    + '\n[scorer]\nscores = ["recomputed", "reference", "teacher"]\nprocesses = 2\n'
)


def test_killed_scorers_and_damaged_columns_change_no_bit(tmp_path: Path) -> None:
    (tmp_path / "teacher").mkdir()
    recipe = write_recipe(tmp_path, SCORED)
    tiny.folder(load_recipe(recipe), tmp_path / "teacher", seed=5)
    run, process = RunDir(tmp_path / "small"), start("run", recipe)
    wait_for(lambda: step_now(run) >= 2)
    os.kill(wait_for(lambda: pid_of(run, "scorer-0")), signal.SIGKILL)
    wait_for(lambda: step_now(run) >= 5)
    torn, gone = run.column("r000001-000", "reference"), run.column("r000002-001", "teacher")
    os.truncate(torn, torn.stat().st_size // 2)
    gone.unlink()
    os.kill(wait_for(lambda: pid_of(run, "trainer-0")), signal.SIGKILL)  # nothing was checkpointed since step 0
    process.wait(300)

    assert outcome(run)["outcome"] == "done"
    found = audit(run.root)
    assert (found.lost, found.twice, found.torn) == ([], [], []), "what was made again is what the ledger says"
    first, last = ({s["step"]: s for s in lines} for lines in (reversed(steps_of(run)), steps_of(run)))
    trained = [s for s in first.values() if last[s["step"]]["replayed"]]
    assert len(last) == STEPS and len(trained) >= 5
    for name in ("loss", "grad_norm", "reference_kl", "teacher_kl", "correction_weight"):
        assert [last[s["step"]][name] for s in trained] == [s[name] for s in trained], name
    assert gradient_fraction(run) >= ENOUGH_GRADIENTS
    assert last[STEPS - 1]["reference_kl"] and last[0]["teacher_kl"], "they say something"
    kinds = metric_lists.listed()
    lines = {role: read_metrics(run.metrics / f"{role}.jsonl")[0] for role in ("trainer-0", "scorer-0", "scorer-1")}
    assert not [wrong for role in lines for line in lines[role] if (wrong := kinds[line["kind"]].complaint(line))]
    refused = [line["request"] for line in lines["trainer-0"] if line["kind"] == "refused_column"]
    assert refused == ["r000001-000"]
    assert max(line["attempt"] for line in lines["scorer-0"]) == 1 and lines["scorer-1"], "killed, and started again"
    ask = lambda *words: CliRunner().invoke(app, [str(word) for word in words])
    assert "scorer-1" in ask("status", run.root).stdout
    entries = [read_json(path) for path in run.ledger.rglob("*.json")]
    policies = {(e["step"], t["columns"]["recomputed"].split("/")[0]) for e in entries for t in e["take"]}
    assert policies == {(step, f"policy {step}.0") for step in range(STEPS)}, (
        "at max_staleness 0 it is the step's own policy"
    )
    shown = ask("shards", "show", run.root, "r000003-000").stdout.replace("│", " ")  # lines break within the words
    assert "log p of the teacher" in " ".join(shown.split())
    ask("trace", run.root)
    drawn = [e["name"] for e in trace_rules.read(run.root / "trace.json") if e["ph"] == "X"]
    assert sum(name.startswith("score r") for name in drawn) >= 2 * STEPS - 2
    table = RunView(run.root).trajectories("arrow", columns=["loss_mask", "columns/reference", "columns/teacher"])
    assert len(table["columns/teacher"]) == STEPS * 32
    assert [len(v) for v in table["columns/reference"]] == [len(v) for v in table["loss_mask"]]
    said = ask("run", run.root, "--fork", "other", "--set", "scorer.scores=['recomputed', 'teacher']")
    assert said.exit_code == 2
    assert "the reference does not move between trainer and scorer" in " ".join(said.output.split())
