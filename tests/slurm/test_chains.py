"""Runs on a real Slurm whose jobs come, go and succeed one another with nobody touching them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from relax_hpc.files.publish import read_json
from relax_hpc.slurm.submission.sbatch import exclude, jobs
from relax_hpc.telemetry import read_heartbeat, read_metrics
from tests.runs import SMALL, step_now, steps_of, wait_for
from tests.slurm.cluster import SlurmCluster
from tests.slurm.runs import GROUPS, LONG, SLURM, STEPS, sound, submit
from tools.bench.common import SIDES


def test_a_leader_that_is_warned_requeues_itself_where_chains_are_not_wanted(cluster: SlurmCluster) -> None:
    ours = submit(cluster, "requeued", *LONG, 'slurm.restart="requeue"')
    ours.wait_for_step(14)
    (leader,) = ours.leaders()
    cluster.exec(
        "scancel", "--batch", "--signal=USR2", leader
    )  # as before a time limit; Slurm requeues nothing by itself
    assert ours.wait_for_end()["outcome"] == "done"
    assert ours.leaders() == [leader] and cluster.fields(leader)["Restarts"] == "1"
    sound(ours, STEPS)


def test_a_requeueing_leader_that_a_person_cancels_stays_so(cluster: SlurmCluster) -> None:
    ours = submit(cluster, "requeue-cancelled", "run.steps=100000", 'slurm.restart="requeue"')
    ours.wait_for_step(2)
    cluster.cancel(ours.job_of("leader"))
    wait_for(lambda: not cluster.exec("squeue", "--noheader").stdout)  # the rollout nodes leave too
    (leader,) = ours.leaders()
    assert cluster.state(leader) == "CANCELLED" and cluster.fields(leader)["Restarts"] == "0"


def test_a_chain_that_makes_no_progress_ends_itself(cluster: SlurmCluster) -> None:
    """Its first step takes an hour: each job loses the trainer as silent, and no job may start it again.

    The first to fail leaves no node that is not avoided: the chain goes on with all of them.
    """
    endless = f'{{name="own", factory="{SIDES / "paced.py"}:paced", options={{seconds=3600.0}}, group_size=4}}'
    sets = ("slurm.max_idle_jobs=2", "supervision.max_restarts=0", "supervision.hang_s=4.0")
    ours = submit(cluster, "idle", *sets, f"algorithm={endless}")
    for node in ("t1", "t2"):
        exclude(ours.run, node, "it failed before")
    ended = ours.wait_for_end()
    assert ended["outcome"] == "failed" and "2 jobs in a row made no step" in str(ended["reason"]), ended
    assert 2 <= len((ours.run.slurm / "leaders.jsonl").read_text().splitlines()) <= 4


def test_a_node_that_keeps_failing_is_avoided(cluster: SlurmCluster) -> None:
    broken = cluster.shared / "broken.py"
    broken.write_text(
        "import os\n"
        "class Broken:\n"
        "    def reset(self, prompt):\n"
        "        if os.uname().nodename == 'r1': os.kill(os.getppid(), 9)\n"
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
    """Steps take longer than the warning before the end: only one that is not begun leaves time for a checkpoint."""
    paced = f'{{name="own", factory="{SIDES / "paced.py"}:paced", options={{seconds=14.0}}, group_size=4}}'
    sets = ("run.steps=100000", "run.checkpoint_every=100000", 'slurm.time="00:02:00"', "slurm.signal_lead_s=10")
    ours = submit(cluster, "walltime", *sets, f"algorithm={paced}")
    ours.wait_for_step(1)
    first = ours.job_of("leader")
    assert cluster.wait_for_state(first, "COMPLETED", "FAILED", "TIMEOUT", timeout=240) == "FAILED"
    assert cluster.fields(first)["ExitCode"] == "75:0", "sacct must not show a run that goes on as completed"
    reached = ours.run.checkpoint_steps()[-1]
    assert reached >= 2
    wait_for(lambda: step_now(ours.run) > reached)
    assert ours.job_of("leader") != first
    assert not any(s["replayed"] for s in steps_of(ours.run)), "it left without a checkpoint"
    ours.relax_hpc("stop", ours.run.root)
    assert ours.wait_for_end()["outcome"] == "stopped"


def test_rollout_nodes_come_and_go_as_desired(cluster: SlurmCluster) -> None:
    ours = submit(cluster, "scaled", "run.steps=100000", "async.max_staleness=2")
    ours.wait_for_step(2)
    for nodes, partition in ((3, "low"), (1, "low")):
        ours.relax_hpc("scale", ours.run.root, f"rollout={nodes}", "--partition", partition)
        wait_for(lambda: len(ours.active_agents()) == nodes)  # noqa: B023
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
    wait_for(lambda: len(ours.active_agents()) == 2)
    reasons = [r["reason"] for r in read_metrics(ours.run.metrics / "supervisor.jsonl")[0] if r["kind"] == "autoscale"]
    assert "the trainer waited" in reasons[0]
    ours.relax_hpc("stop", ours.run.root)
    assert ours.wait_for_end()["outcome"] == "stopped"
    sound(ours, step_now(ours.run))


def test_each_rank_has_a_gpu_of_its_own_and_one_that_has_not_is_named(cluster: SlurmCluster) -> None:
    on_cpu = ("trainer.device=cpu", "rollout.device=cpu", "trainer.processes=2", "rollout.workers=2")
    ours = submit(
        cluster, "gpus", *on_cpu, "run.steps=30", "slurm.rollout.gpus_per_task=1", "slurm.trainer.gpus_per_node=1"
    )
    reason = str(ours.wait_for_end()["reason"])
    assert "sees the same single GPU (0)" in reason and "on t1" in reason and "gpus_per_task = 1" in reason
    own = 'slurm.trainer={partition="trainer", gpus_per_task=1}'
    ours.relax_hpc("submit", ours.run.root, "--local-root-ok", "--set", own)
    taken = wait_for(lambda: len(found := [p.name for p in ours.run.lease.glob("*/i*/gpu-*")]) == 2 and found)
    assert sorted(taken) == ["gpu-t1-0", "gpu-t1-1"]
    heartbeats = wait_for(lambda: all(found := [read_heartbeat(ours.run, f"rollout-{i}") for i in range(2)]) and found)
    assert [heartbeat["gpus"] for heartbeat in heartbeats] == [["0"], ["1"]]
    assert ours.wait_for_end()["outcome"] == "done"


def test_processes_run_from_an_environment_on_the_nodes_own_disk(cluster: SlurmCluster) -> None:
    """A small one, that finds the packages of ours where they are."""
    made, packed, disk = (cluster.shared / name for name in ("made", "env.tar", "disk"))
    venv.create(made, symlinks=True)
    (made / f"lib/python3.{sys.version_info.minor}/site-packages/ours.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})"
    )
    subprocess.run(["tar", "-cf", packed, "-C", made, "."], check=True)
    shutil.rmtree(made)
    disk.mkdir()
    ours = submit(
        cluster, "staged", f"slurm.stage_environment={packed}", f"slurm.environment.TMPDIR={disk}", "run.steps=20"
    )
    agent = wait_for(lambda: next((path.stem for path in ours.run.heartbeats.glob("node-agent-*.json")), None))
    for role in ("trainer-0", agent):
        heartbeat = wait_for(lambda: read_heartbeat(ours.run, role))  # noqa: B023
        words = cluster.exec("cat", f"/proc/{heartbeat['pid']}/cmdline", node=heartbeat["host"]).stdout.split("\0")
        assert Path(words[0]) == next(disk.glob("*/environment-*")) / "bin" / "python"
    assert ours.wait_for_end()["outcome"] == "done"
    kept = {path.name.partition("-")[0] for path in disk.glob(f"*/{read_json(ours.run.identity)['id']}/[!.]*")}
    assert kept == {"trainer", "rollout"}, "no caches on the node's disk"
