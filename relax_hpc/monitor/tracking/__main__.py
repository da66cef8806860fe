"""`python -m relax_hpc.monitor.tracking RUN`: the follower of a run, as its supervisor starts it."""

from __future__ import annotations

import argparse

from relax_hpc.files.run_dir import open_existing
from relax_hpc.monitor.tracking.follow import follow
from relax_hpc.telemetry import set_up_logging


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m relax_hpc.monitor.tracking",
        description="Copies a run's metrics for other tools; started by a supervisor.",
    )
    parser.add_argument("run", help="the run directory")
    parser.add_argument("--supervisor", type=int, required=True, help="its pid; when it is gone, the follower leaves")
    parser.add_argument("--since", type=float, required=True, help="when it began, in Unix seconds")
    arguments = parser.parse_args()
    set_up_logging("tracking")
    follow(open_existing(arguments.run), arguments.supervisor, arguments.since)


if __name__ == "__main__":
    main()
