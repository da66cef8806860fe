"""Sends further jobs of a run. Submissions that Slurm refuses lost no job, so they are counted apart from losses and tried
again at growing intervals.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.slurm.plan import Kind
from relax_hpc.slurm.submission.sbatch import submit_script
from relax_hpc.telemetry import Telemetry

FIRST_RETRY_S, LONGEST_RETRY_S = 60.0, 300.0
"""Seconds from a refusal to the next attempt: after the first refusal, and at most.

Each attempt asks a busy controller.
"""


@dataclass(slots=True)
class Refusals:
    """Refusals in a row of one kind of job, written to the metrics of its leader."""

    telemetry: Telemetry
    role: str
    """Name of the kind of job in the metrics, such as "rollout job"."""
    count: int = 0
    reason: str = ""
    """Why Slurm refused the last one."""
    retry_at: float = 0.0
    """When sbatch may be tried again, by time.monotonic()."""

    @property
    def due(self) -> bool:
        """Return True if sbatch may be tried now."""
        return time.monotonic() >= self.retry_at

    def send(self, run: RunDir, kind: Kind, *options: str) -> str:
        """Send a job with further options for sbatch and return its id; empty where Slurm refused it."""
        try:
            job = submit_script(run, kind, options=list(options))
        except RunError as error:
            self._note(str(error))
            return ""
        self.forget()
        return job

    def _note(self, reason: str) -> None:
        """Count a refusal, record it, and put the next attempt off."""
        wait_s = min(FIRST_RETRY_S * 2**self.count, LONGEST_RETRY_S)
        self.count, self.reason = self.count + 1, reason
        self.retry_at = time.monotonic() + wait_s
        self.telemetry.metrics("refused", role=self.role, reason=reason, count=self.count, retry_s=wait_s)

    def forget(self) -> None:
        """Begin anew: Slurm took a job."""
        self.count, self.retry_at = 0, 0.0
