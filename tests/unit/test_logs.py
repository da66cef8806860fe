"""What people see of a run from the login node: logs, jobs, node agents, and the end of a run that only waits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relax_hpc.cli import app
from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor import logs
from relax_hpc.recipe import dump_recipe, load_recipe
from relax_hpc.slurm.overview import JobRow, Overview
from relax_hpc.slurm.submission.sbatch import record
from tests.runs import SMALL, write_recipe
from tests.unit.test_slurm_submit import program


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "small")
    made.create()
    made.identity.write_text("{}")
    made.recipe.write_text(dump_recipe(load_recipe(write_recipe(tmp_path, SMALL + "[slurm]\n"))))
    return made


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH; without Slurm to begin with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def call(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "160"})
    assert done.exit_code == 0, done.output
    return done.stdout


# --- logs ---------------------------------------------------------------------------------------------------------


def put(run: RunDir, name: str, *lines: str) -> None:
    path = run.logs / name
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def test_the_newest_logs_come_in_the_order_of_time(run: RunDir) -> None:
    put(run, "trainer-0.0000.log", "2026-01-01 00:00:00,000 old attempt")
    time.sleep(0.01)
    put(
        run,
        "trainer-0.0001.log",
        "2026-01-01 00:00:02,000 b",
        "  trace of b",
        "2026-01-01 00:00:04,000 d \x1b[2Jclears",
    )
    put(run, "rollout-0.0000.log", "2026-01-01 00:00:01,000 a", "2026-01-01 00:00:03,000 c")
    put(run, "slurm/small-trainer-17.out", "2026-01-01 00:00:00,500 sbatch")
    said = [line.split(" | ", 1) for line in call("logs", run.root).splitlines()]
    assert [role.strip() for role, _ in said] == ["slurm/small-trainer", "rollout-0", "trainer-0", "trainer-0", "rollout-0", "trainer-0"]  # fmt: skip
    assert [text.split()[-1] for _, text in said] == ["sbatch", "a", "b", "b", "c", "clears"] and "\x1b" not in str(
        said
    )
    assert call("logs", run.root, "-n", "1").endswith("d clears\n")
    assert call("logs", run.root, "trainer-0", "-n", "2").splitlines()[0] == "  trace of b"
    assert "sbatch" in call("logs", run.root, "slurm") and "a\n" in call("logs", run.root, "rollout")


def test_an_unknown_role_lists_what_there_is(run: RunDir) -> None:
    with pytest.raises(RunError, match="there are: none yet"):
        logs.choose(run, "judge")
    put(run, "trainer-0.0000.log", "x")
    put(run, "srun-trainer.0000.log", "x")
    with pytest.raises(RunError, match="no log of 'judge'; there are: srun-trainer, trainer-0"):
        logs.choose(run, "judge")


def test_following_goes_on_in_the_next_attempt_until_the_run_is_over(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LOOK_FOR_NEW_S", 0.0)
    put(run, "trainer-0.0000.log", "before")
    chosen = logs.choose(run, None)
    assert [line.text for line in logs.last_lines(chosen, 0)] == []

    def steps() -> Iterator[None]:
        put(run, "trainer-0.0000.log", "one")
        yield
        time.sleep(0.01)
        put(run, "trainer-0.0001.log", "two")
        yield
        run.outcome.write_text('{"outcome": "done"}')
        while True:
            yield

    happens = steps()
    seen = [line.text for line in logs.follow(run, None, chosen, lambda _: next(happens))]
    assert seen == ["one", "two"]


# --- jobs and node agents ----------------------------------------------------------------------------------------------


def agent(run: RunDir, name: str, state: str, ago_s: float = 0.0) -> None:
    heartbeat = {"host": f"node-{name}", "time": time.time() - ago_s, "state": state, "group": "base", "index": 0, "job": "5", "claim_dirs": ["a", "b"],
            "left": {}, "failure": ""}  # fmt: skip
    (run.heartbeats / f"node-agent-{name}.json").write_text(json.dumps(heartbeat))


def test_a_pending_run_says_why_it_waits(run: RunDir, bin_folder: Path) -> None:
    record(run, "5", "leader")
    record(run, "6", "leader", dependency="afterany:5")
    record(run, "7", "rollout")
    program(
        bin_folder, "squeue",
        'echo "5|PENDING|Resources||2030-01-02T03:04:05"; echo "6|PENDING|Dependency||N/A"',
        'echo "7|RUNNING|None|r[1-2]|2026-01-01T00:00:00"',
    )  # fmt: skip
    said = call("status", run.root)
    assert "pending" in said.splitlines()[0]
    for words in (
        "next in line",
        "expected 2030-01-02 03:04:05",
        "waits for the job before it",
        "r[1-2]",
        "next: job 6",
    ):
        assert words in said, said
    (run.slurm / "leaders.jsonl").write_text('{"job": "4", "steps": 2, "time": 1}\n')
    assert "waiting for a successor" in call("status", run.root).splitlines()[0]
    failed = {"outcome": "failed", "reason": "a node was lost", "step": 2, "time": 1}
    run.outcome.write_text(json.dumps(failed))
    assert "waiting for a successor" in call("status", run.root).splitlines()[0]
    run.outcome.write_text(json.dumps({**failed, "fatal": True}))
    assert "failed" in call("status", run.root).splitlines()[0]


def test_without_slurm_the_files_speak(run: RunDir, bin_folder: Path) -> None:
    assert "interrupted" in call("status", run.root)
    record(run, "5", "leader")
    said = call("status", run.root)
    assert "pending" in said and "unknown" in said and "Slurm cannot be asked" in said
    agent(run, "r1", "active")
    agent(run, "r2", "draining")
    agent(run, "r3", "active", ago_s=100)
    agent(run, "r4", "gone", ago_s=100)
    said = call("status", run.root)
    for node, state in (("r1", "active"), ("r2", "draining"), ("r3", "silent"), ("r4", "gone")):
        assert any(f"node-{node}" in line and state in line for line in said.splitlines()), said
    run.outcome.write_text('{"outcome": "done", "reason": "", "step": 6, "time": 1}')
    assert "done" in call("status", run.root).splitlines()[0]
    assert "done" in call("watch", run.root), "it does not wait for the end of a run that is over"


@pytest.mark.parametrize(
    ("states", "led", "ended", "words"),
    [
        (["PENDING", "PENDING"], [], None, "pending"),
        (["RUNNING", "PENDING"], [], None, "starting"),
        (["TIMEOUT", "PENDING"], ["1"], "preempted", "waiting for a successor"),
        (["NODE_FAIL", "PENDING"], ["1"], None, "waiting for a successor"),
        (["FAILED", "CANCELLED"], ["1"], None, None),
        (["?", "?"], ["1"], "preempted", "waiting for a successor"),
        (["?", "?"], ["1"], None, None),
        ([], [], None, None),
    ],
)
def test_words_for_a_run_that_nobody_holds(
    run: RunDir, states: list[str], led: list[str], ended: str | None, words: str | None
) -> None:
    jobs = [JobRow(str(i + 1), "leader", state) for i, state in enumerate(states)]
    assert Overview(run, jobs, led=led).waits_for(ended) == words


def test_stop_of_a_run_that_waits_cancels_its_jobs(run: RunDir, bin_folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["stop", str(run.root)])
    assert done.exit_code == 2 and "nothing to stop" in done.stderr
    record(run, "5", "leader")
    record(run, "6", "rollout")
    program(bin_folder, "squeue", 'echo "5|PENDING|Priority"; echo "6|COMPLETED|None"')
    program(bin_folder, "scancel", f'echo "$@" > {tmp_path}/cancelled')
    assert "cancelled 5" in call("stop", run.root)
    assert (tmp_path / "cancelled").read_text() == "--quiet 5\n"
    assert read_json(run.outcome)["outcome"] == "stopped"
    program(bin_folder, "scancel", "exit 1")
    done = CliRunner().invoke(app, ["stop", str(run.root)])
    assert done.exit_code == 2 and "`scancel 5`" in done.stderr
