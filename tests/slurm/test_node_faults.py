"""Nodes and steps of a run on a real Slurm that go wrong one by one: the job goes on, or ends with the reason."""

from __future__ import annotations

import pytest

from relax_hpc.files.publish import read_json
from relax_hpc.slurm.submission.sbatch import jobs
from tests.runs import steps_of, wait_for
from tests.slurm.cluster import SlurmCluster
from tests.slurm.runs import LONG, SLEEP, SLOWLY, preempted, sound, submit


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
