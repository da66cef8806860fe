"""A user's driver, with submitit's own helpers, over the jobs of a run on a real Slurm."""

from __future__ import annotations

import json
import sys

import pytest

from relax_hpc.files.run_dir import RunDir
from tests.runs import SMALL
from tests.slurm.cluster import SlurmCluster
from tests.slurm.runs import GROUPS, LONG, QUICK, SLURM, STEPS, ClusterRun, sound

DRIVER = """
import json, subprocess, sys, time
import relax_hpc, submitit
from submitit.helpers import as_completed, monitor_jobs

jobs = relax_hpc.submit(sys.argv[1], sets=sys.argv[2:], local_root_ok=True)
leader = jobs[0]
assert all(isinstance(job, submitit.SlurmJob) for job in jobs) and not leader.done()
while not (leader.run.heartbeats / "trainer-0.json").exists():
    time.sleep(0.5)
subprocess.run(["scancel", "--batch", "--signal=USR2", leader.job_id], check=True)  # as before a time limit
while leader.get_info()["State"] in ("RUNNING", "COMPLETING"):
    time.sleep(0.5)
told = {"ended": leader.state, "done": leader.done()}
monitor_jobs(jobs, poll_frequency=1, test_mode=True)
results = [(job.kind, job.result()["outcome"], job.exception()) for job in as_completed(jobs, poll_frequency=1)]
print(json.dumps({**told, "results": results, "stdout": leader.stdout()}))
"""


@pytest.mark.quick
def test_a_driver_monitors_the_jobs_of_a_run_that_goes_on_in_a_successor(cluster: SlurmCluster) -> None:
    recipe, driver = cluster.shared / "driven.toml", cluster.shared / "driver.py"
    recipe.write_text(
        SMALL.format(root=cluster.shared / "runs").replace('name = "small"', 'name = "driven"') + SLURM + GROUPS
    )
    driver.write_text(DRIVER)
    done = cluster.exec(sys.executable, str(driver), str(recipe), *QUICK, *LONG, timeout=300, check=False)
    ours = ClusterRun(cluster, RunDir(cluster.shared / "runs" / "driven"))
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{ours.logs()}"
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["ended"] == "FAILED" and not told["done"], "it exits with 75, and the run goes on in its successor"
    assert told["results"] == [[kind, "done", None] for kind in ("leader", "leader", "rollout")]
    assert "All jobs finished" in done.stdout and told["stdout"]
    assert len(ours.leaders()) == 3, "a successor was queued for the successor"
    sound(ours, STEPS)
