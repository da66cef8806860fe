"""submitit, with our scripts: no pickle in the shared directory, heterogeneous jobs, states without accounting.

ScriptExecutor(run, plan).send("leader") ──► RunJob: .job_id .state .wait() .result() .cancel()
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import submitit
from submitit.core import utils
from submitit.slurm import slurm

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.slurm.client import ALIVE, cancel, look
from relax_hpc.slurm.plan import Kind, Plan, job_name
from relax_hpc.slurm.submission.sbatch import jobs, submit_script
from relax_hpc.slurm.submission.scripts import render
from relax_hpc.supervise.supervisor import ENDED, is_final, outcome_of

LOOK_S = 10.0
"""Seconds between two looks at a job: Slurm's controller serves thousands of users."""
SETTLE_S = 15.0
"""How late a file from another node may become visible here, in seconds."""


class QueueWatcher(slurm.SlurmInfoWatcher):
    """Asks squeue for the states of jobs, and sacct only where it works."""

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.get_info(job_id, mode=mode).get("State") or "UNKNOWN"

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        state = self.get_state(job_id, mode=mode)
        return state != "UNKNOWN" and state not in ALIVE

    def update(self) -> None:
        self._num_calls += 1
        for job, seen in look(self._registered - self._finished).items():
            if seen is not None:
                self._info_dict[job] = {"JobID": job, "State": seen.state, "Reason": seen.reason}
        self._last_status_check = time.time()
        self._finished |= {job for job in self._registered if self.is_done(job, mode="cache")}


class RunJob(slurm.SlurmJob[dict[str, Any]]):
    """A job of a run. Its result is the run's outcome, whichever of the run's jobs brings it about."""

    watcher = QueueWatcher(delay_s=int(LOOK_S))

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self.run = RunDir(Path(folder).parent)
        about = read_json(self.run.slurm / "jobs" / f"{job_id}.json") or {}
        self.kind: str = about.get("kind", "leader")
        self.dependency: str = about.get("dependency") or ""
        """The dependency as sbatch takes it: "afterany:4"; empty where the job waits for no other."""
        self.name = job_name(self.run.root.name, self.kind)
        self._since: float = about.get("submitted", 0.0)

    def outcome(self) -> dict[str, Any] | None:
        """How the run ended since this job was sent; None while it has not, or goes on in another job."""
        found = outcome_of(self.run)
        if found is None or found["outcome"] not in ENDED or found["time"] < self._since:
            return None
        # A run that failed goes on in a successor where another node may do better.
        return None if not is_final(found) and self._somebody_works() else found

    def done(self, force_check: bool = False) -> bool:
        """Return True if this job has ended; the run may go on in its successor."""
        return bool(self.watcher.is_done(self.job_id, mode="force" if force_check else "standard"))

    def results(self) -> list[dict[str, Any]]:
        """Wait for the run's end and return its outcome.

        Raises when it failed, or when no job is left to go on with it.
        """
        gone_since: float | None = None
        while (outcome := self.outcome()) is None:
            if self._somebody_works():
                gone_since = None
            elif gone_since is None:
                gone_since = time.monotonic()
            elif time.monotonic() - gone_since > SETTLE_S:
                raise utils.UncompletedJobError(
                    f"'{self.run.root}' has no job any more and no outcome: job {self.job_id} ended as {self.state}; "
                    f"its log: {self.log or self.run.logs / 'slurm'}. `relax-hpc submit {self.run.root}` goes on with it"
                )
            time.sleep(min(LOOK_S, 2.0))
        if outcome["outcome"] == "failed":
            raise utils.FailedJobError(f"'{self.run.root}' failed at step {outcome['step']}: {outcome['reason']}")
        return [outcome]

    def result(self) -> dict[str, Any]:
        return self.results()[0]

    def exception(self) -> utils.UncompletedJobError | None:
        try:
            self.results()
        except utils.UncompletedJobError as error:
            return error
        return None

    def cancel(self, check: bool = True) -> None:
        if not cancel([self.job_id]) and check:
            raise RunError(f"scancel of job {self.job_id} failed; try `scancel {self.job_id}`")

    @property
    def log(self) -> Path | None:
        """Slurm's capture of the script's output; None before the job starts."""
        return next((self.run.logs / "slurm").glob(f"*-{self.job_id}.out"), None)

    def stdout(self) -> str | None:
        return self.log.read_text(errors="replace") if self.log else None

    def stderr(self) -> str | None:
        """The job's output again: stdout and stderr go to one file, in order."""
        return self.stdout()

    def _somebody_works(self) -> bool:
        """Return True if a leader of the run is in the queue or at work, or when Slurm does not say."""
        leaders = {about["id"] for about in jobs(self.run) if about["kind"] == "leader"} | {self.job_id}
        for job in leaders:
            self.watcher._registered.add(job)
        return not all(self.watcher.is_done(job) for job in leaders)


class ScriptExecutor(submitit.SlurmExecutor):
    """Sends the batch scripts of one run."""

    job_class = RunJob

    def __init__(self, run: RunDir, plan: Plan) -> None:
        try:
            super().__init__(folder=run.slurm, max_num_timeout=0)
        except RuntimeError:
            raise RunError(
                "there is no srun on this machine: send the run from a login node of the cluster, or run it here with "
                "`relax-hpc run`"
            ) from None
        self.run, self.plan = run, plan

    def send(self, kind: Kind, after: str | None = None, begun: str | None = None) -> RunJob:
        """Send a job of this kind; it starts when job `after` has ended, or `begun` has begun.

        Raises RunError in sbatch's words.
        """
        return self._sent(submit_script(self.run, kind, after=after, begun=begun))

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return render(self.plan, cast(Kind, command.split()[0]))

    def _submit_command(self, command: str) -> RunJob:
        return self._sent(submit_script(self.run, cast(Kind, command.split()[0])))

    def _sent(self, job_id: str) -> RunJob:
        return self.job_class(folder=self.folder, job_id=job_id)

    def _internal_process_submissions(self, delayed_submissions: Any) -> NoReturn:
        raise TypeError(
            "ScriptExecutor sends a run's scripts, not functions: use relax_hpc.submit(recipe), or in an executor of your "
            "own `executor.submit(relax_hpc.run, 'recipe.toml')`"
        )
