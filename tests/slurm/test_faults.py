"""Faults on a real Slurm: a run that is disturbed ends with the same bits as one that is not, and nobody touches it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from relax_hpc.files.run_dir import RunDir
from relax_hpc.slurm.submission.sbatch import read_leaders
from relax_hpc.telemetry import read_metrics
from tests.runs import STRONG, relax_hpc, step_now, write_recipe
from tests.slurm.cluster import SlurmCluster
from tests.slurm.runs import LONG, SLOWLY, STEPS, ClusterRun, preempted, sound, submit
from tools.bench.bits import same_bits


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
