"""Lives of supervisors: each runs the real one from its start to its end, with roles and Slurm's commands that are
scripts, and asserts that its duty is done.

    local       takes over from a dead holder ► roles start, each is lost once ► done
    drained     the same, told to end after the first loss ► stopped
    overtaken   another supervisor takes its lease ► it leaves, and writes nothing
    node_agent  a worker is lost on a request ► the run is over ► it leaves
    leader      a split run: sends rollout jobs, an elastic one and its successor, each once ► done
    rollout_job starts a node agent, which leaves
"""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from rich.console import Console

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json, replace, to_json, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch.create import Opened
from relax_hpc.recipe import dump_recipe, load_recipe
from relax_hpc.recipe.schema import Recipe
from relax_hpc.slurm import batch, node_agent, rollout_jobs
from relax_hpc.slurm.elastic import set_desired_size
from relax_hpc.slurm.submission.sbatch import jobs, read_leaders
from relax_hpc.spool.queue import RequestQueue
from relax_hpc.spool.request import Request
from relax_hpc.supervise import io_retry, lease, supervisor, tracker
from relax_hpc.supervise.lease import acquire
from relax_hpc.supervise.local import run_here
from relax_hpc.supervise.supervisor import outcome_of
from relax_hpc.telemetry import Telemetry, read_heartbeat, read_metrics
from tools.bench.common import ROOT
from tools.faults.calls import Faults
from tools.faults.roles import Node, Script, Stage

SETS = ("run.steps=1", "rollout.workers=1", "supervision.backoff_s=0.0001", "supervision.max_restarts=3")
SCORED = ("algorithm.kl_coef=0.01", "scorer.scores=['reference']", "tracking=[{name='tensorboard'}]")
SPLIT = ("slurm.shape=split", "slurm.time=60", "slurm.ask_every_s=0.001")
PAUSES: Mapping[Any, Mapping[str, float]] = MappingProxyType({
    io_retry: {"FIRST_PAUSE_S": 1e-4, "LONGEST_PAUSE_S": 1e-3},
    supervisor: {"POLL_S": 1e-4, "LEASE_LOOK_S": 1e-3},
    lease: {"OLD_S": 0.01, "LOOK_S": 1e-3},
    node_agent: {"POLL_S": 1e-3, "LOOK_S": 0.02},
    batch: {"LOOK_S": 1e-3},
    rollout_jobs: {"LOOK_S": 1e-3, "BY_HAND_S": 1e-3},
})  # fmt: skip
"""Module -> its pauses, and what they are in a life of milliseconds."""
SLURM_VARIABLES = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_END_TIME", "SLURM_RESTART_COUNT")  # fmt: skip
TRAINER = """
case "$*" in *trainer*) ;; *) exec sleep 60;; esac
for i in $(seq 3000); do [ "$(wc -l <{sent})" -ge 3 ] && break; sleep 0.01; done
mkdir -p {root}/checkpoints/step-00000001; touch {root}/checkpoints/step-00000001/DONE
echo '{{"role": "trainer-0", "attempt": 0, "state": "done", "step": 1, "time": 1, "pid": 1, "host": "n"}}' >{root}/heartbeats/trainer-0.json
"""
Life = Callable[[Path, Faults, pytest.MonkeyPatch], None]


def hasten(patch: pytest.MonkeyPatch) -> None:
    """Shorten all pauses."""
    for module, pauses in PAUSES.items():
        for name, seconds in pauses.items():
            patch.setattr(module, name, seconds)


def prepared(root: Path, *sets: str) -> RunDir:
    """Make a run with two open requests."""
    run = RunDir(root)
    run.create()
    (run.slurm / "jobs").mkdir(parents=True)
    (run.logs / "slurm").mkdir()
    write_file(run.identity, to_json({"id": root.name, "debug": None, "shards_from": None}))
    write_file(run.recipe, dump_recipe(load_recipe(ROOT / "tools/bench/chaos.toml", [*SETS, *sets])).encode())
    RequestQueue(run).put([Request(f"r000000-00{k}", ((0, k),), 4, k, 0) for k in range(2)])
    return run


def left_behind(run: RunDir) -> None:
    """Leave what a supervisor on a node that is gone leaves: its lease with an incarnation, and a claim of its worker."""
    held = acquire(run)
    held.new_incarnation()
    holder = held.folder / "holder.json"
    replace(holder, to_json({**read_json(holder), "host": "lost", "job": None}))
    os.utime(holder, (0, 0))
    queue = RequestQueue(run)
    queue.open_claim_dir("rollout-0-before")
    assert queue.claim("rollout-0-before", 0) is not None


def supervised(
    stage: type[Stage], root: Path, faults: Faults, patch: pytest.MonkeyPatch
) -> tuple[RunDir, Stage, Callable[[], dict[str, Any]]]:
    """A run that somebody left behind, its roles, and the call that supervises it."""
    with faults.spared():
        run = prepared(root, *SCORED, f"spool.node_cache={root / 'node'}")
        left_behind(run)
        recipe: Recipe = load_recipe(run.recipe)
    roles = stage(run, faults)
    patch.setattr(tracker, "start_logged", lambda *given: Script(lambda: None, faults.spared))
    return run, roles, lambda: run_here(Opened(run, recipe, roles), Console(file=io.StringIO()))


def local(root: Path, faults: Faults, patch: pytest.MonkeyPatch) -> None:
    run, stage, supervise = supervised(Stage, root, faults, patch)
    outcome = supervise()
    with faults.spared():
        assert (outcome["outcome"], outcome["step"]) == ("done", 6), outcome
        given_up(run, stage, outcome)
        roles = {"trainer-0", "rollout-0", "scorer-0"}
        assert {(name, attempt) for name in roles for attempt in (0, 1)} <= set(stage.spawned), "all are started again"
        lost = [r["role"] for r in read_metrics(run.metrics / "supervisor.jsonl")[0] if r["kind"] == "lost"]
        assert len(lost) == len(set(lost)), "each loss is noted once at the most"


def given_up(run: RunDir, stage: Stage, outcome: dict[str, Any]) -> None:
    """Check what every end leaves: the outcome, no claim, no lease, and nothing to commit through for who held it before."""
    assert not list(run.lease.glob("*.over")), "a client may have that folder in a cache"
    assert read_json(run.outcome) == outcome
    assert set(RequestQueue(run).in_progress()) == {"r000000-000", "r000000-001"} and stage.claimed() == []
    assert not [name for name in os.listdir(run.lease) if not name.endswith(".gone")], "the lease is given up"


def drained(root: Path, faults: Faults, patch: pytest.MonkeyPatch) -> None:
    class Told(Stage):
        def train(self, voice: Telemetry, folder: Path) -> int | None:
            signal.raise_signal(signal.SIGTERM)
            return super().train(voice, folder)

    run, stage, supervise = supervised(Told, root, faults, patch)
    outcome = supervise()
    with faults.spared():
        assert (outcome["outcome"], outcome["step"]) == ("stopped", 3), outcome
        given_up(run, stage, outcome)
        assert ("trainer-0", 1) not in stage.spawned, "nothing is started after it was told to end"


def overtaken(root: Path, faults: Faults, patch: pytest.MonkeyPatch) -> None:
    class Overtaken(Stage):
        def train(self, voice: Telemetry, folder: Path) -> int | None:
            os.rename(folder.parent, folder.parent.with_name(f"{folder.parent.name}.x.over"))
            return -signal.SIGKILL

    run, stage, supervise = supervised(Overtaken, root, faults, patch)
    try:
        outcome = supervise()
    except RunError as error:
        with faults.spared():
            assert "another supervisor has taken over" in str(error), error
            assert not run.outcome.exists() and ("trainer-0", 1) not in stage.spawned
        return
    raise AssertionError(f"it went on: {outcome}")


def at_work(root: Path, faults: Faults, patch: pytest.MonkeyPatch) -> RunDir:
    """A split run as job 7 of a cluster whose commands are empty."""
    with faults.spared():
        run = prepared(root, *SPLIT)
    (commands := root.with_suffix(".bin")).mkdir()
    patch.setenv("PATH", f"{commands}:/bin:/usr/bin")
    patch.setenv("SLURM_JOB_ID", "7")
    for name in SLURM_VARIABLES:
        patch.delenv(name, raising=False)
    return run


def command(run: RunDir, name: str, *lines: str) -> None:
    """Write one of Slurm's commands."""
    path = run.root.with_suffix(".bin") / name
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)


def job(patch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run a job's script to its end."""
    patch.setattr("sys.argv", ["batch", *arguments])
    try:
        batch.main()
    except SystemExit as ended:
        assert ended.code == 0, f"exit code {ended.code}"


def node_agent_of(root: Path, faults: Faults, patch: pytest.MonkeyPatch) -> None:
    run = at_work(root, faults, patch)
    patch.setattr(node_agent, "ForkServer", partial(Node, faults=faults))
    patch.setattr("sys.argv", ["agent", str(run.root), "--group=base", "--step=s", "--index=0", "--workers=1"])
    node_agent.main()
    with faults.spared():
        heartbeat = read_heartbeat(run, "node-agent-s-0") or {}
        assert heartbeat["state"] == "gone" or "/heartbeats/" in faults.hit, "it says that it left"
        assert list(heartbeat["left"].values())[0] is True, "its request is to be given back, and counts"
        events = [r["kind"] for r in read_metrics(run.metrics / "node-agent-s-0.jsonl")[0] if "role" in r]
        assert events.count("lost") <= 1 and events.count("restart") <= 2
        assert read_json(run.slurm / "places" / "base-0.json") == {"step": "s"}
        assert read_json(run.outcome) == {"outcome": "done"}, "the second worker was started"


def leader(root: Path, faults: Faults, patch: pytest.MonkeyPatch) -> None:
    run, sent = at_work(root, faults, patch), root.with_suffix(".sent")
    with faults.spared():
        for kind in ("leader", "rollout", "elastic"):
            write_file(run.slurm / f"{kind}.sbatch", b"#!/bin/sh\n")
        set_desired_size(run, 1, 2, None, "me")
        sent.touch()
    command(run, "srun", TRAINER.format(sent=sent, root=run.root))
    count = f"echo $((10 + $(wc -l <{sent})))"
    command(run, "sbatch", f"exec 9>{sent}.lock", "flock 9", f'echo "$*" >>{sent}', count)
    command(run, "squeue", *(f"echo '{number}|RUNNING|None'" for number in (7, 11, 12, 13, 14, 15)))
    command(run, "scancel", "exit 0")
    command(run, "scontrol", "exit 1")
    job(patch, "leader", str(run.root))
    with faults.spared():
        kinds = sorted(line.rpartition("/")[2].strip() for line in sent.read_text().splitlines())
        assert kinds == ["elastic.sbatch", "leader.sbatch", "rollout.sbatch"], "each is sent once"
        assert [line["job"] for line in read_leaders(run)] == ["7"]
        assert (outcome_of(run) or {})["outcome"] == "done"
        assert not [name for name in os.listdir(run.lease) if not name.endswith(".gone")], "the lease is given up"


def rollout_job(root: Path, faults: Faults, patch: pytest.MonkeyPatch) -> None:
    run = at_work(root, faults, patch)
    command(run, "srun", "exit 0")
    command(run, "squeue", "echo '7|RUNNING|None'")
    job(patch, "rollout", str(run.root))
    with faults.spared():
        assert [(found["id"], found["kind"]) for found in jobs(run)] == [("7", "rollout")]


LIVES: Mapping[str, Life] = MappingProxyType({
    "local": local, "drained": drained, "overtaken": overtaken,
    "node_agent": node_agent_of, "leader": leader, "rollout_job": rollout_job,
})  # fmt: skip
