"""What the leader makes of the node agents' heartbeats, of desired sizes, and of the trainer's waiting; Slurm itself is not asked here."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import replace, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe import dump_recipe, load_recipe
from relax_hpc.recipe.schema import Recipe
from relax_hpc.slurm import client, elastic, job_registry, node_agent, rollout_jobs
from relax_hpc.slurm import rollout_nodes as nodes_module
from relax_hpc.slurm.elastic import Autoscaler, Elastic, clear_desired_size, desired_size, set_desired_size
from relax_hpc.slurm.job_registry import JobRegistry
from relax_hpc.slurm.plan import Kind
from relax_hpc.slurm.rollout_jobs import BaseJobs, RolloutJobs
from relax_hpc.slurm.rollout_nodes import RolloutNodes
from relax_hpc.slurm.submission import refusals
from relax_hpc.slurm.submission.sbatch import ended_by_us, record
from relax_hpc.spool.queue import RequestFile, RequestQueue
from relax_hpc.spool.request import Request
from relax_hpc.supervise.io_retry import at_first
from relax_hpc.telemetry import Telemetry, read_heartbeat, read_metrics
from tests.runs import wait_for, write_recipe

LIMIT_S = 0.2


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    sets = [f"supervision.node_agent_silent_s={LIMIT_S}", "slurm.time=60", "slurm.autoscale.max_nodes=3"]
    sets += ["slurm.autoscale.cooldown_s=0.01", "slurm.autoscale.window_s=100.0", "async.max_staleness=1"]
    return load_recipe(write_recipe(tmp_path), sets)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    run.slurm.mkdir()
    return run


def telemetry(run: RunDir) -> Telemetry:
    return Telemetry(run, "supervisor", 0)


def claimed(run: RunDir, claim_dir: str) -> None:
    """A worker in `claim_dir` generates a request."""
    queue = RequestQueue(run)
    queue.put([Request("r000000-000", ((0, 0),), 4, 1, 0)])
    queue.open_claim_dir(claim_dir)
    assert queue.claim(claim_dir, 0) is not None


def says(run: RunDir, name: str, **about: Any) -> None:
    heartbeat = {"role": name, "pid": 1, "host": "r1", "time": time.time(), "state": "active", "group": "base", "index": 0,
            "job": "7", "claim_dirs": {}, "left": {}, "failure": "", "fatal": False, **about}  # fmt: skip
    replace(run.heartbeats / f"{name}.json", to_json(heartbeat), durable=False)


def open_attempts(run: RunDir) -> list[int]:
    return [RequestFile.parse(path.name).attempt for path in run.open_requests.glob("[!.]*")]


def test_a_worker_that_its_node_agent_speaks_of_keeps_its_request(run: RunDir, recipe: Recipe) -> None:
    claimed(run, "w")
    node_agents = RolloutNodes(run, recipe, telemetry(run))
    for _ in range(5):
        says(run, "node-agent-a", claim_dirs={"w": "rollout-0"})
        node_agents.look()
        time.sleep(LIMIT_S / 2)
    assert open_attempts(run) == [] and node_agents.alive() == ["node-agent-a"]


@pytest.mark.parametrize("lost", [True, False])
def test_a_request_whose_worker_ended_is_open_at_once_and_counts_when_it_died_on_it(
    run: RunDir, recipe: Recipe, lost: bool
) -> None:
    claimed(run, "w")
    says(run, "node-agent-a", left={"w": lost})
    RolloutNodes(run, recipe, telemetry(run)).look()
    assert open_attempts(run) == [int(lost)]


def test_a_node_agent_that_falls_silent_loses_its_requests_and_they_do_not_count(run: RunDir, recipe: Recipe) -> None:
    claimed(run, "w")
    says(run, "node-agent-a", claim_dirs={"w": "rollout-0"})
    node_agents = RolloutNodes(run, recipe, telemetry(run))
    node_agents.look()
    assert open_attempts(run) == []
    wait_for(lambda: node_agents.look() or open_attempts(run))
    assert open_attempts(run) == [0]


def test_a_look_that_stood_still_blames_nobody(run: RunDir, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_hpc.supervise.heartbeat_monitor.BLIND_S", LIMIT_S / 2)
    claimed(run, "w")
    says(run, "node-agent-a", claim_dirs={"w": "rollout-0"})
    node_agents = RolloutNodes(run, recipe, telemetry(run))
    node_agents.look()
    time.sleep(1.5 * LIMIT_S)  # the file system, or we
    node_agents.look()
    assert open_attempts(run) == [] and node_agents.alive() == ["node-agent-a"]


def test_a_job_that_slurm_knows_is_gone_is_not_waited_for(run: RunDir, recipe: Recipe) -> None:
    claimed(run, "w")
    says(run, "node-agent-a", claim_dirs={"w": "rollout-0"})
    node_agents = RolloutNodes(run, recipe, telemetry(run))
    node_agents.look()
    node_agents.job_ended("7")
    node_agents.look()
    assert open_attempts(run) == [0]


def test_a_claim_dir_that_no_node_agent_speaks_of_has_a_moment(run: RunDir, recipe: Recipe) -> None:
    claimed(run, "w")
    node_agents = RolloutNodes(run, recipe, telemetry(run))
    node_agents.look()
    assert open_attempts(run) == [], "its node agent may not have said so yet"
    time.sleep(1.5 * LIMIT_S)
    node_agents.look()
    assert open_attempts(run) == [0]


def test_failures_are_told_once_and_old_ones_never(run: RunDir, recipe: Recipe) -> None:
    says(run, "node-agent-old", failure="long ago")
    node_agents = RolloutNodes(run, recipe, telemetry(run))
    node_agents.look()
    assert node_agents.failed() == []
    says(run, "node-agent-new", failure="workers die")
    says(run, "node-agent-elastic", failure="not of the base", group="job9")
    node_agents.look()
    assert [heartbeat["failure"] for heartbeat in node_agents.failed()] == ["workers die"]
    assert node_agents.failed() == []


def test_a_node_agent_does_not_wait_for_slurm_when_it_ends_a_leader_that_is_lost(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = ["slurm.time=60", "supervision.leader_silent_s=0.1"]
    run.recipe.write_bytes(dump_recipe(load_recipe(write_recipe(tmp_path), sets)).encode())
    (run.lease / "000001").mkdir()
    replace(run.lease / "000001" / "holder.json", to_json({"job": "7", "host": "elsewhere"}))
    record(run, "7", "leader")
    record(run, "8", "leader", dependency="afterany:7")
    asked, answers, answered, ended = (tmp_path / name for name in ("asked", "answers", "answered", "ended"))
    programs = {
        "squeue": f"touch {asked}; for i in $(seq 100); do [ -e {answers} ] && break; sleep 0.05; done; touch {answered}; echo '8|PENDING|Dependency'",
        "scancel": f"echo $* >>{ended}",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(node_agent, "ASK_S", 0.05)
    ours = node_agent.NodeAgent(run, {"step": "s", "index": 0, "group": "base", "job": "9"}, [])
    wait_for(lambda: ours.over() or asked.exists())
    assert not ours.over() and not answered.exists(), "it waited for squeue"
    answers.touch()
    wait_for(lambda: ours.over() or ended.exists())
    wait_for(lambda: ours.over() or ours._ended_leader)
    assert ended.read_text() == "--quiet 7\n" and ended_by_us(run, "7")


def test_desired_sizes_are_declarative_and_protect_the_base(run: RunDir) -> None:
    set_desired_size(run, 2, 4, "low", "me")
    first = desired_size(run)
    set_desired_size(run, 2, 4, "low", "somebody else")
    assert desired_size(run) == first and first is not None and first.rollout == 4
    with pytest.raises(RunError, match="protected"):
        set_desired_size(run, 2, 1, None, "me")
    clear_desired_size(run, 2)
    found = desired_size(run)
    assert found is not None and found.rollout == 2


def test_what_is_missing_is_sent_and_what_is_too_much_drains_the_waiting_ones_first(
    run: RunDir, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: dict[str, str] = {}
    asked: list[list[str]] = []
    cancelled: list[str] = []

    def send(run: RunDir, kind: Kind, options: list[str]) -> str:
        assert kind == "elastic" and options == ["--partition=low"]
        states[str(100 + len(states))] = "RUNNING"
        record(run, list(states)[-1], kind)
        return list(states)[-1]

    looked: list[list[str]] = []

    def job_state(ids: list[str]) -> dict[str, str]:
        looked.append(ids)
        return {i: states[i] for i in ids}

    monkeypatch.setattr(refusals, "submit_script", send)
    monkeypatch.setattr(job_registry, "job_state", job_state)

    def ask(command: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(elastic, "ask", ask)
    monkeypatch.setattr(elastic, "cancel", lambda ids: cancelled.extend(ids))
    registry = JobRegistry(run)
    fixed = recipe.model_copy(update={"slurm": recipe.slurm.model_copy(update={"autoscale": None})})  # type: ignore[union-attr]
    nodes = Elastic(run, fixed, telemetry(run), registry)

    def keep() -> list[str]:
        registry.look()
        return nodes.keep()

    keep()
    assert states == {}
    set_desired_size(run, 1, 4, "low", "me")
    keep()
    keep()
    assert list(states) == ["100", "101", "102"]
    states["100"] = "PENDING"
    set_desired_size(run, 1, 2, "low", "me")
    keep()
    keep()
    assert cancelled == ["100"] and [command[-1] for command in asked] == ["102"]
    states |= {"100": "CANCELLED", "102": "COMPLETED", "101": "NODE_FAIL"}
    assert sorted(keep()) == ["100", "101", "102"]
    assert len(states) == 4, "the lost one is sent again"
    assert sorted(keep()) == ["100", "101", "102"]
    assert looked[-1] == ["103"], "what is over is not asked for again"

    lost = lambda: [r["role"] for r in read_metrics(run.metrics / "supervisor.jsonl")[0] if r["kind"] == "lost"]
    assert lost() == ["elastic job 101"]
    states["103"] = "NODE_FAIL"
    registry = JobRegistry(run)
    nodes = Elastic(run, fixed, telemetry(run), registry)  # of the next leader
    keep()
    assert len(states) == 5, "what ended before it puts nothing off"
    assert lost() == ["elastic job 101"]


def test_what_is_over_is_not_read_again(run: RunDir, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(
        nodes_module, "read_heartbeat", lambda run, name: read.append(name) or read_heartbeat(run, name)
    )
    for name, about in {"node-agent-a": {}, "node-agent-b": {"state": "gone"}, "node-agent-c": {"job": "8"}}.items():
        says(run, name, **about)
    node_agents = RolloutNodes(run, recipe, telemetry(run))
    node_agents.look()
    node_agents.job_ended("8")
    read.clear()
    node_agents.look()
    assert read == ["node-agent-a"]


@pytest.mark.parametrize("worked", [True, False])
def test_a_rollout_job_that_does_nothing_is_not_sent_for_ever_though_others_bring_the_run_on(
    run: RunDir, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, worked: bool
) -> None:
    sent: list[str] = []
    limits = recipe.supervision.model_copy(update={"max_restarts": 2, "backoff_s": 1e-6})
    registry = JobRegistry(run)
    base = BaseJobs(run, recipe.model_copy(update={"supervision": limits}), telemetry(run), registry)
    node_agents = RolloutNodes(run, recipe, telemetry(run))

    def send(run: RunDir, kind: Kind, options: list[str]) -> str:
        sent.append(str(9 + len(sent)))
        record(run, sent[-1], kind)
        return sent[-1]

    monkeypatch.setattr(refusals, "submit_script", send)
    monkeypatch.setattr(job_registry, "job_state", lambda ids: dict.fromkeys(ids, "FAILED"))
    send(run, "rollout", [])
    for step in range(6):
        replace(run.heartbeats / "trainer-0.json", to_json({"step": step}))
        says(run, f"node-agent-{step}", job=sent[-1], requests=3 if worked else 0)
        node_agents.look()
        base.look_after(node_agents)
        registry.look()
        base.keep_jobs()
        if base.failure:
            break
    assert bool(base.failure) is not worked
    assert len(sent) == (7 if worked else 3) and (worked or "the rollout job was lost 3 times" in base.failure)


@pytest.mark.parametrize("generating", [True, False])
def test_a_lost_job_counts_once_and_refusals_of_the_next_end_a_run_only_where_nobody_generates(
    run: RunDir, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, generating: bool
) -> None:
    def refuse(run: RunDir, kind: Kind, options: list[str]) -> str:
        raise RunError("sbatch refuses: Access/permission denied")

    monkeypatch.setattr(refusals, "submit_script", refuse)
    monkeypatch.setattr(refusals, "LONGEST_RETRY_S", 0.0)
    monkeypatch.setattr(job_registry, "job_state", lambda ids: dict.fromkeys(ids, "CANCELLED"))
    record(run, "9", "rollout")
    limits = recipe.supervision.model_copy(update={"max_restarts": 2, "backoff_s": 1e-6})
    registry = JobRegistry(run)
    base = BaseJobs(run, recipe.model_copy(update={"supervision": limits}), telemetry(run), registry)
    node_agents = RolloutNodes(run, recipe, telemetry(run))
    for _ in range(8):
        if generating:  # on a job that nobody wrote down
            says(run, "node-agent-by-hand", job="77", requests=3)
        node_agents.look()
        base.look_after(node_agents)
        registry.look()
        base.keep_jobs()
        if base.failure:
            break
    events = read_metrics(run.metrics / "supervisor.jsonl")[0]
    assert [e["reason"] for e in events if e["kind"] == "lost"] == ["job 9: CANCELLED"]
    counts = [e["count"] for e in events if e["kind"] == "refused"]
    assert counts == list(range(1, 9 if generating else 4))
    assert bool(base.failure) is not generating
    assert generating or "Slurm refused one 3 times: sbatch refuses: Access/permission denied" in base.failure


def test_a_refused_job_is_sent_again_ever_later(run: RunDir, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(refusals.time, "monotonic", lambda: now)

    def refuse(run: RunDir, kind: Kind, options: list[str]) -> str:
        raise RunError("no")

    monkeypatch.setattr(refusals, "submit_script", refuse)
    tried = refusals.Refusals(telemetry(run), "rollout job")
    waits = []
    for _ in range(5):
        assert tried.due
        assert tried.send(run, "rollout") == ""
        assert not tried.due
        waits.append(tried.retry_at - now)
        now = tried.retry_at
    assert waits == [60.0, 120.0, 240.0, 300.0, 300.0]
    tried.forget()
    assert tried.due and tried.count == 0


def test_slurm_is_asked_twice_a_minute_for_all_jobs_at_once(
    run: RunDir, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def ask(command: list[str]) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(
            command, 0, "7|RUNNING|None|r1|\n8|RUNNING|None|r2|\n9|PENDING|Priority||\n", ""
        )

    monkeypatch.setattr(client, "ask", ask)
    for job, kind in (("6", "leader"), ("7", "rollout"), ("8", "elastic"), ("9", "elastic")):
        record(run, job, kind)  # type: ignore[arg-type]
    set_desired_size(run, 1, 3, None, "me")
    jobs, node_agents = JobRegistry(run), RolloutNodes(run, recipe, telemetry(run))
    assert recipe.slurm is not None
    fixed = recipe.model_copy(update={"slurm": recipe.slurm.model_copy(update={"autoscale": None})})
    elastic = Elastic(run, fixed, telemetry(run), jobs)
    all_nodes = RolloutJobs(
        node_agents, BaseJobs(run, fixed, telemetry(run), jobs), elastic, jobs, recipe.slurm.ask_every_s, at_first(run)
    )
    now = time.monotonic()
    monkeypatch.setattr(rollout_jobs.time, "monotonic", lambda: now)
    for _ in range(600):  # ten minutes, a look a second
        now += 1.0
        all_nodes.look_after()
        if all_nodes._keeping is not None:
            all_nodes._keeping.result()
    assert 10 * 60 / 30 - 1 <= len(asked) <= 10 * 60 / 30 + 1
    assert {(command[0], *sorted(command[-1].split(","))) for command in asked} == {("squeue", "7", "8", "9")}


@pytest.mark.parametrize(
    ("now", "wait_s", "depth", "after"),
    [(1, 0.9, 0, 2), (3, 0.9, 0, 3), (2, 0.0, 5, 1), (1, 0.0, 5, 1), (2, 0.1, 1, 2)],
    ids=["waits: grow", "at most", "full: shrink", "at least", "neither"],
)
def test_autoscaling(run: RunDir, recipe: Recipe, now: int, wait_s: float, depth: int, after: int) -> None:
    assert recipe.slurm is not None and recipe.slurm.autoscale is not None
    scaler = Autoscaler(run, recipe, recipe.slurm.autoscale, telemetry(run))
    set_desired_size(run, 1, now, None, "me")
    time.sleep(0.02)
    for step in range(3):
        Telemetry(run, "trainer-0", 0).metrics("step", step=step, step_s=1.0, wait_s=wait_s, spool_depth=depth)
    scaler.look()
    found = desired_size(run)
    assert found is not None and found.rollout == after
    decisions = [r for r in read_metrics(run.metrics / "supervisor.jsonl")[0] if r["kind"] == "autoscale"]
    assert len(decisions) == (after != now) and all(d["reason"] for d in decisions)
