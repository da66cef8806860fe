"""Limits of a QOS, on a cluster with real accounting: those that end, those that do not, and what sacct keeps of a run."""

from __future__ import annotations

import getpass
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import step_now, wait_for
from tests.slurm.cluster import SlurmCluster
from tests.slurm.runs import SLURM, ClusterRun, sent, sound, submit

SINGLE = ("slurm.shape=single", "run.placement=colocate", "async.max_staleness=0")
NO_SUCCESSOR = "no successor queued: this run ends with this job"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """One with slurmdbd, for this file alone."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        started = SlurmCluster(Path(folder) / "c")
        try:
            started.up("--accounting", "--nodes", "trainer=2", "rollout=1")
            yield started
        finally:
            started.down()


def limit(cluster: SlurmCluster, name: str, *limits: str) -> str:
    """Make a QOS that the user may take; its name."""
    cluster.exec("sacctmgr", "--immediate", "add", "qos", name, "set", *limits)
    cluster.exec("sacctmgr", "--immediate", "modify", "user", getpass.getuser(), "set", f"qos+={name}")
    return name


def change(cluster: SlurmCluster, name: str, *limits: str) -> None:
    cluster.exec("sacctmgr", "--immediate", "modify", "qos", name, "set", *limits)


def shown(ours: ClusterRun) -> str:
    """What `relax-hpc status` says, without the frame and the line breaks."""
    return " ".join(ours.relax_hpc("status", ours.run.root).replace("│", "").split())


def accounted(cluster: SlurmCluster, job: str) -> list[str]:
    """State, exit code and comment that sacct keeps of a job."""
    asked = ["sacct", "-n", "-X", "-P", "-o", "State,ExitCode,Comment", "-j", job]
    return cluster.exec(*asked).stdout.strip().split("|")


def test_a_successor_refused_by_a_limit_on_submitted_jobs_is_sent_when_there_is_room(cluster: SlurmCluster) -> None:
    qos = limit(cluster, "few", "MaxSubmitJobsPerUser=3")
    ours = submit(cluster, "few", "run.steps=100000", f"slurm.qos={qos}", "slurm.ask_every_s=1.0")
    ours.wait_for_step(2)
    first, second = ours.leaders()
    change(cluster, qos, "MaxSubmitJobsPerUser=2")  # the second leader and the rollout job
    cluster.exec("scancel", "--batch", "--signal=USR2", first)
    said = str(wait_for(lambda: NO_SUCCESSOR in (text := shown(ours)) and text))
    assert "QOSMaxSubmitJobPerUserLimit" in said and "change slurm.queue_ahead" in said, said
    reached = step_now(ours.run)
    ours.wait_for_step(reached + 1)
    assert ours.leaders() == [first, second] and cluster.state(second) == "RUNNING"
    change(cluster, qos, "MaxSubmitJobsPerUser=3")
    third = str(wait_for(lambda: len(found := ours.leaders()) == 3 and found[-1]))
    wait_for(lambda: f"next: job {third}" in shown(ours))
    assert NO_SUCCESSOR not in shown(ours)
    cluster.exec("scancel", "--batch", "--signal=USR2", second)
    cluster.wait_for_state(third, "RUNNING")
    ours.wait_for_step(step_now(ours.run) + 1)  # before it leads the run, its job would be cancelled
    ours.relax_hpc("stop", ours.run.root)
    assert ours.wait_for_end()["outcome"] == "stopped"
    went_on = ["FAILED", "75:0", str(ours.run.root)]
    for job in (first, second):
        wait_for(lambda: accounted(cluster, job) == went_on)  # noqa: B023
    wait_for(lambda: accounted(cluster, third) == ["COMPLETED", "0:0", str(ours.run.root)])
    sound(ours, step_now(ours.run))


def test_a_job_that_waits_for_other_jobs_of_its_user_is_left_waiting(cluster: SlurmCluster) -> None:
    qos = limit(cluster, "busy", "MaxJobsPerUser=1")
    other = cluster.sbatch("sleep 600", f"--qos={qos}", "--partition=high", "--exclusive")
    cluster.wait_for_state(other, "RUNNING")
    ours = submit(cluster, "busy", "run.steps=4", f"slurm.qos={qos}", *SINGLE, slurm=SLURM)
    leader = ours.leaders()[0]
    assert "the QOS allows no more than this job asks for, or uses already, its limit of jobs for one user" in shown(ours)  # fmt: skip
    change(cluster, qos, "MaxJobsPerUser=-1", "GrpTRES=cpu=8")  # all of the other's
    wait_for(lambda: cluster.fields(leader)["Reason"] == "QOSGrpCpuLimit")
    assert "the QOS uses its limit of CPUs" in shown(ours)
    assert cluster.state(leader) == "PENDING"
    cluster.cancel(other)
    assert ours.wait_for_end()["outcome"] == "done"
    sound(ours, 4)


def test_what_a_limit_never_lets_run_is_refused_with_the_reason_and_the_key(cluster: SlurmCluster) -> None:
    ours, said = sent(cluster, "never", f"slurm.qos={limit(cluster, 'one', 'MaxJobsPerUser=1')}", code=2)
    assert "QOSMaxJobsPerUserLimit" in said and "slurm.shape = 'single'" in said and "cancelled" in said, said
    wait_for(lambda: not cluster.exec("squeue", "--noheader").stdout)
    for flags in (["Flags=DenyOnLimit"], []):  # without the flag Slurm takes the job and lets it wait for ever
        qos = limit(cluster, f"small{len(flags)}", "MaxTRESPerJob=cpu=4", *flags)
        sets = ("--set", f"slurm.qos={qos}", "--set", "slurm.cpus_per_task=6")
        said = ours.relax_hpc("submit", ours.run.root, "--local-root-ok", *sets, code=2)
        assert "QOSMaxCpuPerJobLimit" in said and "change slurm.cpus_per_task" in said, said
        wait_for(lambda: not cluster.exec("squeue", "--noheader").stdout)
