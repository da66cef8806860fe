"""Submission: what is refused before anything is made, sbatch's words, a busy controller, and what Slurm says of jobs.

`sbatch`, `squeue` and the like are small scripts on PATH here, for the reading of their words only; a real cluster is
used in tests/slurm.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import submitit
from rich.console import Console
from submitit.core.utils import FailedJobError, UncompletedJobError
from typer.testing import CliRunner

import relax_hpc
from relax_hpc.cli import app
from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor import cluster_view
from relax_hpc.monitor.status import Status
from relax_hpc.recipe import RecipeError, dump_recipe, load_recipe
from relax_hpc.slurm import batch, client
from relax_hpc.slurm.chain import Chain
from relax_hpc.slurm.client import Seen, cancel, end_of_job, job_state, look, outside_job, reason_in_words
from relax_hpc.slurm.overview import JobRow, Overview, job_rows
from relax_hpc.slurm.plan import make_plan, unset_cpus
from relax_hpc.slurm.submission import sbatch, unstartable
from relax_hpc.slurm.submission.submit import preview, refuse_local_root, submit
from relax_hpc.slurm.submission.unstartable import Vigil, hopeless
from relax_hpc.supervise.io_retry import at_first
from relax_hpc.supervise.lease import acquire
from relax_hpc.telemetry import read_metrics
from tests.programs import program
from tests.runs import wait_for

RECIPE = (
    '[run]\nname = "toy"\nroot = "/lustre/runs"\n[model]\nname = "tiny"\n[rollout]\nmax_new_tokens = 8\n'
    '[[source]]\ntask = "basic_arithmetic"\n'
)


@pytest.fixture(autouse=True)
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH, but for a shell's; without Slurm to begin with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "cat", "touch"):
        (folder / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RELAX_HPC_SITE", raising=False)
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.toml"
    path.write_text(RECIPE + "[slurm]\n")
    return path


@pytest.fixture
def run(recipe: Path, tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "toy")
    sbatch.write_scripts(run, make_plan(load_recipe(recipe, [f"run.root={tmp_path}"])))
    return run


def says(folder: Path, words: str, code: int = 1) -> None:
    program(folder, "sbatch", "cat >&2 <<'END'", words, "END", f"exit {code}")


# --- before anything is made --------------------------------------------------------------------------------------


def test_a_recipe_without_the_table_says_how_to_give_one(tmp_path: Path) -> None:
    path = tmp_path / "plain.toml"
    path.write_text(RECIPE)
    with pytest.raises(RunError, match=r"no \[slurm\] table.*site profile.*--set slurm\.partition"):
        preview(path)


@pytest.mark.parametrize("root", ["/tmp/x", "/dev/shm/x", "/var/tmp"])
def test_a_root_that_nodes_do_not_see_is_refused(recipe: Path, root: str) -> None:
    with pytest.raises(RunError, match=f"run.root = '{root}'.*--local-root-ok"):
        refuse_local_root(make_plan(load_recipe(recipe, [f"run.root={root}"])))
    refuse_local_root(make_plan(load_recipe(recipe, ["run.root=/tmpfs/x"])))


def test_refusals_come_through_the_command_line_without_a_trace(recipe: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["submit", str(recipe), "--set", "run.root=/tmp/nothing-is-made"])
    assert done.exit_code == 2 and "--local-root-ok" in done.stderr and "Traceback" not in done.stderr
    assert not Path("/tmp/nothing-is-made").exists()
    done = CliRunner().invoke(app, ["submit", str(tmp_path / "absent.toml")])
    assert done.exit_code == 2 and "no recipe and no run" in done.stderr


def test_a_dry_run_prints_scripts_and_makes_nothing(recipe: Path, tmp_path: Path) -> None:
    before = set(tmp_path.rglob("*"))
    done = CliRunner().invoke(app, ["submit", str(recipe), "--dry-run", "--set", f"run.root={tmp_path}"])
    assert done.exit_code == 0, done.stderr
    assert "##### leader.sbatch\n#!/bin/bash" in done.stdout and "##### rollout.sbatch" in done.stdout
    assert f"relax_hpc.slurm.batch leader {tmp_path}/toy\n" in done.stdout
    assert set(tmp_path.rglob("*")) == before
    assert relax_hpc.submit(recipe, dry_run=True) == []


def test_the_site_profile_reaches_the_scripts(recipe: Path, tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text('[slurm]\naccount = "mine"\n')
    assert "#SBATCH --account=mine\n" in preview(recipe, site=site)["leader"]
    with pytest.raises(RecipeError, match="--site"):
        preview(recipe, site=tmp_path / "absent.toml")


# --- sbatch -------------------------------------------------------------------------------------------------------


def test_a_job_is_sent_and_written_down(
    run: RunDir, bin_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(bin_folder, "sbatch", f'echo "$@" > {tmp_path}/said', "echo '42;cluster'")
    assert sbatch.submit_script(run, "leader", after="41") == "42"
    assert (tmp_path / "said").read_text() == f"--parsable --dependency=afterany:41 {run.slurm}/leader.sbatch\n"
    about = json.loads((run.slurm / "jobs" / "42.json").read_text())
    assert (about["id"], about["kind"], about["dependency"]) == ("42", "leader", "afterany:41")
    assert about["script"] == str(run.slurm / "leader.sbatch") and about["by"] and about["submitted"] > 0
    monkeypatch.setenv("PYTHONPATH", f"{run.snapshot}/code:/mine")
    program(bin_folder, "sbatch", f'echo "$PYTHONPATH" > {tmp_path}/said', "echo 43")
    sbatch.submit_script(run, "leader")
    assert (tmp_path / "said").read_text() == "/mine\n", "a chain does not pile up the run's code"
    (run.slurm / "jobs" / "43.json").unlink()
    sbatch.record(run, "7", "rollout")
    assert [job["id"] for job in sbatch.jobs(run)] == ["42", "7"]


@pytest.mark.parametrize(
    ("shape", "said"), [("split", "--exclude=t2,r1"), ("het", "--exclude=t2,r1 : --exclude=r9,r1")]
)
def test_a_node_that_keeps_failing_is_avoided_by_each_component_beside_its_own(
    run: RunDir, recipe: Path, bin_folder: Path, tmp_path: Path, shape: str, said: str
) -> None:
    sets = [f"slurm.shape={shape}", "slurm.trainer.exclude=t2", "slurm.rollout.exclude=r9"]
    write_file(run.recipe, dump_recipe(load_recipe(recipe, sets)).encode())
    program(bin_folder, "sbatch", f'echo "$@" > {tmp_path}/said', "echo 42")
    sbatch.exclude(run, "r1", "its workers die")
    sbatch.submit_script(run, "leader")
    assert (tmp_path / "said").read_text() == f"--parsable {said} {run.slurm}/leader.sbatch\n"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed: Invalid partition name specified", "slurm.partition"),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified", "slurm.account"),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "slurm.qos"),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "trainer.nodes"),
        ("sbatch: error: Memory specification can not be satisfied", "slurm.mem"),
        ("sbatch: error: Batch job submission failed: Invalid feature specification", "slurm.constraint"),
        ("sbatch: error: Batch job submission failed: Requested reservation is invalid", "slurm.reservation"),
        ("sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)", "slurm.time"),
        ("sbatch: error: Batch job submission failed: Invalid generic resource (gres) specification", "slurm.gpus_per_node, slurm.gres"),
        ("sbatch: error: Batch job submission failed: Invalid node name specified", "slurm.exclude"),
        ("sbatch: unrecognized option '--foo=1'", "slurm.options"),
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy", "slurm.queue_ahead"),
        ("sbatch: error: QOSMaxCpuPerJobLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS policy", "slurm.cpus_per_task"),
        ("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy", "slurm.time, the numbers"),
        ("sbatch: error: Batch job submission failed: Access/permission denied", "slurm.partition: it takes no jobs of yours, or none from this machine"),
        ("sbatch: error: no idea", "the keys of [slurm]"),
    ],
)  # fmt: skip
def test_what_sbatch_refuses_comes_with_its_words_and_the_key(
    run: RunDir, bin_folder: Path, words: str, key: str
) -> None:
    says(bin_folder, words)
    with pytest.raises(RunError) as caught:
        sbatch.submit_script(run, "leader")
    message = str(caught.value)
    assert words.splitlines()[-1].removeprefix("sbatch: ").removeprefix("error: ") in message
    assert f"; change {key}" in message and f"relax-hpc submit {run.root} --set" in message
    assert sbatch.jobs(run) == []


def test_what_is_refused_changes_nothing(run: RunDir, recipe: Path, bin_folder: Path, tmp_path: Path) -> None:
    run.create()
    write_file(run.identity, b"{}")
    write_file(run.recipe, dump_recipe(load_recipe(recipe, [f"run.root={tmp_path}"])).encode())
    write_file(run.outcome, b'{"outcome": "stopped"}')
    before = {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()}
    program(bin_folder, "srun", "exit 1")
    program(bin_folder, "squeue", "exit 0")
    program(
        bin_folder,
        "sbatch",
        f"cat {run.slurm}/leader.sbatch > {tmp_path}/said",
        "echo 'Invalid partition name specified' >&2",
        "exit 1",
    )
    with pytest.raises(RunError, match="slurm.partition"):
        submit(run.root, ["slurm.partition=nope", "run.steps=7"], local_root_ok=True)
    assert "--partition=nope" in (tmp_path / "said").read_text()
    assert {path: path.read_bytes() for path in run.root.rglob("*") if path.is_file()} == before
    (tmp_path / "next").write_text("5")
    program(bin_folder, "sbatch", f"n=$(cat {tmp_path}/next)", f"echo $((n+1)) > {tmp_path}/next", "echo $n")
    assert [job.kind for job in submit(run.root, ["run.steps=7"], local_root_ok=True, redo="score")] == [
        "leader",
        "leader",
        "rollout",
    ]
    assert load_recipe(run.recipe).run.steps == 7 and not run.outcome.exists()
    assert [json.loads(line)["key"] for line in run.changes.read_text().splitlines()] == ["run.steps", "redo"]


def test_a_busy_controller_is_asked_again(run: RunDir, bin_folder: Path, tmp_path: Path) -> None:
    count = tmp_path / "count"
    program(bin_folder, "squeue", "exit 1")
    program(
        bin_folder, "sbatch", f"echo x >> {count}", f"[ $(cat {count} | (n=0; while read _; do n=$((n+1)); done; echo $n)) = 3 ] && echo 5 && exit 0",
        "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2", "exit 1",
    )  # fmt: skip
    assert sbatch.submit_script(run, "leader", first_wait_s=0.01) == "5"
    assert count.read_text() == "x\n" * 3


def test_a_job_that_was_taken_although_the_answer_was_lost_is_not_sent_twice(run: RunDir, bin_folder: Path) -> None:
    sbatch.record(run, "8", "leader")
    script = run.slurm / "leader.sbatch"
    says(bin_folder, "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    program(bin_folder, "squeue", f"echo '8|{script}'", f"echo '9+0|{script}'", "echo '10|/other'")
    assert sbatch.submit_script(run, "leader", first_wait_s=0.01) == "9"


def test_a_controller_that_stays_away_is_given_up(
    run: RunDir, bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sbatch, "LONGEST_WAIT_S", 0.01)
    says(bin_folder, "sbatch: error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(RunError, match="does not answer, after 6 attempts.*Unable to contact.*scontrol ping"):
        sbatch.submit_script(run, "leader", first_wait_s=0.001)


def test_a_machine_without_slurm_says_so(run: RunDir) -> None:
    with pytest.raises(RunError, match="no sbatch on this machine.*login node"):
        sbatch.submit_script(run, "leader")


def test_sending_a_run_again_forgets_that_it_was_stopped(run: RunDir) -> None:
    assert sbatch.forget_end(run) is None
    run.stop.touch()
    run.outcome.write_text('{"outcome": "stopped"}')
    sbatch.forget_end(run)
    assert not run.stop.exists() and not run.outcome.exists()


def test_a_run_without_scripts_says_what_writes_them(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no batch script.*relax-hpc submit"):
        sbatch.submit_script(RunDir(tmp_path / "none"), "rollout")


def test_a_job_sent_from_a_job_does_not_inherit_its_description() -> None:
    inside = {"SLURM_JOB_ID": "1", "SLURM_HET_SIZE": "2", "PMIX_RANK": "0", "SLURM_CONF": "/c", "PATH": "/bin"}
    assert outside_job(inside) == {"SLURM_CONF": "/c", "PATH": "/bin", "LC_ALL": "C"}


# --- what Slurm says of jobs --------------------------------------------------------------------------------------


def test_states_are_of_whole_jobs(bin_folder: Path) -> None:
    program(
        bin_folder, "squeue", "echo '5|RUNNING|None'", "echo '6+1|PENDING|None'", "echo '6+0|PENDING|Resources'",
    )  # fmt: skip
    program(
        bin_folder,
        "sacct",
        '[ "${@: -1}" = 8,9 ] || exit 9',
        "echo '8+0|CANCELLED by 1000|None'",
        "echo '8+1|COMPLETED|None'",
    )
    assert look(["5", "6", "8", "9", "5"]) == {
        "5": Seen("RUNNING", "None"),
        "6": Seen("PENDING", "Resources"),
        "8": Seen("CANCELLED", "None"),
        "9": Seen("GONE", ""),
    }
    assert Seen("COMPLETING", "").alive and not Seen("GONE", "").alive


def test_a_task_of_an_array_is_a_job_of_its_own(
    bin_folder: Path, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows as Slurm 22.05 prints them: 1 is the raw number of the task that waits last, and the array's."""
    program(
        bin_folder, "squeue", f'echo "$@" > {tmp_path}/said', '[ "$1 $2" = "-h --array" ] || echo "1_[2-3%2]|PENDING|Priority"',
        "echo '1_3|PENDING|JobArrayTaskLimit'", "echo '1_2|RUNNING|None'", "echo '1_1|CANCELLED|None'",
    )  # fmt: skip
    assert look(["1_1", "1_2", "1_3"]) == {
        "1_1": Seen("CANCELLED", "None"),
        "1_2": Seen("RUNNING", "None"),
        "1_3": Seen("PENDING", "JobArrayTaskLimit"),
    }
    assert (tmp_path / "said").read_text().endswith("-j 1_1,1_2,1_3\n")
    assert job_state(["1"]) == {"1": "GONE"}, "the number of one task is no answer about another"
    for name, value in {"SLURM_JOB_ID": "1", "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(name, value)
    assert client.own_job() == "1_3"
    for job in ("10", "1_3", "9"):
        sbatch.record(run, job, "leader")
        written = run.slurm / "jobs" / f"{job}.json"
        written.write_text(json.dumps({**json.loads(written.read_text()), "submitted": 1.0}))
    assert [job["id"] for job in sbatch.jobs(run)] == ["1_3", "9", "10"]
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name)
    assert client.own_job() == "1"
    monkeypatch.delenv("SLURM_JOB_ID")
    assert client.own_job() is None


def test_a_component_that_ended_is_seen_while_the_job_goes_on(bin_folder: Path, run: RunDir) -> None:
    program(bin_folder, "squeue", "echo '8+1|CANCELLED|None'", "echo '8+0|RUNNING|None'")
    assert look(["8"]) == {"8": Seen("RUNNING", "None", ("8+1 CANCELLED",))}
    sbatch.record(run, "8", "leader")
    [row] = job_rows(run)
    assert row.alive and row.why == "a component of it has ended: 8+1 cancelled"
    program(bin_folder, "squeue", "echo '8+1|CANCELLED|None'", "echo '8+0|COMPLETED|None'")
    assert look(["8"]) == {"8": Seen("COMPLETED", "None")}
    (bin_folder / "squeue").unlink()
    program(
        bin_folder, "scontrol", "echo 'JobId=8 HetJobId=8 HetJobOffset=0 JobName=h JobState=RUNNING Reason=None'",
        "echo 'JobId=9 HetJobId=8 HetJobOffset=1 JobName=h JobState=CANCELLED Reason=None'",
    )  # fmt: skip
    assert look(["8"]) == {"8": Seen("RUNNING", "None", ("8+1 CANCELLED",))}


@pytest.mark.parametrize("restart", ["chain", "requeue"])
def test_what_goes_on_with_a_task_of_an_array_is_of_that_task(
    bin_folder: Path, recipe: Path, run: RunDir, tmp_path: Path, restart: str
) -> None:
    slurm = load_recipe(recipe, [f"slurm.restart={restart}"]).slurm
    assert slurm is not None
    program(bin_folder, "squeue", "echo '7_1|COMPLETING|None'", "echo '7_0|RUNNING|None'")
    for name in ("sbatch", "scontrol"):
        program(bin_folder, name, f'echo "$@" > {tmp_path}/{name}', "echo 12")
    chain = Chain(run, slurm, "7_1")
    assert chain.is_ending() and not Chain(run, slurm, "7_0").is_ending()
    chain.end({"outcome": "preempted"}, warned=True)
    if restart == "requeue":
        assert (tmp_path / "scontrol").read_text() == "requeue 7_1\n" and not (tmp_path / "sbatch").exists()
    else:
        assert "--dependency=afterany:7_1 " in (tmp_path / "sbatch").read_text()
        assert sbatch.jobs(run)[-1]["dependency"] == "afterany:7_1"


def test_who_waits_for_an_earlier_leader_is_no_successor(bin_folder: Path, recipe: Path, run: RunDir) -> None:
    slurm = load_recipe(recipe).slurm
    assert slurm is not None
    for job, after in (
        ("4", None),
        ("7", "afterany:4"),
        ("9", "afterany:4"),
    ):  # 4 was cut off, and sent 9 when 7 led already
        sbatch.record(run, job, "leader", dependency=after)
    program(bin_folder, "squeue", "echo '7|RUNNING|None'", "echo '9|PENDING|Dependency'")
    program(bin_folder, "sbatch", "echo 11")
    Chain(run, slurm, "7").queue_successor()
    assert (sbatch.jobs(run)[-1]["id"], sbatch.jobs(run)[-1]["dependency"]) == ("11", "afterany:7")
    program(bin_folder, "squeue", "echo '7|RUNNING|None'", "echo '9|COMPLETED|None'", "echo '11|PENDING|Dependency'")
    program(bin_folder, "sbatch", "echo 12")
    for job in ("7", "4"):  # it has one; and one that comes back late has had its own
        Chain(run, slurm, job).queue_successor()
    assert [job["id"] for job in sbatch.jobs(run)] == ["4", "7", "9", "11"]


def test_a_refused_successor_is_sent_when_slurm_takes_it(
    bin_folder: Path, recipe: Path, run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    slurm = load_recipe(recipe).slurm
    assert slurm is not None
    program(bin_folder, "squeue", "echo '7|RUNNING|None'")
    says(bin_folder, "sbatch: error: Batch job submission failed: Access/permission denied")
    run.create()
    ended = threading.Event()
    with ThreadPoolExecutor(1) as background:
        queued = background.submit(batch.queue_until_taken, Chain(run, slurm, "7"), at_first(run), 0.01, ended)
        try:
            refused = lambda: [e for e in read_metrics(run.metrics / "chain.jsonl")[0] if e["kind"] == "refused"]
            wait_for(lambda: len(refused()) > 2)
            overview = Overview(run)
            overview.refresh()
            assert "Access/permission denied" in overview.refused["successor"]
            program(bin_folder, "sbatch", "echo 8")
            wait_for(queued.done)
        finally:
            ended.set()
    queued.result()
    assert [(job["id"], job["dependency"]) for job in sbatch.jobs(run)] == [("8", "afterany:7")]
    overview.refresh()
    assert overview.refused == {}
    assert len(caplog.messages) == 1, "each wording is said once"
    assert caplog.messages[0].startswith("no successor queued: this run ends with this job: sbatch refuses")
    says(bin_folder, "sbatch: error: Batch job submission failed: Access/permission denied")
    batch.queue_until_taken(
        Chain(run, slurm, "8"), at_first(run), 0.01, ended
    )  # the job ends: no attempt after this one


def test_a_leader_that_shall_have_no_successor_says_so(
    recipe: Path, run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    slurm = load_recipe(recipe, ["slurm.queue_ahead=0"]).slurm
    assert slurm is not None
    Chain(run, slurm, "7").queue_successor()
    assert caplog.messages == ["no successor queued: this run ends with this job: slurm.queue_ahead = 0"]


def test_a_requeue_that_is_refused_is_made_good_by_a_new_job(bin_folder: Path, recipe: Path, run: RunDir) -> None:
    run.create()
    slurm = load_recipe(recipe, ["slurm.restart=requeue"]).slurm
    assert slurm is not None
    program(bin_folder, "scontrol", "echo requeue is disabled >&2; exit 1")
    says(bin_folder, "no")
    overview = Overview(run)
    with pytest.raises(RunError, match="sbatch refuses"):
        Chain(run, slurm, "7").end({"outcome": "preempted", "reason": ""}, warned=True)
    overview.refresh()
    assert "no" in overview.refused["successor"]
    program(bin_folder, "sbatch", "echo 8")
    Chain(run, slurm, "7").end({"outcome": "preempted", "reason": ""}, warned=True)
    overview.refresh()
    assert overview.refused == {}
    refused = [e["reason"] for e in read_metrics(run.metrics / "chain.jsonl")[0] if e["kind"] == "refused"]
    assert refused[0] == "requeue is disabled"


def test_a_job_that_came_beyond_its_setup_is_not_told_to_have_failed_in_it(bin_folder: Path, run: RunDir) -> None:
    sbatch.record(run, "7", "leader")
    (run.slurm / "jobs" / "7.setup-failed").write_text("exit code 1: module load x\n")
    for state, why in (("FAILED", "slurm.setup failed, exit code 1: module load x"), ("RUNNING", "")):  # requeued
        program(bin_folder, "squeue", f"echo '7|{state}|None'")
        assert [(row.state, row.why) for row in job_rows(run)] == [(state, why)]


@pytest.mark.parametrize(
    ("ahead", "jobs", "words"),
    [
        (0, [("7", "RUNNING")], "this run ends with this job (slurm.queue_ahead = 0)"),
        (1, [("7", "RUNNING")], "this run ends with this job (sbatch refuses: no)"),
        (1, [("7", "RUNNING"), ("8", "PENDING")], "next: job 8"),
    ],
)
def test_status_says_that_no_successor_is_queued(
    recipe: Path, run: RunDir, ahead: int, jobs: list[tuple[str, str]], words: str
) -> None:
    rows = [JobRow(job, "leader", state) for job, state in jobs]
    overview = Overview(run, rows, led=["7"], refused={"successor": "sbatch refuses: no", "rollout job": "limit"})
    status = Status(run, load_recipe(recipe, [f"slurm.queue_ahead={ahead}"]), slurm=overview, holder={"job": "7"})
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(*cluster_view.parts(status))
    shown = console.export_text()
    assert words in shown and "no rollout job: limit" in shown
    assert ("no successor queued" in shown) is (len(jobs) == 1)


def test_one_whose_scancel_fails_takes_back_its_own_word_only(bin_folder: Path, run: RunDir) -> None:
    run.create()
    program(bin_folder, "scancel", "true")
    assert sbatch.end_jobs(run, ["7"], "its lease was silent, says one node agent")
    program(bin_folder, "scancel", "exit 1")
    assert not sbatch.end_jobs(run, ["7", "70", "7_1"], "its lease was silent, says another")
    assert [sbatch.ended_by_us(run, job) for job in ("7", "70", "7_1")] == [True, False, False]


@pytest.mark.parametrize("state", ["CANCELLED", "GONE"])  # Slurm forgets it after a few minutes
@pytest.mark.parametrize("by", ["a person", "the run"])
@pytest.mark.parametrize("ended", ["preempted", "failed"])
def test_a_successor_that_a_person_cancelled_is_not_replaced(
    bin_folder: Path, recipe: Path, run: RunDir, state: str, by: str, ended: str
) -> None:
    run.create()
    slurm = load_recipe(recipe).slurm
    assert slurm is not None
    for name in ("sbatch", "scancel"):
        program(bin_folder, name, "echo 9")
    sbatch.record(run, "7", "leader")
    sbatch.record(run, "8", "leader", dependency="afterany:7")
    if by == "the run":
        sbatch.end_jobs(run, ["8"], "another one is better")
    program(
        bin_folder,
        "squeue",
        "echo '7|RUNNING|None'",
        f"[ {state} = GONE ] || echo '8|{state}|None'",
        "echo '9|PENDING|None'",
    )
    Chain(run, slurm, "7").queue_successor()
    Chain(run, slurm, "7").end({"outcome": ended, "reason": "lost", "suspect": ""}, warned=True)
    if by == "the run":
        assert [job["id"] for job in sbatch.jobs(run)] == ["7", "8", "9"] and not run.outcome.exists()
    else:
        assert [job["id"] for job in sbatch.jobs(run)] == ["7", "8"], "a fresh successor was sent"
        said = json.loads(run.outcome.read_text()) if ended == "preempted" else {}
        assert ended == "failed" or (said["outcome"] == "stopped" and "job 8, which was to go on" in said["reason"])
        refused = [r["reason"] for r in read_metrics(run.metrics / "chain.jsonl")[0] if r["kind"] == "refused"]
        assert refused == [said.get("reason", refused[0])]


def test_who_waited_for_a_cancelled_successor_leaves_the_leader_alone(
    bin_folder: Path, recipe: Path, run: RunDir
) -> None:
    """With queue_ahead = 2 the last of the queue begins when the one before it is cancelled."""
    run.create()
    slurm = load_recipe(recipe, ["slurm.queue_ahead=2"]).slurm
    assert slurm is not None
    program(bin_folder, "squeue", "echo '7|RUNNING|None'", "echo '8|CANCELLED|None'", "echo '9|RUNNING|None'")
    program(bin_folder, "scancel", "exit 1")
    for job, after in (("7", None), ("8", "afterany:7"), ("9", "afterany:8")):
        sbatch.record(run, job, "leader", dependency=after)
    Chain(run, slurm, "7").lead()
    held = acquire(run)
    assert "job 8 was cancelled by a person" in str(Chain(run, slurm, "9").begin()) and not run.outcome.exists()
    held.release()
    assert Chain(run, slurm, "9").begin() == "job 8 was cancelled by a person"
    assert json.loads(run.outcome.read_text())["outcome"] == "stopped"


@pytest.mark.parametrize(("restart", "sends"), [("chain", True), ("requeue", True), ("none", False)])
def test_a_new_job_follows_one_whose_component_ended(
    bin_folder: Path, recipe: Path, run: RunDir, restart: str, sends: bool
) -> None:
    slurm = load_recipe(recipe, [f"slurm.restart={restart}", "slurm.shape=het"]).slurm
    assert slurm is not None
    program(bin_folder, "squeue", "echo '7+0|RUNNING|None'", "echo '7+1|CANCELLED|None'")
    program(bin_folder, "scontrol", "echo 'Job not heterogeneous job leader' >&2", "exit 1")
    program(bin_folder, "sbatch", "echo 9")
    Chain(run, slurm, "7").end({"outcome": "failed", "reason": "its component ended", "suspect": ""}, warned=True)
    assert [job["dependency"] for job in sbatch.jobs(run)] == (["afterany:7"] if sends else [])


@pytest.mark.parametrize(
    ("scontrol", "state", "sends"),
    [
        ("exit 0", "COMPLETING", False),
        ("kill -TERM $$", "COMPLETING", False),  # it is of the job that it requeues, and ends with it
        ("kill -TERM $$", "RUNNING", True),
        ("exit 1", "RUNNING", True),
    ],
)
def test_a_new_job_follows_only_where_this_one_is_not_requeued(
    bin_folder: Path, recipe: Path, run: RunDir, scontrol: str, state: str, sends: bool
) -> None:
    slurm = load_recipe(recipe, ["slurm.restart=requeue"]).slurm
    assert slurm is not None
    program(bin_folder, "scontrol", scontrol)
    program(bin_folder, "squeue", f"echo '7|{state}|None'")
    program(bin_folder, "sbatch", "echo 8")
    Chain(run, slurm, "7").end({"outcome": "preempted"}, warned=True)
    assert [job["id"] for job in sbatch.jobs(run)] == (["8"] if sends else [])


def test_the_end_of_our_own_job_is_what_slurm_put_into_its_environment(
    bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(bin_folder, "squeue", "echo 2030-01-01T00:00:00")
    asked = end_of_job("7")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1893456789")
    assert end_of_job("7") == 1893456789.0 != asked == end_of_job("8")


@pytest.mark.parametrize(
    ("sets", "named"),
    [
        ([], "for trainer and rollout:"),
        (["slurm.trainer.cpus_per_task=4"], "for rollout:"),
        (["slurm.cpus_per_task=4"], ""),
        (["slurm.options.exclusive=true"], ""),
    ],
)
def test_cpus_that_nobody_asked_for_are_warned_of(recipe: Path, sets: list[str], named: str) -> None:
    said = unset_cpus(make_plan(load_recipe(recipe, sets)))
    assert bool(said) is bool(named) and named in said


def test_without_accounting_what_squeue_forgot_is_gone(bin_folder: Path) -> None:
    program(bin_folder, "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2", "exit 1")
    program(bin_folder, "sacct", "echo 'Slurm accounting storage is disabled' >&2", "exit 1")
    assert job_state(["5"]) == {"5": "GONE"}


def test_what_cannot_be_asked_is_unknown(bin_folder: Path) -> None:
    assert job_state(["5"]) == {"5": None} and job_state([]) == {}
    assert cancel(["5"]) is False and cancel([]) is True
    program(bin_folder, "scontrol", "echo 'JobId=5 JobName=x JobState=RUNNING Reason=None Dependency=(null)'")
    assert look(["5"]) == {"5": Seen("RUNNING", "None")}
    program(bin_folder, "squeue", "echo 'Unable to contact slurm controller' >&2", "exit 1")
    assert job_state(["5"]) == {"5": None}


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "other jobs come first"),
        ("Resources", "waits for nodes"),
        (
            "QOSMaxJobsPerUserLimit",
            "the QOS allows no more than this job asks for, or uses already, its limit of jobs for one user",
        ),
        ("AssocGrpCPUMinutesLimit", "the account uses its limit of CPU minutes"),
        ("QOSGrpGRES", "the QOS uses its limit of GPUs"),
        ("AssocMaxWallDurationPerJobLimit", "its limit of hours in one job"),
        ("PartitionTimeLimit", "slurm.time is more than the partition allows"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "(ReqNodeNotAvail, UnavailableNodes:n[1-2])"),
        ("DependencyNeverSatisfied", "cancel it"),
        ("BeginTime", "two minutes"),
        ("JobHeldUser", "scontrol release"),
        ("SomethingNew", "SomethingNew"),
    ],
)
def test_reasons_in_words(reason: str, words: str) -> None:
    assert words in reason_in_words(reason)


def test_every_state_that_waits_is_alive() -> None:
    assert client.WAITING < client.ALIVE


# --- jobs that never start ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        # Seen on the private cluster (22.05).
        ("PartitionNodeLimit", "trainer.nodes and rollout.nodes"),
        ("PartitionTimeLimit", "slurm.time"),
        ("PartitionConfig", "slurm.cpus_per_task"),
        ("JobHeldUser", "slurm.options.hold"),
        ("PartitionDown", ""),
        ("Resources", ""),
        ("Dependency", ""),
        ("None", ""),
        ("ReqNodeNotAvail, UnavailableNodes:t2", ""),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", ""),
        # Slurm's list of reasons.
        ("BadConstraints", "slurm.constraint"),
        ("DependencyNeverSatisfied", "send the run again"),
        ("AssocMaxNodePerJobLimit", "trainer.nodes and rollout.nodes"),
        ("QOSMaxWallDurationPerJobLimit", "change slurm.time, or another slurm.qos"),
        ("QOSMaxGRESPerNode", "slurm.gpus_per_node"),
        ("QOSMaxCpuMinutesPerJobLimit", "slurm.time, slurm.cpus_per_task"),
        ("QOSMinCpuNotSatisfied", "change slurm.cpus_per_task"),
        ("QOSGrpCpuLimit", ""),
        ("AssocGrpGRES", ""),
        ("MaxNodePerAccount", ""),
        ("JobHeldAdmin", ""),
    ],
)
def test_reasons_that_waiting_does_not_end_come_with_what_mends_them(
    bin_folder: Path, reason: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unstartable, "time", SimpleNamespace(sleep=lambda seconds: None))  # between its looks
    program(bin_folder, "squeue", "echo '5|RUNNING|None'", f"echo '6|PENDING|{reason}'", "echo '7|PENDING|Priority'")
    found = hopeless(["5", "6", "7"])
    assert found.keys() == ({"6"} if fix else set())
    assert not fix or (found["6"].startswith(f"{reason}: ") and fix in found["6"])


@pytest.mark.parametrize("reason", ["QOSMaxJobsPerUserLimit", "QOSMaxNodePerUserLimit", "AssocMaxJobsLimit"])
def test_a_limit_on_all_jobs_of_a_user_ends_only_where_others_of_theirs_run(bin_folder: Path, reason: str) -> None:
    def squeue(mine: str) -> None:
        program(bin_folder, "squeue", f'[[ "$*" == *"-u "* ]] && echo "{mine}" && exit 0', "echo '5|RUNNING|None'", f"echo '6|PENDING|{reason}'")  # fmt: skip

    squeue("5")
    assert "need to run at the same time" in hopeless(["5", "6"])["6"]
    squeue("5 99")
    assert hopeless(["5", "6"]) == {}


def test_of_a_heterogeneous_job_every_component_counts(bin_folder: Path) -> None:
    program(bin_folder, "squeue", "echo '17+1|PENDING|PartitionNodeLimit'", "echo '17+0|PENDING|Resources'")
    assert hopeless(["17"]).keys() == {"17"}
    assert hopeless([]) == {}


def test_jobs_that_can_never_start_are_cancelled_when_they_are_sent(
    run: RunDir, recipe: Path, bin_folder: Path, tmp_path: Path
) -> None:
    run.create()
    write_file(run.identity, b"{}")
    write_file(run.recipe, dump_recipe(load_recipe(recipe, [f"run.root={tmp_path}"])).encode())
    (tmp_path / "next").write_text("4")
    program(bin_folder, "srun", "exit 1")
    program(bin_folder, "sbatch", f"n=$(cat {tmp_path}/next)", f"echo $((n+1)) > {tmp_path}/next", "echo $n")
    program(bin_folder, "scancel", f'echo "$@" > {tmp_path}/cancelled')
    program(  # the scheduler looks at a job a moment after it was sent
        bin_folder,
        "squeue",
        f"if [ -e {tmp_path}/looked ]; then echo '4|PENDING|PartitionTimeLimit'; else echo '4|PENDING|None'; fi",
        f"touch {tmp_path}/looked",
        "echo '5|PENDING|Dependency'",
    )
    with pytest.raises(
        RunError, match=r"cannot ever start all.*job 4 \(leader\): PartitionTimeLimit.*slurm\.time.*cancelled"
    ):
        submit(run.root, local_root_ok=True)
    assert (tmp_path / "cancelled").read_text() == "--quiet 4 5 6\n"
    program(bin_folder, "squeue", "echo '7|RUNNING|None'")
    sent = submit(run.root, ["slurm.rollout_after_leader=true"], local_root_ok=True)
    assert [(job.kind, job.dependency) for job in sent] == [
        ("leader", ""),
        ("leader", "afterany:7"),
        ("rollout", "after:7"),
    ]


@pytest.mark.parametrize(
    ("first", "leaves"),
    [
        ("PENDING|PartitionTimeLimit", True),
        ("PENDING|Resources", False),
        ("RUNNING|None", False),
    ],
)
def test_rollout_nodes_leave_when_their_leader_can_never_start(
    run: RunDir, recipe: Path, bin_folder: Path, first: str, leaves: bool
) -> None:
    run.create()
    for job, after in (("4", None), ("5", "afterany:4")):
        sbatch.record(run, job, "leader", dependency=after)
    program(bin_folder, "squeue", f"echo '4|{first}'", "echo '5|PENDING|Dependency'")
    vigil = Vigil(run, load_recipe(recipe, ["supervision.leader_silent_s=1e-9"]))
    assert vigil.in_vain() == "", "the silence begins with the first look"
    assert ("job 4: PartitionTimeLimit" in vigil.in_vain()) is leaves
    assert vigil.in_vain() == "", "the controller is not asked each time"


# --- submitit -----------------------------------------------------------------------------------------------------


def test_a_job_gives_the_runs_outcome_and_not_one_from_before(
    run: RunDir, bin_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relax_hpc.slurm.submission.run_job import RunJob

    monkeypatch.setattr(RunJob, "_results_timeout_s", 0)
    program(bin_folder, "squeue", "echo '91|RUNNING|None'")
    with pytest.raises(RunError, match="has no job 91"):
        RunJob(run.slurm, "91")
    sbatch.record(run, "91", "leader")
    job = RunJob(run.slurm, "91")
    assert (job.kind, job.name, job.dependency, job.state) == ("leader", "toy-trainer", "", "RUNNING")
    old = {"outcome": "stopped", "reason": "", "step": 2, "time": 1.0}
    run.outcome.write_text(json.dumps(old))
    assert not job.done(force_check=True), "that was before this job"
    run.outcome.write_text(json.dumps({**old, "time": 1e11, "outcome": "preempted"}))
    assert not job.done(), "goes on in the successor"
    done = {**old, "time": 1e11, "outcome": "done"}
    run.outcome.write_text(json.dumps(done))
    assert job.done() and job.result() == done and job.exception() is None
    failed = {**done, "outcome": "failed", "reason": "no disk"}
    run.outcome.write_text(json.dumps({**failed, "fatal": True}))
    assert "no disk" in str(job.exception())
    run.outcome.write_text(json.dumps({**failed, "suspect": "n1"}))
    assert not job.done(), "its successor tries other nodes"
    program(bin_folder, "squeue", "echo '91|FAILED|NonZeroExitCode'")
    wait_for(lambda: job.done(force_check=True))  # within a millisecond submitit looks once, however it is asked
    with pytest.raises(FailedJobError, match="no disk"):
        job.result()
    run.outcome.unlink()
    with pytest.raises(UncompletedJobError, match="no job any more and no outcome: job 91 ended as FAILED"):
        job.result()


def test_a_job_of_a_run_is_one_of_submitits(run: RunDir, bin_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It goes through submitit's own helpers, asyncio too, and through pickle to another process."""
    from relax_hpc.slurm.submission.run_job import RunJob

    program(bin_folder, "squeue", "echo '92|RUNNING|None'", "echo '93|PENDING|Dependency'")
    sbatch.record(run, "92", "leader")
    sbatch.record(run, "93", "leader", dependency="afterany:92")
    jobs = pickle.loads(pickle.dumps([RunJob(run.slurm, "92"), RunJob(run.slurm, "93")]))
    assert isinstance(jobs[0], submitit.Job) and [job.state for job in jobs] == ["RUNNING", "PENDING"]
    with pytest.raises(TimeoutError):
        list(submitit.helpers.as_completed(jobs, timeout=0.05, poll_frequency=0.1))
    ended = {"outcome": "done", "reason": "", "step": 2, "time": 1e11}
    threading.Timer(0.3, lambda: run.outcome.write_text(json.dumps(ended))).start()
    assert asyncio.run(jobs[0].awaitable().result(poll_interval=0.05)) == ended
    assert list(submitit.helpers.as_completed(jobs, poll_frequency=0.1)) == jobs
    submitit.helpers.monitor_jobs(jobs, poll_frequency=0.1, test_mode=True)
    assert "All jobs finished, jobs with indices [] failed" in capsys.readouterr().out
    assert jobs[0].stdout() is None
    (run.logs / "slurm" / "toy-trainer-92.out").write_text("step 1\n")
    assert jobs[0].stdout() == jobs[0].stderr() == "step 1\n"


def test_the_plain_function_can_be_sent_by_reference() -> None:
    assert pickle.loads(pickle.dumps(relax_hpc.run)) is relax_hpc.run


def test_sending_loads_neither_torch_nor_submitit() -> None:
    """A supervisor sends successors; the command line shows its help."""
    code = (
        "import relax_hpc.cli.submit, relax_hpc.slurm.submission.sbatch, relax_hpc.slurm.srun, relax_hpc.slurm.submission.make_run, sys\n"
        "print({'torch', 'submitit'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(relax_hpc.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "set()\n"
