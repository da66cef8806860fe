"""Jobs that Slurm does not take, or can never start."""

from __future__ import annotations

from relax_hpc.slurm.submission.sbatch import jobs
from relax_hpc.telemetry import read_metrics
from tests.runs import step_now, wait_for
from tests.slurm.cluster import SlurmCluster
from tests.slurm.runs import ClusterRun, sent, sound, submit


def events(ours: ClusterRun, kind: str, role: str) -> list[dict[str, object]]:
    found = [r for name in ("chain", "supervisor") for r in read_metrics(ours.run.metrics / f"{name}.jsonl")[0]]
    return [record for record in found if record["kind"] == kind and record["role"] == role]


def test_where_nodes_may_not_send_jobs_a_run_goes_on_with_one_sent_by_hand(cluster: SlurmCluster) -> None:
    """`AllocNodes` is how sites forbid it."""
    partitions = ("trainer", "rollout")
    for partition in partitions:
        cluster.exec("scontrol", "update", f"partition={partition}", "AllocNodes=ctl")
    try:
        ours = submit(cluster, "forbidden", "run.steps=100000", "slurm.max_jobs=1", "supervision.max_restarts=1")
        ours.wait_for_step(2)
        shown = " ".join(ours.relax_hpc("status", ours.run.root).replace("│", "").split())
        assert "no successor queued: this run ends with this job (sbatch refuses" in shown, shown
        cluster.cancel(ours.job_of("rollout"))
        wait_for(lambda: events(ours, "refused", "rollout job"))
        by_hand = cluster.exec("sbatch", "--parsable", str(ours.run.slurm / "rollout.sbatch")).stdout.strip()
        assert wait_for(lambda: by_hand in [job["id"] for job in jobs(ours.run) if job["kind"] == "rollout"])
        ours.wait_for_step(step_now(ours.run) + 3)
        assert len(events(ours, "lost", "rollout job")) == 1, "a refusal is no loss"
        assert "Access/permission denied" in str(events(ours, "refused", "successor")[0]["reason"])
        ours.relax_hpc("stop", ours.run.root)
        assert ours.wait_for_end()["outcome"] == "stopped"
        sound(ours, step_now(ours.run))
    finally:
        for partition in partitions:
            cluster.exec("scontrol", "update", f"partition={partition}", "AllocNodes=ALL")


def test_nodes_do_not_burn_for_a_leader_that_can_never_start(cluster: SlurmCluster) -> None:
    _, said = sent(cluster, "never", "trainer.nodes=5", "trainer.processes=5", code=2)
    assert "(leader): Partition" in said and "change trainer.nodes" in said and "cancelled" in said, said
    wait_for(lambda: not cluster.exec("squeue", "--noheader").stdout)

    cluster.exec("scontrol", "update", "partition=trainer", "State=DOWN")  # that ends: the run is sent
    try:
        ours = submit(cluster, "in-vain", "supervision.leader_silent_s=4.0")
        rollout = ours.job_of("rollout")
        wait_for(lambda: any(ours.run.heartbeats.glob("node-agent-*.json")))
        cluster.exec("scontrol", "update", "partition=trainer", "MaxTime=1", "State=UP")  # that does not
        assert cluster.wait_for_state(rollout, "FAILED", "COMPLETED", "CANCELLED") == "FAILED"
        assert "wait for a leader that cannot start: job" in (ours.run.logs / "slurm" / f"in-vain-rollout-{rollout}.out").read_text()  # fmt: skip
        ours.relax_hpc("stop", ours.run.root)
    finally:
        cluster.exec("scontrol", "update", "partition=trainer", "MaxTime=UNLIMITED", "State=UP")
