"""Groups that failed: told in the log, counted by reasons that name no prompt, shown by status, and no filter's doing."""

from __future__ import annotations

import logging
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from relax_hpc.files.publish import publish, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.analysis import RunView
from relax_hpc.monitor.live_view import line, render
from relax_hpc.monitor.status import Status
from relax_hpc.recipe import dump_recipe
from relax_hpc.records import Failure, Group, Prompt, failed_group
from relax_hpc.roles.training.evaluation import read_score
from relax_hpc.roles.training.failures import Failures, count_failures
from relax_hpc.spool.ledger import Entry, Taken, sealed
from relax_hpc.spool.reading import Shards
from relax_hpc.spool.shard_writer import encode
from relax_hpc.telemetry import Telemetry
from tests import tiny

RAISED = "reward 'judge.py:score' raised KeyError"
SLOW = "environment 'game.py:Game' took longer than 60 s in step (rollout.step_time_limit_s)"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    run.identity.write_bytes(to_json({"id": "test", "name": "small"}))
    run.recipe.write_text(dump_recipe(tiny.recipe()))
    return run


def step(run: RunDir, number: int, *reasons: str) -> Entry:
    """A step that takes a request whose groups failed for these reasons; one more is filtered."""
    prompt = lambda i: Prompt(0, i, "", np.zeros(1, np.int32))
    request = f"r{number:06d}-000"
    groups = [failed_group(prompt(i), 2, 0, Failure(r, f"source 0, prompt {i}: 'x'")) for i, r in enumerate(reasons)]
    path = run.shard(request)
    path.parent.mkdir(exist_ok=True)
    publish(path, encode(request, [*groups, Group(prompt(9), [])], {"version": 0, "run": "test"}))
    filtered = {f"{request}/{i}": f"failed: {r}" for i, r in enumerate(reasons)}
    filtered |= {f"{request}/{len(reasons)}": "zero_std: all rewards are 1.0"}
    entry = Entry(number, 1, 0, (Taken(request, 0),), filtered)
    publish(run.ledger_entry(number), sealed(entry))
    return entry


def test_a_reason_is_told_once_with_its_first_group_then_counted(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures(Shards(run, None), logging.getLogger("trainer"))
    failures.note(step(run, 0, RAISED, RAISED, SLOW))
    first, second = (record.getMessage() for record in caplog.records)
    assert first == f"step 0: 2 groups failed: {RAISED}; the first is r000000-000/0 (source 0, prompt 0: 'x')"
    assert SLOW in second and "r000000-000/2" in second
    for number in range(1, 8):
        failures.note(step(run, number, RAISED, SLOW))
    said = [record.getMessage() for record in caplog.records[2:]]
    assert said == []
    failures.note(step(run, 8, RAISED))
    assert [record.getMessage() for record in caplog.records[2:]] == [f"step 8: 10 groups failed until now: {RAISED}"]


def test_status_shows_how_many_failed_and_why_each_step_once(run: RunDir) -> None:
    telemetry = Telemetry(run, "trainer-0", 0)
    about = {
        "step_s": 1.0, "samples": 8, "age_mean": 0.0, "age_max": 0, "spool_depth": 0, "wait_s": 0.0, "raw_reward": 0.0, "generated_reward": 0.0,
    }  # fmt: skip
    for number in (0, 1, 1):  # the second time after a restart
        failures = dict(count_failures(step(run, number, RAISED, RAISED, SLOW)))
        telemetry.metrics("step", step=number, failures=failures, **about)
    telemetry.metrics("step", step=2, **about)
    status = Status.of(run)
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(status))
    panel = console.export_text()
    assert f"4 groups failed: {RAISED}" in panel and f"2 groups failed: {SLOW}" in panel
    assert line(status).endswith("; 6 groups failed")


def test_failed_is_not_filtered(run: RunDir) -> None:
    step(run, 0, RAISED)
    (row,) = RunView(run.root).requests().to_dict("records")
    assert (row["failed_groups"], row["filtered_groups"]) == (1, 1)


def test_status_says_which_prompts_of_an_evaluation_failed_and_which_evaluations_were_given_up(run: RunDir) -> None:
    group = lambda i, reason: failed_group(Prompt(0, i, "", np.zeros(1, np.int32)), 2, 0, Failure(reason, "x"))
    path = run.shard("e000004-000")
    groups = [group(0, RAISED), group(1, SLOW), group(2, RAISED)]
    publish(path, encode("e000004-000", groups, {"version": 4, "samples_per_prompt": 2, "run": "test"}))
    score = read_score(run, tiny.recipe(), ["e000004-000"])
    assert score.failures == {RAISED: 2, SLOW: 1}
    telemetry = Telemetry(run, "trainer-0", 0)
    telemetry.metrics("eval", **score.to_json())
    telemetry.metrics("eval_failed", version=2, lineage=0, reason="its weights are gone")
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(Status.of(run)))
    text = console.export_text()
    assert f"evaluation of version 4: 2 prompts failed: {RAISED}" in text
    assert f"evaluation of version 4: 1 prompts failed: {SLOW}" in text
    assert "the evaluation of version 2 was given up: its weights are gone" in text


def test_status_keeps_little_of_the_metrics_of_a_long_run(run: RunDir) -> None:
    telemetry, request = Telemetry(run, "rollout-0", 0), {f"value_{i}": float(i) for i in range(100)}
    for number in range(3000):
        telemetry.metrics("request", number=number, **request)
    assert (size := (run.metrics / "rollout-0.jsonl").stat().st_size) > 5e6
    status = Status(run, tiny.recipe())
    tracemalloc.start()
    status.refresh()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [record["number"] for record in status.requests["rollout-0"]] == [*range(2980, 3000)]
    assert peak < size / 5, "all records were in memory at once"
    telemetry.metrics("request", number=3000)
    status.refresh()
    assert [record["number"] for record in status.requests["rollout-0"]] == [*range(2981, 3001)]
