"""Runs on a real Slurm: submitted, disturbed, and done with nobody touching them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relax_hpc.analysis.audit import audit
from relax_hpc.launch.slurm.send import jobs
from relax_hpc.run_dir import RunDir, read_json
from relax_hpc.telemetry import read_metrics
from tests.runs import SMALL, relax_hpc, step_now, steps_of, wait_for, write_recipe
from tests.slurm.cluster import SlurmCluster
from tests.slurm.runs import GROUPS, SLURM, ClusterRun, submit
from tools.bench.chaos import final_weights

STEPS = 80
LONG = (f"run.steps={STEPS}", "run.checkpoint_every=10", "async.max_staleness=0")
SLEEP = "#SBATCH --partition=high --time=1 --nodes=1 --exclusive --nodelist={}\nsleep {}"


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The same run on this machine, without Slurm."""
    folder = tmp_path_factory.mktemp("calm")
    relax_hpc("run", write_recipe(folder, SMALL), *(word for one in LONG for word in ("--set", one)))
    return RunDir(folder / "small")


@pytest.mark.parametrize("shape", ["split", "het", "single"])
def test_every_shape_reaches_its_end(cluster: SlurmCluster, shape: str) -> None:
    ours = submit(cluster, shape, f"slurm.shape={shape}", slurm=SLURM + ("" if shape == "single" else GROUPS))
    assert ours.wait_for_end()["outcome"] == "done"
    sound(ours, 6)
    assert cluster.state(ours.leaders()[0]) == "COMPLETED"
    assert cluster.state(ours.leaders()[1]) == "CANCELLED", "the successor of a finished run was not cancelled"


def preempted(ours: ClusterRun) -> None:
    leader = ours.job_of("leader")
    ours.cluster.sbatch(SLEEP.format(ours.node_of(leader), 3))
    wait_for(lambda: ours.cluster.state(leader) != "RUNNING", 30)


def leaders_node_lost(ours: ClusterRun) -> Callable[[], None]:
    node = ours.node_of(ours.job_of("leader"))
    ours.cluster.node_kill(node)
    return lambda: ours.cluster.node_start(node)


def rollout_node_cut_off(ours: ClusterRun) -> Callable[[], None]:
    node = ours.node_of(ours.job_of("rollout"))
    ours.cluster.link_down(node)  # its processes go on, and write to the run
    return lambda: ours.cluster.link_up(node)


def supervisor_killed(ours: ClusterRun) -> None:
    job = ours.job_of("leader")
    ours.cluster.exec("scancel", "--signal=KILL", "--batch", job)


def trainer_killed(ours: ClusterRun) -> None:
    ours.kill("trainer-0")


def worker_killed(ours: ClusterRun) -> None:
    ours.kill("rollout-0")


def agent_killed(ours: ClusterRun) -> None:
    ours.kill(next(ours.run.heartbeats.glob("agent-*.json")).stem)


def rollout_job_cancelled(ours: ClusterRun) -> None:
    ours.cluster.cancel(ours.job_of("rollout"))


@pytest.mark.parametrize(
    "fault",
    [
        preempted, leaders_node_lost, rollout_node_cut_off, supervisor_killed, trainer_killed, worker_killed, agent_killed,
        rollout_job_cancelled,
    ],
)  # fmt: skip
def test_a_run_survives_untouched_with_the_same_bits(
    cluster: SlurmCluster, undisturbed: RunDir, fault: Callable[[ClusterRun], Callable[[], None] | None]
) -> None:
    name = fault.__name__.replace("_", "-")
    partition = ["slurm.trainer.partition=low"] if fault is preempted else []
    ours = submit(cluster, name, *LONG, *partition)
    ours.wait_for_step(14)
    heal = fault(ours)
    assert step_now(ours.run) < STEPS, "the run was over before the fault: it proves nothing"
    try:
        assert ours.wait_for_end()["outcome"] == "done"
    finally:
        if heal is not None:
            heal()
    sound(ours, STEPS)
    assert final_weights(ours.run, STEPS) == final_weights(undisturbed, STEPS)


def test_a_leader_that_a_person_cancelled_is_not_run_again(cluster: SlurmCluster) -> None:
    ours = submit(cluster, "cancelled", "run.steps=100000")
    ours.wait_for_step(2)
    cluster.cancel(ours.job_of("leader"))
    wait_for(lambda: not cluster.exec("squeue", "--noheader").stdout, 60)
    assert read_json(ours.run.outcome)["outcome"] == "stopped"
    assert not any(cluster.state(job) in ("PENDING", "RUNNING") for job in ours.leaders())
    assert step_now(ours.run) in ours.run.checkpoint_steps(), "it did not checkpoint when it was cancelled"
    ours.relax_hpc("submit", ours.run.root, "--local-root-ok", "--set", f"run.steps={step_now(ours.run) + 3}")
    assert ours.wait_for_end()["outcome"] == "done", "a person may go on with it"
    sound(ours, step_now(ours.run))


def test_stop_ends_the_run_and_all_its_jobs(cluster: SlurmCluster) -> None:
    ours = submit(cluster, "stopped", "run.steps=100000", "slurm.shape=het")
    ours.wait_for_step(2)
    ours.relax_hpc("stop", ours.run.root)
    assert ours.wait_for_end()["outcome"] == "stopped"
    sound(ours, step_now(ours.run))


def test_a_preempted_leader_is_requeued_where_chains_are_not_wanted(cluster: SlurmCluster) -> None:
    ours = submit(cluster, "requeued", *LONG, "slurm.trainer.partition=low", 'slurm.restart="requeue"')
    ours.wait_for_step(14)
    preempted(ours)
    assert ours.wait_for_end()["outcome"] == "done"
    assert len(ours.leaders()) == 1 and cluster.fields(ours.leaders()[0])["Restarts"] == "1"
    sound(ours, STEPS)


def test_a_chain_that_makes_no_progress_ends_itself(cluster: SlurmCluster) -> None:
    ours = submit(cluster, "idle", "slurm.max_idle_jobs=2", "supervision.max_restarts=0", "supervision.start_s=1.0")
    ended = ours.wait_for_end()
    assert ended["outcome"] == "failed" and "2 jobs in a row made no step" in str(ended["reason"]), ended
    assert len(ours.leaders()) <= 4


def test_a_node_that_keeps_failing_is_avoided(cluster: SlurmCluster) -> None:
    broken = cluster.shared / "broken.py"
    broken.write_text(
        "import os\n"
        "class Broken:\n"
        "    def reset(self, prompt):\n"
        "        if os.uname().nodename == 'r1': os._exit(1)\n"
        "    def step(self, answer):\n"
        "        from relax_hpc.environments import Turn\n"
        "        return Turn(done=True)\n"
        "    def close(self): pass\n"
    )
    recipe = SMALL.replace("[[source]]", f'[[source]]\nenvironment = "{broken}:Broken"')
    ours = submit(cluster, "avoided", "supervision.max_restarts=2", recipe=recipe)
    assert ours.wait_for_end()["outcome"] == "done"
    assert "r1" in read_json(ours.run.slurm / "excluded.json")
    hosts = [cluster.fields(job["id"])["BatchHost"] for job in jobs(ours.run) if job["kind"] == "rollout"]
    assert hosts == ["r1", "r2"]
    sound(ours, 6)


def test_no_step_is_begun_that_cannot_end_within_the_walltime(cluster: SlurmCluster) -> None:
    ours = submit(cluster, "walltime", "run.steps=100000", 'slurm.time="00:02:00"', "run.checkpoint_every=100000")
    ours.wait_for_step(1)
    first = ours.job_of("leader")
    assert cluster.wait_for_state(first, "COMPLETED", "TIMEOUT", timeout=150) == "COMPLETED"
    steps = ours.run.checkpoint_steps()
    wait_for(lambda: step_now(ours.run) > steps[-1], 60)
    assert ours.job_of("leader") != first
    replayed = [s["step"] for s in steps_of(ours.run) if s["replayed"]]
    assert replayed == [], "it left without a checkpoint"
    ours.relax_hpc("stop", ours.run.root)
    assert ours.wait_for_end()["outcome"] == "stopped"


def test_rollout_nodes_come_and_go_as_wished(cluster: SlurmCluster) -> None:
    ours = submit(cluster, "scaled", "run.steps=100000", "async.max_staleness=2")
    ours.wait_for_step(2)
    for nodes, partition in ((3, "low"), (1, "low")):
        ours.relax_hpc("scale", ours.run.root, f"rollout={nodes}", "--partition", partition)
        wait_for(lambda: len(ours.active_agents()) == nodes, 60)  # noqa: B023
    assert "protected" in ours.relax_hpc("scale", ours.run.root, "rollout=0", code=2)
    ours.relax_hpc("stop", ours.run.root)
    assert ours.wait_for_end()["outcome"] == "stopped"
    sound(ours, step_now(ours.run))
    elastic = [job["id"] for job in jobs(ours.run) if job["kind"] == "elastic"]
    assert len(elastic) == 2 and {cluster.state(job) for job in elastic} == {"COMPLETED"}, "they did not drain"


def test_a_run_grows_while_its_trainer_waits(cluster: SlurmCluster) -> None:
    policy = (
        SLURM + "[slurm.autoscale]\nmax_nodes = 2\nwindow_s = 2\ncooldown_s = 4\ngrow_when_waiting = 0.05\n" + GROUPS
    )
    ours = submit(cluster, "autoscaled", "run.steps=100000", slurm=policy)
    wait_for(lambda: len(ours.active_agents()) == 2, 90)
    reasons = [r["reason"] for r in read_metrics(ours.run.metrics / "supervisor.jsonl")[0] if r["kind"] == "autoscale"]
    assert "the trainer waited" in reasons[0]
    ours.relax_hpc("stop", ours.run.root)
    assert ours.wait_for_end()["outcome"] == "stopped"
    sound(ours, step_now(ours.run))


def sound(ours: ClusterRun, steps: int) -> None:
    """Every step made, no prompt lost, none trained twice, no token over the bound."""
    assert {s["step"] for s in steps_of(ours.run)} == set(range(steps))
    found = audit(ours.run.root)
    assert (found.lost, found.twice, found.torn, found.over_bound) == ([], [], [], []), found
