"""What became of everything in a small run, read back from its files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from small_run import LAST_TRAINED, build

import relax_hpc
from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.analysis import RunView, plots
from relax_hpc.monitor.analysis.counts import count
from relax_hpc.monitor.analysis.examples import best_and_worst
from relax_hpc.monitor.analysis.export import export_parquet
from relax_hpc.monitor.analysis.report import render, restarts, sections


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return build(tmp_path / "small")


@pytest.fixture
def view(run: RunDir) -> RunView:
    return relax_hpc.open_run(run.root)


def test_every_group_has_its_status(view: RunView) -> None:
    table = view.trajectories()
    found = {(r.shard, r.group): (r.status, r.reason, None if pd.isna(r.step) else r.step) for r in table.itertuples()}
    assert found == {
        ("0000/r000000-000.h5", 0): ("trained", "", 0),
        ("0000/r000000-000.h5", 1): ("trained", "", 0),
        ("0000/r000000-001.h5", 0): ("trained", "", 0),
        ("0000/r000000-001.h5", 1): ("filtered", "zero_std", 0),
        ("0000/r000001-000.h5", 0): ("trained", "", 1),
        ("0000/r000001-001.h5", 0): ("dropped", "stale", None),
        ("0000/r000001-001.h5", 1): ("dropped", "stale", None),
        (f"0000/{LAST_TRAINED}.h5", 0): ("trained", "", 1),
        (f"0000/{LAST_TRAINED}.h5", 1): ("trained", "", 1),
        ("0000/r000002-000.h5", 0): ("unused", "", None),
        ("0000/r000002-000.h5", 1): ("unused", "", None),
        ("evals/e000000-000.h5", 0): ("evaluation", "", None),
        ("quarantine/r000000-000.rollout-1.h5", 0): ("unused", "another attempt was published first", None),
        ("quarantine/r000000-000.rollout-1.h5", 1): ("unused", "another attempt was published first", None),
    }
    # The failed group has no samples, so no row; its request and the counts have it.
    requests = view.requests().set_index("shard")
    assert requests.loc["0000/r000001-000.h5", "failed_groups"] == 1
    assert "took longer than 30 s" in requests.loc["0000/r000001-000.h5", "reason"]
    tallies = count(view).statuses
    assert {f: (t.groups, t.samples) for f, t in tallies.items()} == {
        "trained": (6, 12), "filtered": (1, 2), "failed": (1, 0), "dropped": (2, 4), "unused": (4, 8), "evaluation": (1, 1),
    }  # fmt: skip


def test_a_row_says_all_about_a_sample(view: RunView) -> None:
    table = view.trajectories()
    right, wrong = (table[(table.request == "r000001-000") & (table["sample"] == i)].iloc[0] for i in (0, 1))
    assert (right.source, right.prompt_index, right.prompt, right.answer) == (0, 4, "4+1=", "5")
    assert (right.completion, right.reward, right.raw_reward, right.finish, right.length) == ("5", 1.0, 1.0, "stop", 2)
    assert (wrong.completion, wrong.reward, wrong.raw_reward, wrong.finish, wrong.length) == (
        "<b>6",
        -0.25,
        0.0,
        "length",
        4,
    )
    assert (wrong.first_version, wrong.last_version, wrong.step, wrong.age) == (0, 1, 1, 1)
    assert (wrong.prompt_length, wrong.turns) == (4, 1)
    newest = table[table.request == LAST_TRAINED]
    assert newest.age.tolist() == [0] * 4 and newest["extra/format"].tolist() == [0.5] * 4
    assert table[table.status == "dropped"].age.isna().all()
    assert np.isnan(right["extra/format"])


def test_metadata_is_one_column_of_json_in_memory_and_in_parquet(view: RunView, tmp_path: Path) -> None:
    table = view.trajectories()
    said = table.metadata.map(json.loads)
    assert (said.map(lambda m: m["level"]) == table.prompt_index).all() and "überschlagen" in table.metadata.iloc[2]
    export_parquet(view, tmp_path / "all.parquet")
    assert pq.read_table(tmp_path / "all.parquet")["metadata"].to_pylist() == table.metadata.tolist()
    assert "metadata" not in view.trajectories(text=False)


def test_columns_are_picked_and_unknown_ones_refused(view: RunView, run: RunDir) -> None:
    table = view.trajectories("arrow", columns=["request", "tokens", "versions"])
    assert table.column_names == ["request", "tokens", "versions"]
    row = table.to_pylist()[9]
    assert row["request"] == "r000001-000" and row["versions"] == [0, 1, 1, 1] and len(row["tokens"]) == 4
    with pytest.raises(RunError, match="no column 'rewards'.*raw_reward.*extra/format|no column 'rewards'.*raw_reward"):
        view.trajectories(columns=["rewards"])
    with pytest.raises(RunError, match="no column 'rewards'"):
        next(view.iter_trajectories(columns=["rewards"]))
    (run.model / "tokenizer.json").unlink()
    fresh = relax_hpc.open_run(run.root)
    with pytest.raises(RunError, match=r"tokenizer\.json.*text=False"):
        fresh.trajectories()
    assert "completion" not in fresh.trajectories(text=False)


def test_shards_are_read_one_at_a_time(view: RunView) -> None:
    shards = view.iter_shards()
    first = next(shards)
    assert len(first.samples) == 4
    next(shards)
    with pytest.raises(Exception, match="(?i)not an id|closed"):
        first.read("tokens")


def test_curves_keep_the_last_line_of_a_step(view: RunView) -> None:
    steps = view.steps()
    assert steps["step"].tolist() == [0, 1] and steps["reward"].tolist() == [0.2, 0.4]
    assert view.evals()[["version", "score"]].to_numpy().tolist() == [[0, 0.1], [2, 0.3]]
    assert view.ages().to_dict("records") == [
        {"step": 0, "age": 0, "tokens": 30}, {"step": 1, "age": 0, "tokens": 30}, {"step": 1, "age": 1, "tokens": 10},
    ]  # fmt: skip


def test_requests_of_shards_that_retention_removed_are_still_listed(view: RunView, run: RunDir) -> None:
    run.shard("r000000-000").unlink()
    run.shard("r000001-001").unlink()
    requests = view.requests().set_index("request")
    assert (requests.loc["r000001-001", "status"], requests.loc["r000001-001", "reason"]) == ("dropped", "stale")
    gone = view.requests().query("request == 'r000000-000' and status == 'trained'").iloc[0]
    assert gone.step == 0 and pd.isna(gone.bytes)


def test_a_damaged_shard_is_named_or_collected(view: RunView, run: RunDir) -> None:
    victim = run.shard("r000000-001")
    victim.write_bytes(victim.read_bytes()[:900])
    with pytest.raises(RunError, match="r000000-001"):
        view.trajectories()
    assert [str(victim) in str(e) for e in count(view).broken] == [True]
    assert str(victim) in render(view)


def test_a_damaged_ledger_entry_is_named(view: RunView, run: RunDir) -> None:
    run.ledger_entry(1).write_text('{"step": 1')
    with pytest.raises(RunError, match="00000001.json"):
        view.statuses()


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"not a run directory.*run\.json"):
        relax_hpc.open_run(tmp_path)


def test_an_empty_run_has_empty_tables_and_a_page(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "new")
    run.create()
    run.identity.write_text("{}")
    view = relax_hpc.open_run(run.root)
    assert (
        len(view.trajectories(text=False))
        == len(view.steps())
        == len(view.evals())
        == len(view.requests())
        == len(view.ages())
        == 0
    )
    assert view.outcome is None
    assert "No step is trained yet" in render(view)


def test_parquet_holds_the_same_rows(view: RunView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_hpc.monitor.analysis.export.ROWS_PER_GROUP", 5)
    output = tmp_path / "all.parquet"
    rows = export_parquet(view, output, tokens=True)
    exported = pq.read_table(output)
    assert rows == exported.num_rows == 27
    assert pq.ParquetFile(output).num_row_groups > 3
    memory = view.trajectories("arrow", columns=exported.column_names)
    for name in exported.column_names:
        assert str(exported[name].to_pylist()) == str(memory[name].to_pylist()), name  # str: NaN equals NaN
    assert export_parquet(view, output, statuses=["dropped"]) == 4
    assert set(pq.read_table(output)["status"].to_pylist()) == {"dropped"}
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_failed_export_leaves_nothing(view: RunView, run: RunDir, tmp_path: Path) -> None:
    run.shard("r000002-000").write_bytes(b"nothing")
    output = tmp_path / "x" / "all.parquet"
    with pytest.raises(RunError, match="no folder"):
        export_parquet(view, output)
    output.parent.mkdir()
    with pytest.raises(RunError, match="r000002-000"):
        export_parquet(view, output)
    assert list(output.parent.iterdir()) == []


def test_best_and_worst_are_trained_samples_one_a_group(view: RunView) -> None:
    found = best_and_worst(view, view.shard_paths(), 3)
    assert [(r["request"], r["group"], r["reward"]) for r in found["best"]] == [
        (LAST_TRAINED, 1, 1.0),
        (LAST_TRAINED, 0, 1.0),
        ("r000001-000", 0, 1.0),
    ]
    assert [(r["request"], r["group"], r["reward"]) for r in found["worst"]] == [
        ("r000000-001", 0, -0.5), (LAST_TRAINED, 1, -0.25), (LAST_TRAINED, 0, -0.25),
    ]  # fmt: skip
    assert found["best"][0]["completion"] == "script>alert8" and found["worst"][0]["completion"] == "<b>4"


class Page(HTMLParser):
    """Tags that are left open, and everything that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [
            v
            for k, v in attrs
            if k in ("src", "href", "xlink:href", "srcset") and v and not v.startswith(("#", "data:"))
        ]
        if tag not in ("meta", "link", "br", "img", "input", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_planned_start_is_no_restart() -> None:
    first = [{"kind": "start"}, {"kind": "restart", "role": "trainer"}, {"kind": "restart", "role": "rollout-0"}]
    successor = [{"kind": "outcome"}, *first]
    assert restarts([*first, *successor]) == 0
    lost = [{"kind": "lost", "role": "trainer"}, {"kind": "restart", "role": "trainer"}]
    assert restarts([*first, *lost, {"kind": "lost", "role": "rollout-0"}, *successor, *lost]) == 3


def test_the_report_is_one_page_that_asks_for_nothing(view: RunView) -> None:
    html = render(view)
    page = Page()
    page.feed(html)
    assert page.open == [] and page.fetched == [] and "script" not in page.tags and "b" in page.tags
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org)", html)
    assert page.tags.count("svg") >= 12
    for wanted in (
        "done",
        "all steps are trained",
        "killed by signal 9",
        "zero_std",
        "took longer than 30 s",
        "max_staleness = 1",
    ):
        assert wanted in page.text, wanted
    assert "<b>4" in page.text and "<pre><b>" not in html  # a model's words are text, not markup
    late = re.search(
        r"1 dropped requests came in after all, with ([\d.]+) tokens an answer; those trained on have ([\d.]+)\.",
        page.text,
    )
    assert late and late.groups() == ("14.0", "4.0")


def test_the_report_draws_what_the_policy_does_as_far_as_there_are_metrics_of_it(
    view: RunView, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that was not finite is a gap, not the end of its curve."""
    drawn = {title for _, figures in sections(view) for title in (figure.title for figure in figures)}
    policy = {"Entropy", "KL", "Clipped tokens", "Importance ratios", "Engine and trainer", "Groups of one reward"}
    assert not drawn & policy
    about = {
        "entropy": 1.5, "kl": 0.1, "clip_low": 0.02, "clip_high": 0.0, "importance": 1.0, "importance_max": 7.0, "logprob_diff": 0.1,
        "logprob_diff_max": 2.0, "zero_std_groups": 1, "generated_groups": 4, "reward": 0.5, "raw_reward": 0.5, "shaped_reward": 0.25,
    }  # fmt: skip
    steps = pd.DataFrame([{"step": i, **about} for i in range(60)] + [{"step": 60, **dict.fromkeys(about)}])
    for lines in (steps, steps.assign(entropy=None)):
        with monkeypatch.context() as patch:
            patch.setattr(view, "steps", lambda lines=lines: lines)
            charts = {figure.title: figure.svg for _, figures in sections(view) for figure in figures}
        assert {*policy, "Reward"} - set(charts) == (set() if lines is steps else {"Entropy"})
        assert not any("nan" in svg for svg in charts.values())
    assert "less overlong, KL" in str(plots.reward(steps))
    with (run.metrics / "trainer-0.jsonl").open("a") as file:
        step = {
            "kind": "step",
            "time": 23.0,
            "step": 2,
            "version": 3,
            "samples": 8,
            "tokens": 9,
            "step_s": 1.0,
            "wait_s": 0.0,
        }
        file.write(json.dumps({**step, **about}) + "\n")
    assert policy <= {figure.title for _, figures in sections(view) for figure in figures}


def test_curves_are_thinned_to_what_a_page_can_show() -> None:
    x, y = plots.thin(np.arange(10_000.0), np.ones(10_000) * 3, points=100)
    assert len(x) == len(y) == 100 and y.tolist() == [3.0] * 100 and 0 <= x[0] < x[-1] <= 9999
    long = pd.DataFrame({"step": range(20_000), "reward": np.random.default_rng(0).random(20_000)})
    assert len(plots.reward(long) or "") < 60_000


def test_analysis_does_not_import_torch(run: RunDir) -> None:
    code = (
        "import sys, relax_hpc; v = relax_hpc.open_run(sys.argv[1]); v.trajectories(); "
        "from relax_hpc.monitor.analysis.report import render, sections; render(v); print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run.root)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_metrics_with_a_torn_line_are_read(view: RunView, run: RunDir) -> None:
    with (run.metrics / "trainer-0.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 2, "reward": 0.9}) + '\n{"kind": "step", "st')
    assert view.steps()["step"].tolist() == [0, 1, 2]
