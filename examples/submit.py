"""Send runs from Python: to Slurm with `relax_hpc.submit`, or as one function in a job of your own with submitit.

python submit.py recipe.toml                      the run's own jobs on Slurm: leader, successor, rollout jobs; wait for its end
python submit.py recipe.toml --dry-run            print the batch scripts, send nothing
python submit.py recipe.toml --plain local        one job of submitit's that carries out all of it; `slurm` on a cluster
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import submitit

import relax_hpc


def on_slurm(recipe: str, sets: Sequence[str], *, dry_run: bool) -> dict[str, Any] | None:
    """All jobs of the run. Preempted or out of time, it goes on in its successor, and this waits for the end of the run, not of a job."""
    jobs = relax_hpc.submit(recipe, sets=sets, dry_run=dry_run)
    for job in jobs:
        print(f"job {job.job_id}: {job.kind}, {job.state}")
    return jobs[0].result() if jobs else None


def plain(recipe: str, sets: Sequence[str], cluster: str) -> dict[str, Any]:
    """A run on one node, in a job that submitit makes. The same call again goes on with the run, from its last checkpoint."""
    executor = submitit.AutoExecutor(folder="submitit-%j", cluster=cluster)
    executor.update_parameters(name="relax", timeout_min=60, cpus_per_task=2, slurm_use_srun=False)
    job = executor.submit(relax_hpc.run, recipe, sets=list(sets))
    print(f"job {job.job_id}: {job.paths.stdout}")
    outcome: dict[str, Any] = job.result()
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--plain", choices=["local", "slurm"])
    asked = parser.parse_args()
    if asked.plain:
        print(plain(asked.recipe, asked.set, asked.plain))
    else:
        print(on_slurm(asked.recipe, asked.set, dry_run=asked.dry_run))


if __name__ == "__main__":
    main()
