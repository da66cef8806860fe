"""A throw-away Slurm cluster on one machine; `tools/slurm-cluster --help` teaches it."""
