"""Runs on a Slurm cluster: `plan`, `srun` and `submission.scripts` are pure; `client` and `submission` talk to Slurm."""
