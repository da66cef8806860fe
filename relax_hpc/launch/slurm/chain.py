"""Which job goes on with a run: successors queued in advance, requeueing where chains are not wanted, and when to stop.

job k starts ► queues job k + 1 (afterany:k) ► … preempted, timed out, node lost … ► job k + 1 starts at once
                                             ► done, stopped, cancelled by a person ► job k + 1 is cancelled
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from relax_hpc.launch.slurm.plan import KINDS, Kind
from relax_hpc.launch.slurm.queue_state import ALIVE, WAITING, ask, cancel, job_state
from relax_hpc.launch.slurm.send import exclude, jobs, leaders, read_leaders, submit_script
from relax_hpc.launch.supervisor import is_final, outcome_of
from relax_hpc.recipe.slurm import Slurm
from relax_hpc.run_dir import RunDir, RunError, replace, to_json
from relax_hpc.telemetry import Telemetry

NO_SUCCESSOR = "no successor queued: this run ends with this job"


@dataclass(frozen=True, slots=True)
class Leader:
    """A job that led the run, as written down when it began."""

    job: str
    progress: tuple[int, int]
    """Ledger entries there were, and the step of the newest checkpoint."""
    time: float


class Chain:
    """The leader jobs of a run, from inside one of them."""

    def __init__(self, run: RunDir, slurm: Slurm, job: str) -> None:
        self._run, self._slurm, self.job = run, slurm, job
        self._telemetry = Telemetry(run, "chain", attempt=0)
        self._said = ""

    def begin(self) -> str | None:
        """Why this job must not go on with the run, after cancelling what else waits; None when it must."""
        reason = self._over(self._read())
        if reason is not None:
            self.cancel_waiting()
        return reason

    def lead(self) -> None:
        """Write down that this job leads; the lease is ours."""
        led = [*self._read(), Leader(self.job, self._progress(), time.time())]
        replace(leaders(self._run), b"".join(json.dumps(asdict(leader)).encode() + b"\n" for leader in led))

    def queue_successor(self) -> None:
        """Have `queue_ahead` jobs wait for this one's end; sbatch may not work on a compute node, then those sent before count.

        Raises RunError where Slurm refuses one.
        """
        if self._slurm.restart != "chain":
            return
        if not self._slurm.queue_ahead:
            self._say("slurm.queue_ahead = 0")
        successors = self._successors()
        for _ in range(self._slurm.queue_ahead - len(successors)):
            successors.append(self._submit(after=successors[-1] if successors else self.job))

    def end(self, outcome: dict[str, Any], warned: bool) -> None:
        """Cancel what waits when the run is over; have it go on when this job, not the run, came to its end.

        warned: the first signal came while the job ran, as before a time limit or preemption. A job that is ended
        without one (scancel; preemption without a grace time) is requeued by Slurm, if by anybody.
        """
        if is_final(outcome):
            self.cancel_waiting()
        elif outcome.get("suspect") and self._slurm.restart == "chain":
            before = self._waiting("leader")  # sent before that was known
            exclude(self._run, outcome["suspect"], outcome["reason"])
            self._submit(after=self.job)
            cancel(before)
        elif self._slurm.restart == "chain":
            self.queue_successor()
        elif self._slurm.restart == "requeue" and outcome["outcome"] == "preempted" and warned:
            self._requeue()

    def is_ending(self) -> bool:
        """Whether Slurm is ending this job at this moment."""
        return job_state([self.job])[self.job] == "COMPLETING"

    def last(self) -> str | None:
        """The job that led last."""
        leaders = self._read()
        return leaders[-1].job if leaders else None

    def cancelled_by_a_person(self, job: str) -> bool:
        """Whether Slurm says that `job` was cancelled, and not by one of our own agents."""
        return job_state([job])[job] == "CANCELLED" and not self._ended(job).exists()

    def stop(self, reason: str) -> None:
        """Write down that the run was stopped."""
        replace(
            self._run.outcome,
            to_json({"outcome": "stopped", "reason": reason, "step": self._steps(), "time": time.time()}),
        )

    def cancel_waiting(self) -> None:
        """Cancel the run's jobs that have not begun."""
        cancel(self._waiting(*KINDS))

    def _over(self, before: list[Leader]) -> str | None:
        if self._run.stop.exists():
            reason = "it was asked to stop"
            self.stop(reason)
            return reason
        outcome = outcome_of(self._run)
        if outcome is not None and is_final(outcome):
            return f"{outcome['outcome']} already: {outcome['reason'] or outcome['step']}"
        for job in self._before(before):
            if self.cancelled_by_a_person(job):
                reason = f"job {job} was cancelled by a person"
                self.stop(reason)
                return reason
        if len(before) >= self._slurm.max_jobs:
            return self._fail(f"the run has had {len(before)} jobs (slurm.max_jobs = {self._slurm.max_jobs})")
        lately = before[-self._slurm.max_idle_jobs :]
        if len(lately) == self._slurm.max_idle_jobs and all(leader.progress == self._progress() for leader in lately):
            return self._fail(
                f"{len(lately)} jobs in a row made no step (slurm.max_idle_jobs = {self._slurm.max_idle_jobs}), the last is "
                f"{lately[-1].job}: read {self._run.logs}, then send the run again with `relax-hpc submit {self._run.root}`"
            )
        return None

    def _before(self, leaders: list[Leader]) -> set[str]:
        """The last leader, and the job that this one waited for: a person may have cancelled it before it led."""
        awaited = [
            job["dependency"].removeprefix("afterany:")
            for job in jobs(self._run)
            if job["id"] == self.job and job["dependency"]
        ]
        return {*(leader.job for leader in leaders[-1:]), *awaited} - {self.job}

    def _fail(self, reason: str) -> str:
        about = {"outcome": "failed", "fatal": True, "reason": reason, "step": self._steps(), "time": time.time()}
        replace(self._run.outcome, to_json(about))
        return reason

    def _requeue(self) -> None:
        """Where scontrol is missing (in a container) or requeueing is disabled, a new job does the same."""
        done = ask(["scontrol", "requeue", self.job])
        if done is not None and done.returncode < 0 and self.is_ending():
            return  # it worked: scontrol is a process of the job, and was ended with it
        if done is None or done.returncode:
            reason = "scontrol is not there, or does not answer" if done is None else done.stderr.strip()
            self._telemetry.metrics("refused", role="requeue", reason=reason)
            self._submit(after=self.job)

    def _submit(self, after: str) -> str:
        try:
            job = submit_script(self._run, "leader", after=after)
        except RunError as error:
            self._telemetry.metrics("refused", role="successor", reason=str(error))
            if after == self.job:
                self._say(str(error))
            raise
        self._telemetry.metrics("queued", role="successor", job=job, after=after)
        return job

    def _say(self, why: str) -> None:
        """Tell the job's log, once for each wording, that nobody goes on after this job."""
        if why != self._said:
            self._said = why
            self._telemetry.log.warning("%s: %s", NO_SUCCESSOR, why)

    def _successors(self) -> list[str]:
        """Leaders that begin when this one has ended, one after the other; or have begun, where it has. One that a leader before this one sent
        while it was cut off is none: it waits for that one, begins at once, and leaves again."""
        sent = [job for job in jobs(self._run) if job["kind"] == "leader" and job["dependency"]]
        states = job_state([job["id"] for job in sent])
        found = [self.job]
        for job in sent:  # the oldest first
            if job["dependency"].removeprefix("afterany:") in found and states[job["id"]] in {None, *ALIVE}:
                found.append(job["id"])
        return found[1:]

    def _waiting(self, *kinds: Kind) -> list[str]:
        ids = [job["id"] for job in jobs(self._run) if job["kind"] in kinds and job["id"] != self.job]
        return [job for job, state in job_state(ids).items() if state is None or state in WAITING]

    def _ended(self, job: str) -> Any:
        return self._run.slurm / "ended" / f"{job}.json"

    def _read(self) -> list[Leader]:
        return [Leader(line["job"], tuple(line["progress"]), line["time"]) for line in read_leaders(self._run)]

    def _progress(self) -> tuple[int, int]:
        return self._steps(), max(self._run.checkpoint_steps(), default=-1)

    def _steps(self) -> int:
        return max((int(p.stem) + 1 for p in self._run.ledger.glob("*/[!.]*.json")), default=0)
