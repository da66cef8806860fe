"""The chain of leader jobs: successors queued in advance, requeueing where chains are not wanted, and when to stop.

job k starts ► queues job k + 1 (afterany:k) ► … preempted, timed out, node lost … ► job k + 1 starts at once
                                             ► done, stopped, cancelled by a person ► job k + 1 is cancelled
job k + 1 cancelled by a person ► job k goes on to its end, and is the last
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass
from typing import Any

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import names, replace, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.tables.slurm import Slurm
from relax_hpc.slurm.client import ALIVE, GONE, WAITING, ask, job_state, look
from relax_hpc.slurm.plan import KINDS, Kind
from relax_hpc.slurm.submission.sbatch import end_jobs, ended_by_us, exclude, jobs, leaders, read_leaders, submit_script
from relax_hpc.supervise.lease import holder
from relax_hpc.supervise.supervisor import is_final, outcome_of
from relax_hpc.telemetry import Telemetry

_ENTRY = re.compile(r"\d+\.json")
NO_SUCCESSOR = "no successor queued: this run ends with this job"


@dataclass(frozen=True, slots=True)
class Leader:
    """A job that led the run, as recorded when it began."""

    job: str
    progress: tuple[int, int]
    """(ledger entries there were, step of the newest checkpoint)."""
    time: float


class Chain:
    """The leader jobs of a run, seen from inside one of them."""

    def __init__(self, run: RunDir, slurm: Slurm, job: str) -> None:
        self._run, self._slurm, self.job = run, slurm, job
        self._telemetry = Telemetry(run, "chain", attempt=0)
        self._said = ""
        self._led: Leader | None = None

    def begin(self) -> str | None:
        """Return the reason why this job must not go on with the run, after canceling what else waits; None when it
        must go on.
        """
        before = self._read()
        cancelled = self._cancelled_before(before)
        if cancelled is not None and holder(self._run) is not None:
            # It stood between us and the job that leads; that one ends the chain when it ends.
            return f"job {cancelled} was cancelled by a person, and the job before it is at work"
        reason = self._over(before, cancelled)
        if reason is not None:
            self.cancel_waiting()
        return reason

    def lead(self) -> None:
        """Record that this job leads; call it once the lease is held."""
        self._led = self._led or Leader(self.job, self._progress(), time.time())
        before = self._read()
        if self._led not in before:  # a try that the file system cut short may have written it
            lines = [json.dumps(asdict(leader)).encode() + b"\n" for leader in (*before, self._led)]
            replace(leaders(self._run), b"".join(lines))

    def queue_successor(self) -> None:
        """Queue successors until `queue_ahead` jobs wait for this one's end; those that were sent before count.

        sbatch may not work on a compute node: then only those sent before are there. A successor that a person
        cancelled is not
        replaced. Raises RunError where Slurm refuses one.
        """
        if self._slurm.restart != "chain":
            return
        if not self._slurm.queue_ahead:
            self._say("slurm.queue_ahead = 0")
        successors, cancelled = self._successors()
        if cancelled:
            reason = _cancelled(cancelled[0])
            self._telemetry.metrics("refused", role="successor", reason=reason)
            self._say(reason)
            return
        for _ in range(self._slurm.queue_ahead - len(successors)):
            successors.append(self._submit(after=successors[-1] if successors else self.job))

    def end(self, outcome: dict[str, Any], warned: bool) -> None:
        """End the chain when the run is over; else, when only this job came to its end, have the run go on.

        warned: the first signal came while the job ran, as before a time limit or preemption. A job that is ended
        without one (scancel; preemption without a grace time) is requeued by Slurm, if by anybody.
        """
        if is_final(outcome) or self._unwanted(outcome):
            self.cancel_waiting()
        elif outcome.get("suspect") and self._slurm.restart == "chain":
            before = self._waiting("leader")  # successors sent before it was known
            exclude(self._run, outcome["suspect"], outcome["reason"])
            self._submit(after=self.job)
            end_jobs(self._run, before, "its successor avoids a node that keeps failing")
        elif self._slurm.restart == "chain":
            self.queue_successor()
        elif self._slurm.restart == "requeue" and outcome["outcome"] == "preempted" and warned:
            self._requeue()
        elif self._slurm.restart == "requeue" and outcome["outcome"] == "failed" and self._lost_component():
            self._submit(after=self.job)  # a requeued job would wait forever for the component that ended

    def is_ending(self) -> bool:
        """Return True if Slurm is ending this job at this moment."""
        return job_state([self.job])[self.job] == "COMPLETING"

    def last(self) -> str | None:
        """Id of the job that led last; None before the first."""
        leaders = self._read()
        return leaders[-1].job if leaders else None

    def cancelled_by_a_person(self, job: str) -> bool:
        """Return True if Slurm says that `job` was cancelled, and the run itself did not cancel it."""
        return job_state([job])[job] == "CANCELLED" and not ended_by_us(self._run, job)

    def stop(self, reason: str) -> None:
        """Record that the run was stopped."""
        replace(
            self._run.outcome,
            to_json({"outcome": "stopped", "reason": reason, "step": self._steps(), "time": time.time()}),
        )

    def cancel_waiting(self) -> None:
        """Cancel the run's jobs that have not begun."""
        end_jobs(self._run, self._waiting(*KINDS), "the run is over")

    def _unwanted(self, outcome: dict[str, Any]) -> bool:
        """Return True if a person cancelled the successor; the run is recorded as stopped then, unless it failed."""
        if self._slurm.restart != "chain" or not (cancelled := self._successors()[1]):
            return False
        if outcome["outcome"] != "failed":
            self.stop(_cancelled(cancelled[0]))
        return True

    def _lost_component(self) -> bool:
        seen = look([self.job])[self.job]
        return seen is not None and bool(seen.ended)

    def _over(self, before: list[Leader], cancelled: str | None) -> str | None:
        if self._run.stop.exists():
            reason = "it was asked to stop"
            self.stop(reason)
            return reason
        outcome = outcome_of(self._run)
        if outcome is not None and is_final(outcome):
            return f"{outcome['outcome']} already: {outcome['reason'] or outcome['step']}"
        if cancelled is not None:
            reason = f"job {cancelled} was cancelled by a person"
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

    def _cancelled_before(self, leaders: list[Leader]) -> str | None:
        return next(filter(self.cancelled_by_a_person, self._before(leaders)), None)

    def _before(self, leaders: list[Leader]) -> set[str]:
        """Ids of the last leader and of the job that this one waited for: a person may have cancelled that one before
        it led.
        """
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
        """Have Slurm requeue this job; send a new job where scontrol is missing (in a container) or requeueing is
        disabled.
        """
        done = ask(["scontrol", "requeue", self.job])
        if done is not None and done.returncode < 0 and self.is_ending():
            return  # the requeue worked: scontrol, a process of the job, was ended with it
        if done is None or done.returncode:
            reason = "scontrol is not there, or does not answer" if done is None else done.stderr.strip()
            self._telemetry.metrics("refused", role="successor", reason=reason)
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
        """Warn in the job's log that nobody goes on after this job; once for each wording."""
        if why != self._said:
            self._said = why
            self._telemetry.log.warning("%s: %s", NO_SUCCESSOR, why)

    def _successors(self) -> tuple[list[str], list[str]]:
        """Return (successors, those that a person cancelled): ids of leader jobs that wait for this job's end, or began
        at it.

        Successors wait for one another in turn. A job that an earlier leader sent while it was cut off is none: it
        waits for that leader, begins at once, and leaves again. A job that waits for this one's end and has ended
        itself was cancelled by a person: it cannot have ended otherwise.
        """
        sent = [job for job in jobs(self._run) if job["kind"] == "leader" and job["dependency"]]
        states = job_state([job["id"] for job in sent])
        found, cancelled = [self.job], []
        for job in sent:  # the oldest first
            if job["dependency"].removeprefix("afterany:") not in found:
                continue
            if states[job["id"]] in {None, *ALIVE}:
                found.append(job["id"])
            elif states[job["id"]] in ("CANCELLED", GONE) and not ended_by_us(self._run, job["id"]):
                cancelled.append(job["id"])
        return found[1:], cancelled

    def _waiting(self, *kinds: Kind) -> list[str]:
        ids = [job["id"] for job in jobs(self._run) if job["kind"] in kinds and job["id"] != self.job]
        return [job for job, state in job_state(ids).items() if state is None or state in WAITING]

    def _read(self) -> list[Leader]:
        return [Leader(line["job"], tuple(line["progress"]), line["time"]) for line in read_leaders(self._run)]

    def _progress(self) -> tuple[int, int]:
        return self._steps(), max(self._run.checkpoint_steps(), default=-1)

    def _steps(self) -> int:
        # Not by Path.glob: to it a folder that cannot be listed now is empty, and a run of no steps makes no progress.
        ledger = self._run.ledger
        entries = [name for folder in names(ledger) if folder.isdigit() for name in names(ledger / folder)]
        return max((int(name[:-5]) + 1 for name in entries if _ENTRY.fullmatch(name)), default=0)


def _cancelled(successor: str) -> str:
    return f"job {successor}, which was to go on with the run, was cancelled by a person"
