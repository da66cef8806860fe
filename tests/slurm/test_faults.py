"""Faults on a real Slurm: a run that is disturbed ends with the same bits as one that is not, and nobody touches it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.slurm.submission.sbatch import jobs, read_leaders
from relax_hpc.telemetry import read_metrics
from tests.runs import STRONG, relax_hpc, step_now, steps_of, wait_for, write_recipe
from tests.slurm.cluster import SlurmCluster
from tests.slurm.runs import LONG, SLEEP, STEPS, ClusterRun, preempted, sound, submit
from tools.bench.bits import same_bits
from tools.bench.common import SIDES

SLOWLY = f'algorithm={{name="own", factory="{SIDES / "paced.py"}:paced", options={{seconds=0.4}}, group_size=4}}'
"""The same algorithm, with a rest before each step."""


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The same run on this machine, without Slurm."""
    folder = tmp_path_factory.mktemp("calm")
    relax_hpc("run", write_recipe(folder, STRONG), *(word for one in LONG for word in ("--set", one)))
    return RunDir(folder / "small")


def leaders_node_lost(ours: ClusterRun) -> Callable[[], None]:
    node = ours.node_of(ours.job_of("leader"))
    ours.cluster.node_kill(node)
    return lambda: ours.cluster.node_start(node)


def leaders_node_cut_off(ours: ClusterRun) -> Callable[[], None]:
    node = ours.node_of(ours.job_of("leader"))
    ours.cluster.link_down(
        node
    )  # supervisor and trainer go on, renew the lease and commit, until the successor fences them
    return lambda: ours.cluster.link_up(node)


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
    ours.kill(next(ours.run.heartbeats.glob("node-agent-*.json")).stem)


def rollout_job_cancelled(ours: ClusterRun) -> None:
    ours.cluster.cancel(ours.job_of("rollout"))


@pytest.mark.parametrize(
    "fault",
    [
        preempted, leaders_node_lost, leaders_node_cut_off, rollout_node_cut_off, supervisor_killed, trainer_killed, worker_killed, agent_killed,
        rollout_job_cancelled,
    ],
)  # fmt: skip
def test_a_run_survives_untouched_with_the_same_bits(
    cluster: SlurmCluster, undisturbed: RunDir, fault: Callable[[ClusterRun], Callable[[], None] | None]
) -> None:
    name = fault.__name__.replace("_", "-")
    partition = ["slurm.trainer.partition=low"] if fault is preempted else []
    # Slurm notices after ten seconds that a node is cut off: the run must last longer.
    pace = [SLOWLY] if fault in (leaders_node_cut_off, rollout_node_cut_off) else []
    ours = submit(cluster, name, *LONG, *partition, *pace, recipe=STRONG)
    ours.wait_for_step(14)
    heal = fault(ours)
    assert step_now(ours.run) < STEPS, "the run was over before the fault: it proves nothing"
    try:
        assert ours.wait_for_end()["outcome"] == "done"
    finally:
        if heal is not None:
            heal()
    events = [
        r for r in read_metrics(ours.run.metrics / "supervisor.jsonl")[0] if r["kind"] in ("lost", "left", "start")
    ]
    assert len(events) > 1, "the fault did nothing: it proves nothing"
    sound(ours, STEPS)
    assert same_bits(ours.run, undisturbed, STEPS)


@pytest.mark.parametrize("component", ["trainer", "rollout"])
def test_a_het_run_goes_on_when_a_node_of_a_component_is_lost(
    cluster: SlurmCluster, undisturbed: RunDir, component: str
) -> None:
    ours = submit(cluster, f"het-{component}", *LONG, "slurm.shape=het", SLOWLY, recipe=STRONG)
    ours.wait_for_step(14)
    leader = ours.job_of("leader")
    node = cluster.fields(leader)["BatchHost"] if component == "trainer" else ours.active_agents()[0]
    assert node[0] == component[0]
    cluster.node_kill(node)
    try:
        assert ours.wait_for_end()["outcome"] == "done"
    finally:
        cluster.node_start(node)
    assert len(read_leaders(ours.run)) == 2
    sound(ours, STEPS)
    assert same_bits(ours.run, undisturbed, STEPS)


def test_a_step_that_is_longer_than_the_grace_time_is_abandoned_and_made_again(cluster: SlurmCluster) -> None:
    slow = SLOWLY.replace("seconds=0.4", "seconds=8.0")
    ours = submit(cluster, "abandoned", "run.steps=3", *LONG[1:], "slurm.trainer.partition=low", slow)
    ours.wait_for_step(1)
    preempted(ours)
    assert ours.wait_for_end()["outcome"] == "done", "preemption was taken for a person's scancel"
    sound(ours, 3)


def test_an_error_that_one_node_alone_meets_ends_the_run_at_the_second_start(cluster: SlurmCluster) -> None:
    """A file that only rank 1 sees truncated: rank 0 knows no more than that its peer is gone."""
    other = cluster.sbatch(SLEEP.format("t2", 600))
    cluster.wait_for_state(other, "RUNNING")
    ours = submit(cluster, "truncated", "trainer.processes=2", "trainer.nodes=2", "supervision.max_restarts=3")
    whole, cut = ours.run.model / "tokenizer.json", cluster.shared / "cut"
    cut.write_bytes(whole.read_bytes()[:100])
    cluster.exec("mount", "--bind", str(cut), str(whole), node="t2")
    try:
        cluster.cancel(other)
        ended = ours.wait_for_end()
    finally:
        cluster.exec("umount", str(whole), node="t2")
    assert ended["outcome"] == "failed" and ended["fatal"] is True, ended
    reason = str(ended["reason"])
    assert "trainer cannot begin: twice the same error" in reason and "on t2; mend what it names" in reason, reason


@pytest.mark.parametrize("shape", ["split", "het"])
def test_of_several_nodes_one_node_agent_is_lost_and_the_job_goes_on(cluster: SlurmCluster, shape: str) -> None:
    several = (
        "trainer.processes=2",
        "trainer.nodes=2",
        "rollout.workers=4",
        "rollout.nodes=2",
        "async.max_staleness=2",
    )
    ours = submit(cluster, f"several-{shape}", f"slurm.shape={shape}", *several, "run.steps=48", SLOWLY)
    ours.wait_for_step(10)
    wait_for(lambda: len(set(ours.active_agents())) == 2)
    heartbeat = next(read_json(path) for path in ours.run.heartbeats.glob("node-agent-*-1.json"))
    cluster.exec("kill", "-9", str(heartbeat["pid"]), node=heartbeat["host"])
    wait_for(lambda: len(list(ours.run.heartbeats.glob("node-agent-*-1.json"))) == 2)
    ours.kill("trainer-1")  # the other rank's step is abandoned too
    assert ours.wait_for_end()["outcome"] == "done"
    sound(ours, 48)
    assert len([job for job in jobs(ours.run) if cluster.state(job["id"]) != "CANCELLED"]) == (
        2 if shape == "split" else 1
    )
    assert max(s["age_max"] for s in steps_of(ours.run)) <= 2
