"""tools/slurm-cluster: the cluster behaves as a real one where the tests of submission rely on it, and leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import wait_for
from tests.slurm.cluster import TOOL, SlurmCluster
from tools.slurm_cluster import cluster as implementation
from tools.slurm_cluster import config

NODES = ["r1", "r2", "t1", "t2"]
NODE_LOSS_S = 60
WRITER = "while true; do date +%s.%N >> {}; sleep 0.1; done"
DIAL = ["timeout", "2", "bash", "-c", "exec 3<>/dev/tcp/ctl/6817"]


def test_all_nodes_are_idle_in_their_partition_and_in_the_two_that_span_all(cluster):
    lines = cluster.exec("sinfo", "--noheader", "--Node", "--format=%N %R %t").stdout.split("\n")
    own = [("r1", "rollout"), ("r2", "rollout"), ("t1", "trainer"), ("t2", "trainer")]
    spanning = [(node, partition) for node in NODES for partition in ("low", "high")]
    assert sorted(filter(None, lines)) == sorted(f"{node} {partition} idle" for node, partition in own + spanning)


def test_exec_passes_input_output_and_the_exit_code(cluster):
    done = cluster.exec("sh", "-c", "cat; hostname; exit 7", stdin="in ", check=False)
    assert (done.stdout, done.returncode) == ("in ctl\n", 7)
    assert cluster.exec("sh", "-c", "kill -9 $$", check=False).returncode == 128 + signal.SIGKILL
    assert cluster.exec("no-such-command", check=False).returncode == 127


def test_a_command_that_is_given_up_does_not_stay(cluster):
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.exec("sleep", "4242", timeout=1)
    assert cluster.exec("pgrep", "-f", "sleep 4242", check=False).returncode == 1


def test_there_is_no_way_out_of_the_network(cluster):
    for node in (None, "t1"):
        assert cluster.exec("ip", "route", node=node).stdout.split()[0] == "10.77.0.0/24"
        assert "default" not in cluster.exec("ip", "route", node=node).stdout


@pytest.mark.quick
def test_a_job_runs_on_a_host_of_its_partition(cluster):
    jobs = {
        partition: cluster.sbatch("hostname; echo $SLURMD_NODENAME", f"--partition={partition}")
        for partition in ("trainer", "rollout")
    }
    for partition, job in jobs.items():
        cluster.wait_for_state(job, "COMPLETED")
        host, node = cluster.output(job).split()
        assert host == node
        assert host[0] == partition[0]


def test_each_task_sees_a_gpu_of_its_own(cluster):
    job = cluster.sbatch("srun bash -c 'echo $CUDA_VISIBLE_DEVICES'", "--partition=trainer", "-n2", "--gpus-per-task=1")
    cluster.wait_for_state(job, "COMPLETED")
    assert sorted(cluster.output(job).split()) == ["0", "1"]


def test_both_components_of_a_het_job_start(cluster):
    job = cluster.sbatch(
        "#SBATCH --partition=trainer --nodes=1\n#SBATCH hetjob\n#SBATCH --partition=rollout --nodes=2\n"
        "srun --het-group=0,1 hostname"
    )
    cluster.wait_for_state(job, "COMPLETED")
    hosts = cluster.output(job).split()
    assert len(hosts) == 3
    assert sorted(host[0] for host in hosts) == ["r", "r", "t"]


def test_a_preempted_job_gets_the_signal_that_it_named(cluster):
    low = cluster.sbatch(
        "trap 'echo USR2' USR2; while true; do echo alive; sleep 0.1; done",
        "--partition=low",
        "--nodes=4",
        "--exclusive",
        "--signal=B:USR2@1",
        "--no-requeue",
    )
    wait_for(lambda: cluster.output(low))
    high = cluster.sbatch("true", "--partition=high", "--nodes=4", "--exclusive")
    assert cluster.wait_for_state(low, "PREEMPTED", "CANCELLED", "COMPLETED") == "PREEMPTED"
    cluster.wait_for_state(high, "COMPLETED")
    _, _, after = cluster.output(low).partition("USR2\n")
    assert "alive" in after, "it had no grace time"


def test_a_lost_node_ends_its_jobs_while_on_one_that_is_cut_off_they_write_on(cluster):
    """One test, because Slurm takes its time to notice: r2 is killed and r1 loses its link at once."""
    lost = cluster.sbatch(WRITER.format("lost"), "--nodelist=r2", "--partition=rollout", "--no-requeue")
    requeued = cluster.sbatch("echo began; sleep 100", "--nodelist=r2", "--partition=rollout", "--requeue")
    zombie = cluster.sbatch(WRITER.format("zombie"), "--nodelist=r1", "--partition=rollout", "--no-requeue")
    of_lost, of_zombie = cluster.shared / "lost", cluster.shared / "zombie"
    wait_for(lambda: of_lost.exists() and of_zombie.exists() and cluster.output(requeued))
    assert cluster.exec(*DIAL, node="r1", check=False).returncode == 0

    cluster.node_kill("r2")
    written_by_lost = of_lost.read_text()
    cluster.link_down("r1")
    assert cluster.exec(*DIAL, node="r1", check=False).returncode != 0
    for job in (lost, zombie):
        cluster.wait_for_state(job, "NODE_FAIL", timeout=NODE_LOSS_S)
    cluster.wait_for_state(requeued, "PENDING")
    assert of_lost.read_text() == written_by_lost
    written_by_zombie = of_zombie.stat().st_size
    wait_for(lambda: of_zombie.stat().st_size > written_by_zombie)

    cluster.node_start("r2")
    cluster.link_up("r1")
    cluster.wait_for_state(requeued, "RUNNING", timeout=NODE_LOSS_S)
    cluster.cancel(requeued)
    for node in ("r1", "r2"):
        cluster.wait_for_node(node, "idle")
    assert cluster.exec(*DIAL, node="r1", check=False).returncode == 0


def test_a_successor_starts_when_its_predecessor_ends(cluster):
    may_end = cluster.shared / "may-end"
    first = cluster.sbatch(f"until [ -e {may_end} ]; do sleep 0.1; done", "--partition=trainer")
    of_first = f"scontrol --oneliner show job {first} | grep -o 'JobState=[A-Z]*'"
    second = cluster.sbatch(of_first, "--partition=trainer", f"--dependency=afterany:{first}")
    cluster.wait_for_state(first, "RUNNING")
    assert (cluster.state(second), cluster.fields(second)["Reason"]) == ("PENDING", "Dependency")
    may_end.touch()
    cluster.wait_for_state(second, "COMPLETED")
    assert cluster.output(second) in ("JobState=COMPLETED\n", "JobState=COMPLETING\n")


def processes_of(cluster: SlurmCluster) -> set[int]:
    """All that descend from the recorded anchor (namespaces), or carry the cluster's folder in their environment."""
    anchor = json.loads((cluster.folder / "cluster.json").read_text())["anchor"]
    parents, found = {}, set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if f"{cluster.folder}/etc/slurm.conf".encode() in (path / "environ").read_bytes():
                found.add(int(path.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    found |= {anchor[0]} if anchor else set()
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def names_of(pids: set[int]) -> list[str]:
    """Of those that are still there."""
    names = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            names.append((Path("/proc") / str(pid) / "comm").read_text().strip())
    return names


def living(pids: set[int]) -> set[int]:
    return {pid for pid in pids if implementation.processes.identity(pid)}


@pytest.mark.parametrize("mode", [[], ["--no-namespaces", "--accounting"]], ids=["namespaces", "ports, accounting"])
def test_down_leaves_no_process_no_file_no_interface_no_mount(short_path, mode):
    second = SlurmCluster(short_path / "c")

    def around() -> tuple[list[str], list[str]]:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
        places = ("/etc/hosts", "/dev/shm", "/proc")  # what a cluster mounts, if in namespaces of its own
        mine = [line for line in lines if str(second.folder) in line or line.split()[4] in places]
        return sorted(os.listdir("/sys/class/net")), mine  # other mounts come and go with other programs

    before = around()
    try:
        second.up(*mode)
        orphan = "setsid sleep 1000 & sleep 1000"
        for options in (["--export=ALL"], ["--export=NONE"]):
            job = second.sbatch(f"echo began; {orphan}", "--partition=low", *options)
            wait_for(lambda job=job: second.output(job))
        wait_for(lambda: names_of(processes_of(second)).count("sleep") >= 4)
        pids = processes_of(second)
        names = names_of(pids)
        assert (names.count("slurmctld"), names.count("slurmd")) == (1, 4)
        assert [names.count(name) for name in ("slurmdbd", "mariadbd")] == [len(mode) // 2] * 2
        assert "mariadbd" not in second.exec("ss", "--listening", "--tcp", "--processes").stdout
    finally:
        second.down()
    assert not living(pids)
    assert not second.folder.exists()
    assert around() == before
    second.down()  # nothing to do is no error


def test_down_clears_away_what_an_up_left_that_was_killed_half_way(short_path):
    broken = SlurmCluster(short_path / "c")
    starting = subprocess.Popen([sys.executable, TOOL, "up", broken.folder], stdout=subprocess.DEVNULL)
    wait_for((broken.folder / "run" / "slurmctld.pid").exists)
    starting.kill()
    starting.wait()
    pids = processes_of(broken)
    assert pids
    broken.down("--keep-logs")
    assert not living(pids)
    assert os.listdir(broken.folder) == ["log"]


def test_a_second_up_in_the_same_folder_and_foreign_files_are_refused(cluster, short_path):
    assert "a cluster runs in" in cluster.tool("up", check=False).stderr
    mine = short_path / "c" / "mine"
    mine.parent.mkdir()
    mine.write_text("")
    assert "is not empty (mine)" in SlurmCluster(mine.parent).tool("up", check=False).stderr
    assert mine.exists()


def test_a_missing_binary_is_named_with_its_package(monkeypatch, short_path):
    monkeypatch.setattr(implementation.shutil, "which", lambda name: None if name == "slurmd" else f"/usr/bin/{name}")
    with pytest.raises(config.ClusterError, match=r"slurmd \(package slurmd\)[^$]*apt-get install"):
        implementation.up(short_path / "c", {"trainer": 1}, 0, True, accounting=False)


def test_options_reach_slurm_and_a_node_that_is_only_declared_is_down_until_it_is_started(short_path):
    elastic = SlurmCluster(short_path / "c")
    try:
        options = ["--nodes", "trainer=1", "rollout=1", "--extra-nodes-declared", "1"]
        elastic.up(*options, "--no-requeue", "--no-preempt-signal")
        shown = elastic.exec("scontrol", "show", "config").stdout
        assert re.search(r"^JobRequeue\s*= 0$", shown, re.MULTILINE)
        assert "preempt_send_user_signal" not in shown
        assert elastic.node_state("r2").startswith("down")
        elastic.node_start("r2")
        elastic.wait_for_node("r2", "idle")
        hosts = elastic.exec("srun", "--partition=rollout", "--nodes=2", "hostname").stdout.split()
        assert sorted(hosts) == ["r1", "r2"]
    finally:
        elastic.down()
