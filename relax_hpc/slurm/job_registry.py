"""The job registry: the rollout jobs that the leader keeps track of, however many there were.

Each record is read once, and Slurm is asked only for jobs that are not known to be over. Rollout jobs are sent with
--no-requeue: one that has ended does not come back.
"""

from __future__ import annotations

from typing import Any

from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.slurm.client import ALIVE, job_state, number
from relax_hpc.slurm.plan import Kind
from relax_hpc.slurm.submission.sbatch import job_files


class JobRegistry:
    """All rollout jobs, base and elastic: a single question to Slurm covers them all."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._records: dict[str, dict[str, Any]] = {}
        self._states: dict[str, str | None] = {}

    def look(self) -> None:
        """Read new records, and ask Slurm for those that are not known to be over."""
        for path in job_files(self._run):
            if path.stem not in self._records:
                self._records[path.stem] = read_json(path)
        ours = [job for job, about in self._records.items() if about["kind"] != "leader"]
        self._states |= job_state([job for job in ours if self._states.get(job) in (None, *ALIVE)])

    def sent(self, kind: Kind) -> dict[str, float]:
        """Job -> when it was sent, for each job of a kind, the oldest first."""
        ours = [about for about in self._records.values() if about["kind"] == kind]
        return {a["id"]: a["submitted"] for a in sorted(ours, key=lambda a: (a["submitted"], number(a["id"])))}

    def states(self, kind: Kind) -> dict[str, str | None]:
        """Job -> state at the last look, for each job of a kind, the oldest first; None where Slurm did not answer."""
        return {job: self._states.get(job) for job in self.sent(kind)}
