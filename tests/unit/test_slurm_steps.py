"""What a leader makes of sruns that never start, and of heartbeats from nodes whose clocks differ. `srun` only sleeps here."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_hpc.files.publish import replace, to_json, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe import load_recipe
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.run import Supervision
from relax_hpc.slurm.rollout_jobs import BaseSteps
from relax_hpc.slurm.rollout_nodes import RolloutNodes
from relax_hpc.slurm.steps import RoleStep, Step, sidecar_steps, trainer_steps
from relax_hpc.supervise.heartbeat_monitor import HeartbeatMonitor
from relax_hpc.supervise.processes import end
from relax_hpc.supervise.restarts import RestartPolicy, Together
from relax_hpc.telemetry import Telemetry, read_metrics
from tests.runs import wait_for, write_recipe

HOURS = 3 * 3600.0


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`srun … python` that waits for ever, on nodes n1 and n2."""
    srun, scontrol = tmp_path / "srun", tmp_path / "scontrol"
    srun.write_text("#!/bin/sh\necho 'srun: error: n2: no answer'\nexec sleep 100\n")
    scontrol.write_text("#!/bin/sh\necho n1\necho n2\n")
    for path in (srun, scontrol):
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.delenv("SLURM_JOB_NODELIST_HET_GROUP_1", raising=False)
    return [str(srun), "python"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


def recipe(folder: Path, *sets: str) -> Recipe:
    both = ("trainer.processes=2", "trainer.nodes=2", "rollout.workers=2", "rollout.nodes=2")
    return load_recipe(write_recipe(folder), [*both, *sets])


def test_a_node_agent_that_srun_never_starts_ends_the_job_and_its_node_is_named(
    run: RunDir, tmp_path: Path, python: list[str]
) -> None:
    ours = recipe(tmp_path, "supervision.start_s=3.0", "supervision.node_agent_silent_s=60.0")
    base = BaseSteps(run, ours, python, Telemetry(run, "supervisor", 0))
    node_agents = RolloutNodes(run, ours, Telemetry(run, "supervisor", 0))
    try:
        base.look_after(node_agents)
        step = step_of(base, 0)
        agent_says(run, step.id, 0, "active")
        node_agents.read()
        base.look_after(node_agents)
        assert not base.failure, "it has time to start"
        wait_for(lambda: base.look_after(node_agents) or base.failure)
    finally:
        base.end(0)
    assert base.suspect == "n2"
    assert base.failure.startswith("rollout node 1 (n2): its node agent has not begun ")
    assert "supervision.start_s" in base.failure and "n2: no answer" in base.failure


def step_of(base: BaseSteps, node: int) -> Step:
    step = base.nodes[node].step
    assert step is not None
    return step


def agent_says(run: RunDir, step: str, index: int, state: str) -> None:
    about = {"time": time.time(), "state": state, "group": "base", "step": step, "index": index, "host": f"n{index + 1}", "claim_dirs": {}, "left": {}, "failure": ""}  # fmt: skip
    replace(run.heartbeats / f"node-agent-{step}-{index}.json", to_json(about))


@pytest.mark.parametrize("leads", [True, False])
def test_a_node_agent_that_leaves_in_order_is_not_silent_and_a_leader_wants_it_back(
    run: RunDir, tmp_path: Path, python: list[str], leads: bool
) -> None:
    ours = recipe(tmp_path, "supervision.node_agent_silent_s=0.3")
    voice = Telemetry(run, "supervisor", 0)
    base = BaseSteps(run, ours, python, voice, leader="7" if leads else None)
    node_agents = RolloutNodes(run, ours, voice)

    def look() -> int:
        node_agents.read()
        base.look_after(node_agents)
        return len(list(run.logs.glob("srun-node-agents.*.log")))

    try:
        look()
        step = step_of(base, 0).id
        agent_says(run, step, 0, "active")
        agent_says(run, step, 1, "gone")
        assert look() == 1
        if leads:
            wait_for(lambda: agent_says(run, step, 0, "active") or look() == 2, 30)
        lost = [r for r in read_metrics(run.metrics / "supervisor.jsonl")[0] if r["kind"] == "lost"]
        assert [(r["role"], r["reason"]) for r in lost] == (
            [("rollout node 1 (n2)", "its node agent left, and the run goes on")] if leads else []
        )
    finally:
        base.end(0)


def test_a_rollout_job_ends_when_all_its_node_agents_left_though_one_of_them_was_a_second_one(
    run: RunDir, tmp_path: Path, python: list[str]
) -> None:
    ours = recipe(tmp_path, "supervision.node_agent_silent_s=0.3")
    voice = Telemetry(run, "supervisor", 0)
    base, node_agents = BaseSteps(run, ours, python, voice), RolloutNodes(run, ours, voice)
    try:
        base.look_after(node_agents)
        first = step_of(base, 0)
        agent_says(run, first.id, 1, "active")  # and nothing more: it was killed
        wait_for(
            lambda: (
                agent_says(run, first.id, 0, "active")
                or base.look_after(node_agents.read())
                or base.nodes[1].step not in (None, first)
            )
        )
        agent_says(run, first.id, 0, "gone")
        base.look_after(node_agents.read())
        assert not base.left
        agent_says(run, step_of(base, 1).id, 1, "gone")
        end(first.processes[0], (signal.SIGTERM, 10.0))  # with the exit code of its lost task
        base.look_after(node_agents.read())
        assert first.code != 0 and base.left
    finally:
        base.end(0)


def test_a_leader_notices_that_its_rollout_component_ended(run: RunDir, tmp_path: Path, python: list[str]) -> None:
    squeue = Path(python[0]).with_name("squeue")
    squeue.write_text("#!/bin/sh\necho '7+0|RUNNING|None'\necho '7+1|RUNNING|None'\n")
    squeue.chmod(0o755)
    het = recipe(tmp_path, "slurm.shape=het")
    base = BaseSteps(run, het, python, Telemetry(run, "supervisor", 0), leader="7")
    base.keep_jobs()
    assert not base.failure
    squeue.write_text(squeue.read_text().replace("7+1|RUNNING", "7+1|CANCELLED"))
    base.keep_jobs()
    assert "rollout component of this job ended (7+1 CANCELLED)" in base.failure and not base.suspect


@pytest.fixture
def trainers(run: RunDir, tmp_path: Path, python: list[str]) -> Iterator[RoleStep]:
    started = trainer_steps(run, recipe(tmp_path, "supervision.start_s=1.0", "supervision.hang_s=1.5"), python, None)
    started.start("--incarnation", str(tmp_path))
    yield started
    started.stop(0)


def heartbeats(run: RunDir, rank: int, clock: float) -> None:
    about = {"attempt": 0, "host": f"n{rank + 1}", "state": "training", "time": clock}
    replace(run.heartbeats / f"trainer-{rank}.json", to_json(about))


@pytest.mark.parametrize("off", [-HOURS, 0.0, HOURS])
def test_a_rank_is_silent_when_its_heartbeat_stands_still_whatever_its_clock_says(
    run: RunDir, trainers: RoleStep, off: float
) -> None:
    for _ in range(6):
        for rank in range(2):
            heartbeats(run, rank, time.time() + off)
        assert trainers.poll() is None
        time.sleep(0.1)
    ended = wait_for(lambda: heartbeats(run, 0, time.time() + off) or trainers.poll())
    assert ended.host == "n2" and ended.reason.startswith("trainer rank 1 on n2: no heartbeat for ")


def test_a_rank_that_srun_never_starts_is_named_with_its_node(run: RunDir, trainers: RoleStep) -> None:
    began = time.monotonic()
    ended = wait_for(lambda: heartbeats(run, 0, time.time()) or trainers.poll())
    assert time.monotonic() - began > 0.9
    assert ended.reason.startswith("trainer rank 1 on n2, which has not begun: no heartbeat for ")


@pytest.mark.parametrize("state", ["training", "done"])
def test_only_a_trainer_that_says_so_is_done(run: RunDir, tmp_path: Path, python: list[str], state: str) -> None:
    Path(python[0]).write_text("#!/bin/sh\nexit 0\n")  # as it ends when Slurm kills its tasks for a lost node
    trainers = trainer_steps(run, recipe(tmp_path), python, None)
    trainers.start("--incarnation", str(tmp_path))
    replace(
        run.heartbeats / "trainer-0.json", to_json({"attempt": 0, "host": "n1", "state": state, "time": time.time()})
    )
    ended = wait_for(trainers.poll)
    assert ended is not None and ended.outcome == ("done" if state == "done" else None)


def test_a_look_that_stood_still_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monitor = HeartbeatMonitor()
    assert monitor.look({0: 1.0}) == {0: 0.0}
    now = 102.0
    assert monitor.look({0: 1.0}) == {0: 2.0}
    now = 700.0
    assert monitor.look({0: 1.0}) == {0: 2.0}
    now = 701.0
    assert monitor.look({0: 1.0}) == {0: 3.0}


def test_work_that_is_lost_again_each_time_is_no_progress() -> None:
    restart_policy = RestartPolicy(Supervision(max_restarts=3, backoff_s=1e-6))
    assert [restart_policy.failed(step) for step in (12, 14, 11, 13, 12)] == [True, True, True, True, False]
    assert restart_policy.failed(15) and not all(restart_policy.failed(None) for _ in range(3))


def test_a_scorer_that_ends_is_started_again_alone_and_one_that_a_person_must_mend_ends_the_run(
    run: RunDir, tmp_path: Path, python: list[str]
) -> None:
    write_file(run.identity, to_json({"debug": None}))
    sets = ("algorithm.kl_coef=0.1", "scorer={scores=['reference'], processes=2}", "supervision.max_restarts=1")
    said: list[tuple[str, str]] = []
    kept = sidecar_steps(
        run, recipe(tmp_path, *sets), "scorer", python, lambda kind, **about: said.append((kind, about["role"]))
    )
    scorers, steps = Together(kept), [scorer.group for scorer in kept]

    def srun(rank: int) -> subprocess.Popen[bytes]:
        process = steps[rank].processes[0]
        assert isinstance(process, subprocess.Popen)
        return process

    def kill(rank: int) -> None:
        srun(rank).kill()
        srun(rank).wait()
        wait_for(lambda: scorers.look_after() or kept[rank].failure or steps[rank].started)

    try:
        scorers.look_after()
        assert said == [("restart", "scorer-0"), ("restart", "scorer-1")] and all(step.running for step in steps)
        assert [next(w for w in srun(rank).args if "nodelist" in w) for rank in range(2)] == [  # type: ignore[union-attr]
            "--nodelist=n1",
            "--nodelist=n2",
        ]
        kill(1)
        assert said[2:] == [("lost", "scorer-1"), ("restart", "scorer-1")] and steps[1].running and steps[0].running
        kill(1)
        assert "scorer-1 was lost 2 times without progress" in kept[1].failure and not kept[1].fatal
        heartbeat = {
            "attempt": 0,
            "time": time.time(),
            "state": "failed",
            "host": "n1",
            "error": "no model can be loaded",
        }
        replace(run.heartbeats / "scorer-0.json", to_json(heartbeat))
        kill(0)
        assert kept[0].fatal and kept[0].failure == "scorer-0 on n1: no model can be loaded"
        assert scorers.failed is kept[0]
    finally:
        scorers.end(0)
