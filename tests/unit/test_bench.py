"""The benchmarks' own parts: what they count, divide and refuse. What they measure is not tested here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from tools.bench import common, file_ops, memory, modes, runs, spool, tables
from tools.bench.sides import payload
from tools.bench.sides.child import Child, ChildError

BENCHMARKS = (
    "spool",
    "checkpoint",
    "memory",
    "trl",
    "quickstart",
    "omni",
    "agents",
    "omni_trainer",
    "staleness",
    "weights",
    "file_ops",
    "algorithms",
    "simulate",
    "trainers",
    "modes",
    "trl_accuracy",
    "endurance",
    "lora",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", (*BENCHMARKS, "faults"))
def test_every_benchmark_takes_json(name: str) -> None:
    script = common.ROOT / "tools" / "bench" / f"{name}.py"
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, cwd="/", timeout=600)
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout


def test_the_json_object_is_the_last_line_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    common.finish({"ratio": {"a": 1.5}}, as_json=True)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found.pop("about").keys() == {"command", "date", "machine", "load_before"}
    assert found == {"ratio": {"a": 1.5}, "tables": []}
    common.finish({"ratio": {"a": 1.5}}, as_json=False)
    assert capsys.readouterr().out == ""


def test_a_log_becomes_a_result_and_a_block_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table("case", "ratio")
    table.add_row("a|b", "1.5 (1.0–2.0)")
    monkeypatch.setattr(common, "_shown", [])
    common.show(table)
    common.finish({"ratio": {"a|b": 1.5}, "lost": 0, "same": True}, as_json=True)
    log, page = tmp_path / "bench.log", tmp_path / "page.md"
    log.write_text(f"rounds: 1 of 9\n{capsys.readouterr().out}killed\n")
    page.write_text("before\n<!-- results: spool -->\nTyped by hand, 2026-01-01\n<!-- end of results -->\nafter\n")
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(tables, "PAGE", page)

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["tables.py", *arguments])
        return tables.main()

    assert call("--check") == 0
    assert call("add", "spool", str(log), "--note", "beside tests") == 0
    text = page.read_text()
    assert "| a\\|b | 1.5 (1.0–2.0) |" in text and "beside tests" in text and "by hand" not in text
    assert "| `lost` | 0 |" in text and "| `same` | yes |" in text
    assert text.startswith("before\n") and text.endswith("<!-- end of results -->\nafter\n")
    assert call("--check") == 0
    page.write_text(text.replace("1.5 (1.0", "1.6 (1.0"))
    assert call("--check") == 1
    with pytest.raises(SystemExit):
        call("add", "spol", str(log))
    assert "it has spool" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no line is a JSON object"):
        tables.last_result("rounds: 1 of 9")


def test_figures_without_tables_are_laid_out_by_the_names_that_they_share() -> None:
    by_case = {"put": {"8": 6.0, "64": 7.126}, "get": {"8": 5.0, "64": 6.5}}
    assert tables.figures(by_case, with_grids=True) == [
        "|  | put | get |\n| --- | --- | --- |\n| 8 | 6 | 5 |\n| 64 | 7.126 | 6.5 |"
    ]
    by_name = {name: {"before": [0.1, 0.2]} for name in ("grpo", "dapo")}
    assert tables.figures(by_name, with_grids=True) == [
        "|  | before |\n| --- | --- |\n| grpo | 0.1 · 0.2 |\n| dapo | 0.1 · 0.2 |"
    ]


def test_each_table_of_the_page_is_what_its_result_says_or_says_that_it_was_typed() -> None:
    text = tables.PAGE.read_text()
    assert tables.page(text) == text, "run: python tools/bench/tables.py"
    blocks = tables.BLOCK.findall(text)
    assert {name.partition("-")[0] for _, name, _, _ in blocks} == {
        *BENCHMARKS,
        "chaos",
        "faults",
        "omni_media",
        "r3",
        "slurm_chaos",
    }
    for _, name, body, _ in blocks:
        assert (tables.RESULTS / f"{name}.json").is_file() or re.search(r"^Typed by hand, 20\d\d-\d\d-\d\d", body, re.M)


def test_the_comparison_quotes_ratios_of_the_page() -> None:
    quoted = re.findall(r"\d\.\d\d \(\d\.\d\d–\d\.\d\d\)", tables.PAGE.with_name("comparison.md").read_text())
    assert quoted and not [ratio for ratio in quoted if ratio not in tables.PAGE.read_text().replace("**", "")]


def test_all_sh_runs_every_benchmark_that_the_page_has() -> None:
    script = (common.ROOT / "tools/bench/all.sh").read_text()
    runs = re.findall(r'^    "([\w-]+)(.*)"$', script, re.M)
    assert {name for name, _ in runs} == {name for _, name, _, _ in tables.BLOCK.findall(tables.PAGE.read_text())}


def test_ratio_is_the_median_of_the_rounds_and_higher_when_ours_is_faster() -> None:
    found = common.ratio(ours_s=[1.0, 2.0, 1.0], theirs_s=[2.0, 2.0, 9.0])
    assert (found.median, found.low, found.high) == (2.0, 1.0, 9.0)
    with pytest.raises(ValueError):
        common.ratio([1.0], [1.0, 2.0])


def test_a_mode_that_is_worse_by_more_than_the_margin_is_told_from_one_that_is_not() -> None:
    on_policy = [0.70, 0.74, 0.69, 0.75]
    same = modes.paired([0.71, 0.73, 0.70, 0.75], on_policy)
    assert same.mean == pytest.approx(0.0025) and same.low == pytest.approx(-0.0127, abs=1e-4)  # 3.182 x 0.0096 / 2
    assert modes.paired([s - 0.05 for s in on_policy], on_policy).high < modes.MARGIN < same.low
    with pytest.raises(ValueError, match="1 seeds"):
        modes.paired([0.7], [0.7])


def test_rounds_alternate_and_warmups_are_dropped() -> None:
    called: list[tuple[str, int]] = []

    def side(name: str, number: int) -> str:
        called.append((name, number))
        return f"{name}{number}"

    seen = common.interleave({"a": lambda n: side("a", n), "b": lambda n: side("b", n)}, rounds=2, warmup=1)
    assert called == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert seen == {"a": ["a1", "a2"], "b": ["b1", "b2"]}


def test_a_memory_file_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    assert common.file_system(Path("/dev/shm/not-there/yet")) == "tmpfs"
    monkeypatch.setattr(common, "BENCH", Path("/dev/shm/relax-hpc-test-bench"))
    try:
        with pytest.raises(SystemExit, match="tmpfs"):
            common.disk_directory("spool")
    finally:
        Path("/dev/shm/relax-hpc-test-bench/spool").rmdir()
        Path("/dev/shm/relax-hpc-test-bench").rmdir()


def test_locks_leave_torch_to_the_exact_version() -> None:
    for lock in common.LOCKS.glob("*.txt"):
        pins = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
        assert all("==" in pin for pin in pins), lock
        assert not any(pin.startswith("torch==") for pin in pins), lock


def test_steady_throughput_leaves_the_first_steps_out() -> None:
    assert runs.samples_per_second([0.0, 100.0, 101.0, 102.0], batch=32, drop=1) == pytest.approx(32.0)
    with pytest.raises(ValueError):
        runs.samples_per_second([0.0, 1.0], batch=32, drop=1)


def test_a_done_run_is_read_from_its_metrics(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="not done"):
        runs.finished(tmp_path, 1.0)
    (tmp_path / "outcome.json").write_text('{"outcome": "done"}')
    (tmp_path / "metrics").mkdir()
    lines = [
        {"kind": "eval", "version": 10, "score": 0.9},
        {"kind": "eval", "version": 0, "score": 0.4},
        {"kind": "step", "step": 0, "step_s": 1.0},
        {"kind": "step", "step": 1, "step_s": 2.0},
        {"kind": "step", "step": 1, "step_s": 3.0},  # replayed after a restart
    ]
    (tmp_path / "metrics" / "trainer-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = runs.finished(tmp_path, 1.0)
    assert done.scores == [(0, 0.4), (10, 0.9)]
    assert [s["step_s"] for s in done.steps] == [1.0, 3.0]


def test_system_calls_are_counted_between_the_markers_only() -> None:
    log = f"""12 openat(AT_FDCWD, "/etc/passwd", O_RDONLY) = 3
12 access("{payload.MARKER_BEGIN}", F_OK) = -1 ENOENT (No such file or directory)
12 openat(AT_FDCWD, "/d/.x", O_WRONLY|O_CREAT) = 3
12 write(3, "abc(", 4 <unfinished ...>
13 mmap(NULL, 4096, PROT_READ, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0) = 0x7f
12 <... write resumed>) = 4
12 fsync(3)                          = 0
13 close(3)                          = 0
12 access("{payload.MARKER_END}", F_OK) = -1 ENOENT (No such file or directory)
12 unlink("/d/.x") = 0
"""
    assert spool.count_calls(log) == {"openat": 1, "write": 1, "fsync": 1, "close": 1}


def test_calls_of_a_whole_run_are_those_below_its_directory_in_a_stretch_of_time() -> None:
    log = """12    99.9 newfstatat(AT_FDCWD</home>, "/r/w2/requests/open", {}, 0) = 0
12 100.0 newfstatat(AT_FDCWD</home>, "/r/w2/requests/open", {}, 0) = 0
13   100.1 openat(AT_FDCWD</home>, "/r/w2", O_RDONLY) = 3</r/w2>
13 100.2 write(3</r/w2/heartbeats/.x>, ""..., 9 <unfinished ...>
12 100.3 newfstatat(AT_FDCWD</home>, "/r/w20/requests/open", {}, 0) = 0
13 100.4 <... write resumed>) = 9
13 100.5 mmap(NULL, 9, PROT_READ, MAP_SHARED, 3</r/w2/weights/x>, 0) = 0x7f
13 100.6 read(4</etc/hosts>, ""..., 9) = 9
13 101.0 close(3</r/w2/heartbeats/.x>) = 0
"""
    assert file_ops.count(log, Path("/r/w2"), 100.0, 101.0) == {"newfstatat": 1, "openat": 1, "write": 1}


def test_real_publishing_is_traced(tmp_path: Path) -> None:
    """One request costs a handful of calls, however many samples it has; writing, publishing and reading are all among them."""
    if not spool.shutil.which("strace"):
        pytest.skip("no strace here")
    try:
        small, large = spool.system_calls(tmp_path, 8), spool.system_calls(tmp_path, 64)
    except subprocess.CalledProcessError:
        pytest.skip("this machine does not let strace trace")
    assert small["fsync"] == 2 and small["link"] + small["linkat"] == 1
    assert {"writev", "openat"} <= small.keys() and {"read", "pread64"} & small.keys()
    assert large.total() <= small.total() + 2


def test_payload_is_the_same_everywhere_and_about_2k_tokens() -> None:
    one, two = payload.make(512), payload.make(512)
    assert one.sums() == two.sums()
    assert payload.agree(one.sums(), two.sums())
    assert not payload.agree([one.sums()[0] + 10_000_000, *one.sums()[1:]], one.sums())
    assert 1800 < len(one.tokens) / 512 < 2300
    assert int(one.offsets[-1]) == len(one.tokens) == len(one.loss_mask) == len(one.logprobs)
    assert one.nbytes == 9 * len(one.tokens) + 4 * 512


def test_growth_compares_the_second_fifth_with_the_last() -> None:
    assert memory.growth([9_000_000] * 2 + [1_000_000] * 2 + [3_000_000] * 4 + [5_000_000] * 2) == (1.0, 5.0)


def child_of(tmp_path: Path, body: str) -> Child:
    """A child whose handlers are made by `body`."""
    script = tmp_path / "side.py"
    sides = common.ROOT / "tools" / "bench" / "sides"
    script.write_text(f"import sys; sys.path.insert(0, {str(sides)!r})\nimport child\n{body}")
    return Child("side", [sys.executable, str(script)], tmp_path / "side.log", common.our_environment())


def test_a_child_answers_and_what_it_prints_is_no_answer(tmp_path: Path) -> None:
    body = "def add(a, b):\n    print('noise', flush=True)\n    return a + b\nchild.serve({'add': add})"
    with child_of(tmp_path, body) as side:
        assert side.call("add", a=2, b=3) == 5
    assert "noise" in (tmp_path / "side.log").read_text()


def test_a_child_that_fails_or_dies_says_how(tmp_path: Path) -> None:
    body = "import os\ndef die():\n    print('last words', file=sys.stderr, flush=True)\n    os._exit(3)\n"
    with child_of(tmp_path, body + "child.serve({'die': die, 'fail': lambda: 1 / 0})") as side:
        with pytest.raises(ChildError, match="ZeroDivisionError"):
            side.call("fail")
        with pytest.raises(ChildError, match="(?s)ended with 3.*last words"):
            side.call("die")


def test_progress_is_lines_where_stderr_is_no_terminal() -> None:
    code = (
        "from tools.bench.common import doing, progress\nwith doing('it'), progress('runs', 2) as done: done(), done()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=common.ROOT, check=True)
    assert [line[:11] for line in done.stderr.splitlines()] == ["it …", "runs: 0 of ", "runs: 1 of ", "runs: 2 of "]
