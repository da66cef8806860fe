"""What runs inside Slurm jobs, and the view, over a file system that fails: whatever call goes wrong, all of it goes on. Slurm's commands are
small scripts here, as are the roles."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from relax_hpc.files.publish import read_json, replace, to_json, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.live_view import line, live
from relax_hpc.monitor.status import Status
from relax_hpc.recipe import dump_recipe, load_recipe
from relax_hpc.slurm import batch, node_agent, rollout_jobs
from relax_hpc.slurm.elastic import set_desired_size
from relax_hpc.slurm.submission.sbatch import read_leaders
from relax_hpc.supervise import io_retry, supervisor
from relax_hpc.supervise.io_retry import IoTrouble, at_first
from relax_hpc.supervise.lease import acquire
from relax_hpc.supervise.supervisor import outcome_of
from relax_hpc.telemetry import Telemetry
from tests.programs import program
from tests.runs import write_recipe
from tools.faults.calls import Faults, inject

KINDS = (("before", errno.EIO), ("before", errno.ESTALE), ("lost", errno.EIO), ("again", errno.ESTALE))
SETS = (
    "slurm.shape=split", "slurm.time=60", "slurm.ask_every_s=0.001", "supervision.backoff_s=0.0001", "run.steps=1", "rollout.workers=1",
    "supervision.max_restarts=3",
)  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The folder of Slurm's commands."""
    for module, name in ((io_retry, "FIRST_PAUSE_S"), (io_retry, "LONGEST_PAUSE_S"), (supervisor, "POLL_S"), (supervisor, "LEASE_LOOK_S"),
                         (node_agent, "POLL_S"), (batch, "LOOK_S"), (rollout_jobs, "LOOK_S"), (rollout_jobs, "BY_HAND_S")):  # fmt: skip
        monkeypatch.setattr(module, name, 1e-3)
    monkeypatch.setattr(node_agent, "LOOK_S", 0.02)  # its workers are looked at in between
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", f"{commands}:/bin:/usr/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    yield commands


def prepared(root: Path, folder: Path, *sets: str) -> RunDir:
    run = RunDir(root)
    run.create()
    (run.slurm / "jobs").mkdir(parents=True)
    (run.logs / "slurm").mkdir()
    write_file(run.identity, to_json({"id": root.name, "debug": None, "shards_from": None}))
    write_file(run.recipe, dump_recipe(load_recipe(write_recipe(folder), [*SETS, *sets])).encode())
    for kind in ("leader", "rollout", "elastic"):
        write_file(run.slurm / f"{kind}.sbatch", b"#!/bin/sh\n")
    return run


def each_call(tmp_path: Path, scenario: Callable[[Path, Faults], None], every: int = 1) -> int:
    """Run `scenario` with one call below tmp_path/runs that goes wrong, the first, the second, …; how many there are. It gets a name for a run.
    every: leave out the calls between."""
    root, number = tmp_path / "runs", 0
    root.mkdir(exist_ok=True)
    while True:
        number += every
        how, error = KINDS[number % len(KINDS)]
        with pytest.MonkeyPatch.context() as patch:
            faults = inject(patch, root)
            faults.fail(number, how, error)
            try:
                scenario(root / f"run{number}", faults)
            except BaseException as failure:
                raise AssertionError(f"call {number}, {faults.hit}: {how} {errno.errorcode[error]}") from failure
        if not faults.hit:
            return number


TRAINER = """
case "$*" in *trainer*) ;; *) exec sleep 60;; esac
for i in $(seq 3000); do [ "$(wc -l <{sent})" -ge {jobs} ] && break; sleep 0.01; done
mkdir -p {root}/checkpoints/step-00000001; touch {root}/checkpoints/step-00000001/DONE
echo '{{"role": "trainer-0", "attempt": 0, "state": "done", "step": 1, "time": 1, "pid": 1, "host": "n"}}' >{root}/heartbeats/trainer-0.json
"""


def led_before(run: RunDir) -> None:
    """The job's first start, which a lost node ended: its lease is there."""
    path = acquire(run).folder / "holder.json"
    replace(path, to_json({**read_json(path), "host": "lost"}))


@pytest.mark.parametrize(
    ("sets", "starts", "wanted", "every"),
    [
        (["slurm.shape=het"], 1, ["elastic", "leader"], 9),
        (["slurm.shape=split", "slurm.restart=requeue"], 2, ["elastic", "rollout"], 9),
    ],
    ids=["het", "requeued"],
)
def test_a_leader_goes_on_whatever_call_fails_and_sends_each_job_once(
    tmp_path: Path,
    quick: Path,
    monkeypatch: pytest.MonkeyPatch,
    sets: list[str],
    starts: int,
    wanted: list[str],
    every: int,
) -> None:
    def scenario(root: Path, faults: Faults) -> None:
        sent = tmp_path / f"{root.name}.sent"
        with faults.spared():
            run = prepared(root, tmp_path, *sets)
            set_desired_size(run, 1, 2, None, "me")
            monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
            if starts > 1:
                led_before(run)
                monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        sent.touch()
        program(quick, "srun", TRAINER.format(sent=sent, root=run.root, jobs=len(wanted)))
        count = f"echo $((10 + $(wc -l <{sent})))"
        program(quick, "sbatch", f"exec 9>{sent}.lock", "flock 9", f'echo "$*" >>{sent}', count)
        program(quick, "squeue", *(f"echo '{job}|RUNNING|None'" for job in (7, 11, 12, 13, 14, 15)))
        program(quick, "scancel", "exit 0")
        program(quick, "scontrol", "exit 1")
        monkeypatch.setattr("sys.argv", ["batch", "leader", str(run.root)])
        with pytest.raises(SystemExit) as ended:
            batch.main()
        assert ended.value.code == 0
        with faults.spared():
            kinds = sorted(line.rpartition("/")[2].strip() for line in sent.read_text().splitlines())
            assert kinds == [f"{kind}.sbatch" for kind in wanted], "each is sent once"
            assert [leader["job"] for leader in read_leaders(run)] == ["7"]
            assert (outcome_of(run) or {})["outcome"] == "done"
            assert not [name for name in os.listdir(run.lease) if not name.endswith(".gone")], "the lease is given up"

    assert each_call(tmp_path, scenario, every) > 80


@pytest.mark.parametrize("terminal", [True, False])
def test_the_view_shows_the_same_after_whatever_call_failed(
    tmp_path: Path, quick: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    program(quick, "squeue", "echo '7|RUNNING|None'")
    (tmp_path / "runs").mkdir()
    run = prepared(tmp_path / "runs" / "run", tmp_path)
    voice = Telemetry(run, "supervisor", 0)
    voice.metrics("lost", role="rollout-0", reason="killed")
    Telemetry(run, "rollout-0", 0).heartbeat("idle", requests=0)
    Telemetry(run, "chain", 0).metrics("refused", role="successor", reason="no")
    shown = set[str]()

    def scenario(root: Path, faults: Faults) -> None:
        with faults.spared():
            seen = Status(run, load_recipe(run.recipe))
        with live(run, Console(file=io.StringIO(), force_terminal=terminal), seen) as look:
            look()
        with live(run, Console(file=io.StringIO()), seen) as look:
            look()
        shown.add(json.dumps([line(seen), seen.restarts, seen.state, sorted(seen.heartbeats)]))

    assert each_call(tmp_path, scenario) > 10
    assert len(shown) == 1


def test_a_warning_that_comes_before_the_lease_is_not_lost(
    tmp_path: Path, quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is told to leave while it waits for a holder on another machine leaves, and has the run go on."""
    run, sent = prepared(tmp_path / "run", tmp_path), tmp_path / "sent"
    program(quick, "squeue", "echo '7|RUNNING|None'", "echo '6|RUNNING|None'")
    program(quick, "sbatch", f"echo $* >>{sent}; echo 11")
    held = acquire(run)
    real = batch.acquire
    monkeypatch.setattr(batch, "acquire", lambda *given: (os.kill(os.getpid(), signal.SIGUSR2), real(*given))[1])
    assert batch.lead(run) == batch.EXIT_CODES["preempted"]
    assert held.renew(), "the holder keeps it"
    assert "--dependency=afterany:7" in sent.read_text()


def test_a_warning_while_a_holder_on_another_machine_is_watched_ends_the_watch(tmp_path: Path, quick: Path) -> None:
    run, sent = prepared(tmp_path / "run", tmp_path), tmp_path / "sent"
    program(quick, "squeue", "echo '7|RUNNING|None'")
    program(quick, "sbatch", f"echo $* >>{sent}; echo 11")
    held = acquire(run)
    holder = held.folder / "holder.json"
    replace(holder, to_json({**read_json(holder), "host": "elsewhere", "job": None}))
    sent_at = list[float]()
    warn = lambda: (sent_at.append(time.monotonic()), os.kill(os.getpid(), signal.SIGUSR2))
    warning = threading.Timer(2.0, warn)
    warning.start()
    assert batch.lead(run) == batch.EXIT_CODES["preempted"]
    warning.join()
    assert time.monotonic() - sent_at[0] < 10, "the watch would have gone on for a minute"
    assert held.renew() and os.listdir(run.lease) == ["000001"], "the holder keeps it"
    assert "--dependency=afterany:7" in sent.read_text()


def test_a_warning_that_comes_before_the_supervisor_listens_stops_the_run_in_order(
    tmp_path: Path, quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepared(tmp_path / "run", tmp_path)
    program(quick, "squeue", "echo '7|RUNNING|None'", "echo '11|PENDING|Dependency'")
    program(quick, "sbatch", "echo 11")
    program(quick, "scontrol", "exit 1")
    real = batch.groups
    monkeypatch.setattr(batch, "groups", lambda *given: (os.kill(os.getpid(), signal.SIGUSR2), real(*given))[1])
    assert batch.lead(run) == batch.EXIT_CODES["preempted"]
    assert (outcome_of(run) or {})["outcome"] == "preempted"
    assert not list(run.logs.glob("srun-*")), "nothing was started"


def test_what_waits_for_its_next_attempt_fails_at_once_when_it_is_ended(tmp_path: Path) -> None:
    retry = at_first(RunDir(tmp_path))

    def fails() -> None:
        retry.end()
        raise OSError(errno.EIO, "Input/output error")

    began = time.monotonic()
    with pytest.raises(IoTrouble):
        retry(fails)
    assert time.monotonic() - began < 60
