"""Runs on a Slurm cluster: `plan` and `steps` and `render` are pure; `send` and `queue_state` talk to Slurm; `submit` does it all."""
