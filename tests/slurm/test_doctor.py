"""The doctor and the login node's commands on a real cluster."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.files.publish import read_json
from tests.runs import SMALL, wait_for
from tests.slurm.cluster import SlurmCluster
from tests.slurm.runs import GROUPS, SLURM, submit

TIMEOUT_S = 6


@pytest.fixture
def recipe(cluster: SlurmCluster) -> Path:
    path = cluster.shared / "doctor.toml"
    path.write_text(SMALL.format(root=cluster.shared / "doctored") + SLURM + GROUPS)
    return path


def there(cluster: SlurmCluster) -> list[Path]:
    """Everything in the shared folder but the output of jobs."""
    return sorted(path for path in cluster.shared.rglob("*") if path.suffix != ".out")


def doctor(cluster: SlurmCluster, recipe: Path, *arguments: str, code: int) -> list[dict[str, Any]]:
    """The checks that are not ok; nothing may be left."""
    before = there(cluster)
    words = [sys.executable, "-m", "relax_hpc", "doctor", str(recipe), "--json", "--local-root-ok", *arguments]
    done = cluster.exec(*words, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert there(cluster) == before
    found: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(found) > 3
    return [check for check in found if check["verdict"] not in ("ok", "note")]


def test_a_good_recipe_passes(cluster: SlurmCluster, recipe: Path) -> None:
    found = doctor(cluster, recipe, "--only", "files", "--only", "slurm", code=0)
    assert [check["what"] for check in found] == ["trainer: partition trainer: preemption"], found


def test_what_the_cluster_does_not_have_is_named(cluster: SlurmCluster, recipe: Path) -> None:
    sets = ("slurm.rollout.partition=nope", "slurm.trainer.gpus_per_node=64")
    found = doctor(cluster, recipe, "--only", "slurm", *(w for s in sets for w in ("--set", s)), code=1)
    said = {check["what"]: check["found"] for check in found if check["verdict"] == "failed"}
    assert "0 of 2 nodes have 1 CPUs, 64 gpu" in said["trainer: partition trainer: nodes"]
    assert said["rollout: partition nope"] == "no such partition"
    assert "node configuration is not available" in said["sbatch: leader"]
    assert "nvalid partition" in said["sbatch: rollout"]


def test_a_time_limit_above_the_partitions_is_named(cluster: SlurmCluster, recipe: Path) -> None:
    cluster.exec("scontrol", "update", "PartitionName=trainer", "MaxTime=00:05:00")
    try:
        found = doctor(cluster, recipe, "--only", "slurm", code=1)
    finally:
        cluster.exec("scontrol", "update", "PartitionName=trainer", "MaxTime=UNLIMITED")
    assert any(c["found"] == "slurm.time = '00:10:00'" and "00:05:00" in c["expected"] for c in found), found


TWO = ("--set", "rollout.nodes=2", "--set", "rollout.workers=2")


def test_nodes_find_nothing_wrong(cluster: SlurmCluster, recipe: Path) -> None:
    assert doctor(cluster, recipe, "--only", "nodes", "--timeout", "30", *TWO, code=0) == []
    assert not cluster.exec("squeue", "--noheader").stdout


def test_a_node_that_is_cut_off_is_named_in_time(cluster: SlurmCluster, recipe: Path) -> None:
    cluster.link_down("r2")
    began = time.monotonic()
    try:
        found = doctor(cluster, recipe, "--only", "nodes", "--timeout", str(TIMEOUT_S), *TWO, code=1)
    finally:
        cluster.link_up("r2")
    assert time.monotonic() - began < 10 * TIMEOUT_S
    lost = next(check for check in found if check["what"] == "rollout nodes")
    assert "r2" in lost["found"] and "r1" not in lost["found"].split("(")[0], found
    wait_for(lambda: cluster.node_state("r2") == "idle")


def test_a_job_that_cannot_start_says_why(cluster: SlurmCluster, recipe: Path) -> None:
    cluster.sbatch("#SBATCH --partition=trainer --nodes=2 --exclusive\nsleep 100")
    found = doctor(cluster, recipe, "--only", "nodes", "--timeout", "3", code=1)
    words = next(check["found"] for check in found if check["what"] == "trainer nodes")
    assert "did not start within 3 s: " in words
    assert words.endswith(("waits for nodes to become free", "other jobs come first")), words


def test_a_run_seen_from_the_login_node_while_it_waits_and_to_its_end(cluster: SlurmCluster) -> None:
    blocker = cluster.sbatch("#SBATCH --partition=high --nodes=4 --exclusive --time=5\nsleep 100")
    ours = submit(cluster, "watched")
    first = ours.leaders()
    said = ours.relax_hpc("status", ours.run.root)
    assert "pending" in said.splitlines()[0] and first[0] in said and "waits for" in said, said
    assert f"cancelled {first[0]}" in ours.relax_hpc("stop", ours.run.root)
    wait_for(lambda: all(cluster.state(job) == "CANCELLED" for job in first))
    assert read_json(ours.run.outcome)["outcome"] == "stopped"
    assert "stopped" in ours.relax_hpc("status", ours.run.root).splitlines()[0]
    cluster.cancel(blocker)
    ours.relax_hpc("submit", ours.run.root, "--local-root-ok")
    assert "done" in ours.relax_hpc("watch", ours.run.root)
    said = ours.relax_hpc("status", ours.run.root)
    assert "done" in said.splitlines()[0] and "restarts so far: 0" in said and "rollout node" in said, said
    assert "trainer-0" in ours.relax_hpc("logs", ours.run.root, "-f")
    assert "trainer-0" in ours.relax_hpc("logs", ours.run.root, "judge", code=2)
    ours.wait_for_end()
    assert "nothing to stop" in ours.relax_hpc("stop", ours.run.root, code=2)
