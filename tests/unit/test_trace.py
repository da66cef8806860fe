"""The timeline of a small run: tracks, parts, arrows, and what a viewer can read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_run import build
from typer.testing import CliRunner

from relax_hpc.cli import app
from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.analysis import RunView
from relax_hpc.monitor.analysis.trace import write
from tests import trace_rules


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return build(tmp_path / "small")


def slices(events: list[trace_rules.Event], role: str) -> list[tuple[str, float, float]]:
    """(name, begin, end) in seconds on the role's tracks."""
    pid = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == role)
    found = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
    return [(e["name"], round(e["ts"] / 1e6, 3), round((e["ts"] + e["dur"]) / 1e6, 3)) for e in found]


def test_each_role_has_a_track_and_a_step_its_parts(run: RunDir) -> None:
    result = CliRunner().invoke(app, ["trace", str(run.root)])
    assert result.exit_code == 0 and "ui.perfetto.dev" in result.stdout and "chrome://tracing" in result.stdout
    events = trace_rules.read(run.root / "trace.json")
    trainer = slices(events, "trainer-0")
    # the first line of all is the supervisor's, at 1 s: step 0 was over at 10 s
    assert trainer[:8] == [
        ("step 0", 5.2, 9.0), ("wait for requests", 5.2, 6.2), ("read", 6.2, 6.3), ("train", 6.3, 8.3), ("forward backward", 6.3, 7.8),
        ("optimize", 7.8, 8.05), ("publish v1", 8.3, 8.8), ("settle", 8.8, 9.0),
    ]  # fmt: skip
    assert ("step 1 again", 15.2, 19.0) in trainer and ("checkpoint 2", 19.9, 20.0) in trainer
    worker = slices(events, "rollout-0")
    assert worker[:4] == [
        ("wait for a request", 2.6, 2.9), ("take v0", 2.9, 3.0), ("generate r000000-000 v0", 3.0, 4.5), ("score", 4.0, 4.5),
    ]  # fmt: skip
    lost = next(e for e in events if e["ph"] == "i" and e["name"].startswith("lost"))
    assert lost["s"] == "g" and "killed by signal 9" in lost["name"]


def test_arrows_lead_from_a_version_to_the_first_request_with_it_and_from_requests_to_their_step(run: RunDir) -> None:
    write(RunView(run.root), run.root / "t.json")
    events = trace_rules.read(run.root / "t.json")
    heads = {(e["cat"], round(e["ts"] / 1e6, 3)) for e in events if e["ph"] == "f"}
    assert ("v1", 13.0) in heads, "the first request with version 1"
    assert [e["cat"] for e in events if e["ph"] == "s" and e["cat"] != "request"] == ["v1"]
    assert sum(cat == "request" for cat, _ in heads) == 2, (
        "steps 0 and 1 took requests that were published before they read"
    )


def test_what_is_not_finite_becomes_text(run: RunDir) -> None:
    path = run.metrics / "trainer-0.jsonl"
    path.write_text(
        path.read_text().replace('"loss": 0.1', '"loss": NaN').replace('"raw_reward": 0.5', '"raw_reward": Infinity')
    )
    write(RunView(run.root), run.root / "t.json")
    steps = [e for e in trace_rules.read(run.root / "t.json") if e["name"] == "step 0"]
    assert steps[0]["args"]["loss"] == "nan" and steps[0]["args"]["raw_reward"] == "inf"


def test_a_clock_that_was_set_back_cuts_slices_but_draws_none_over_another(run: RunDir) -> None:
    path = run.metrics / "trainer-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[2:]:
        line["time"] -= 6.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write(RunView(run.root), run.root / "t.json")
    trace_rules.read(run.root / "t.json")


def test_a_run_without_metrics_says_so(run: RunDir) -> None:
    for path in run.metrics.iterdir():
        path.unlink()
    with pytest.raises(RunError, match="no metrics yet"):
        write(RunView(run.root), run.root / "t.json")
