"""A run's job as submitit's: `submitit.helpers.as_completed` and `monitor_jobs`, `job.awaitable()` and the like take it.

RunJob(RUN/slurm, ID)   state, get_info, cancel, stdout: this job   ·   done, wait, result, exception: the run, whichever job ends it
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.slurm import slurm

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.slurm.client import ALIVE, look
from relax_hpc.slurm.plan import job_name
from relax_hpc.slurm.submission.sbatch import jobs
from relax_hpc.supervise.supervisor import ENDED, is_final, outcome_of

LOOK_S = 10
"""Seconds between two looks at jobs: Slurm's controller serves thousands of users."""


class SqueueWatcher(slurm.SlurmInfoWatcher):
    """Asks squeue for the states of jobs, where submitit's own asks sacct: many sites have no accounting."""

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        state = self.get_state(job_id, mode=mode)
        return state != "UNKNOWN" and state not in ALIVE

    def update(self) -> None:
        seen = look(self._registered - self._finished)
        self._info_dict |= {
            job: {"JobID": job, "State": said.state, "Reason": said.reason} for job, said in seen.items() if said
        }
        self._finished |= {job for job in seen if self.is_done(job, mode="cache")}
        self._num_calls, self._last_status_check = self._num_calls + 1, time.time()


class LogPaths(utils.JobPaths):
    """Paths of a job whose stdout and stderr go to one file, in order."""

    def __init__(self, folder: Path, job_id: str, log: Path) -> None:
        super().__init__(folder, job_id)
        self.log = log

    stdout = stderr = property(lambda self: self.log)


class RunJob(slurm.SlurmJob[dict[str, Any]]):
    """A job of a run. It is done when the run is: one that is preempted or out of time goes on in its successor."""

    watcher = SqueueWatcher(delay_s=LOOK_S)

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        """folder: RUN/slurm. Raises RunError for a job that is not the run's."""
        super().__init__(folder, job_id, tasks)
        self.run = RunDir(Path(folder).parent)
        about = read_json(self.run.slurm / "jobs" / f"{job_id}.json")
        if about is None:
            raise RunError(f"'{self.run.root}' has no job {job_id}")
        self.kind: str = about["kind"]
        self.dependency: str = about["dependency"] or ""
        """The dependency as sbatch takes it: "afterany:4"; empty where the job waits for no other."""
        self.name = job_name(self.run.root.name, self.kind)
        self._since: float = about["submitted"]
        self._paths = LogPaths(self.run.slurm, job_id, self.run.logs / "slurm" / f"{self.name}-{job_id}.out")

    def done(self, force_check: bool = False) -> bool:
        """Return True if the run has ended, or no job is left that goes on with it."""
        return self._outcome() is not None or not self._goes_on("force" if force_check else "standard")

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        """Return ("success", the run's outcome), or ("error", why it failed).

        Raises UncompletedJobError when no job is left to go on with it.
        """
        last_seen = time.monotonic()
        while (outcome := self._outcome()) is None:
            if self._goes_on():
                last_seen = time.monotonic()
            # What another node wrote may become visible late here.
            elif time.monotonic() - last_seen > self._results_timeout_s:
                raise utils.UncompletedJobError(
                    f"'{self.run.root}' has no job any more and no outcome: job {self.job_id} ended as {self.state}; "
                    f"its log: {self.paths.stdout}. `relax-hpc submit {self.run.root}` goes on with it"
                )
            time.sleep(1)
        if outcome["outcome"] == "failed":
            return "error", f"'{self.run.root}' failed at step {outcome['step']}: {outcome['reason']}"
        return "success", outcome

    def _outcome(self) -> dict[str, Any] | None:
        """How the run ended since this job was sent; None while it has not, or goes on in another job."""
        found = outcome_of(self.run)
        if found is None or found["outcome"] not in ENDED or found["time"] < self._since:
            return None
        # A run that failed goes on in a successor where another node may do better.
        return None if not is_final(found) and self._goes_on() else found

    def _goes_on(self, mode: str = "standard") -> bool:
        """Return True if this job or a leader of the run is in the queue or at work, or when Slurm does not say."""
        ours = {self.job_id, *(about["id"] for about in jobs(self.run) if about["kind"] == "leader")}
        return not all([self.watcher.is_done(job, mode) for job in ours])
