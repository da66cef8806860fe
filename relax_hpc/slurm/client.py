"""Questions to Slurm about jobs: their state, why they wait, how to end them. Where Slurm cannot be asked, the answer is
unknown.

    squeue ──► not there any more ──► sacct, where the site has accounting ──► GONE
    no squeue (in a container, on a compute node) ──► scontrol

The rows of a heterogeneous job (6+0, 6+1) are one job, in the state of its first component. A task of an array (7_2) is
a job of its own; the array's number alone means every task of it, in `scancel 7` and `afterany:7` too.
"""

from __future__ import annotations

import getpass
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

ANSWER_S = 60.0
"""How long a Slurm command may take; a busy controller needs many seconds."""
GONE = "GONE"
"""State of a job that Slurm, which does answer, no longer knows: it ended a while ago."""
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
ALIVE = WAITING | {"RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
"""States of a job that still holds a place in the queue or on nodes; all others have ended."""
_REASONS = {
    "None": "about to be looked at",
    "Priority": "other jobs come first",
    "Resources": "next in line, waits for nodes to become free",
    "Dependency": "waits for the job before it to end",
    "DependencyNeverSatisfied": "waits for a job in a way that can never come true: cancel it",
    "BeginTime": "its earliest start has not come; after a requeue Slurm waits about two minutes",
    "JobHeldUser": "held by its owner: `scontrol release ID` lets it go",
    "JobHeldAdmin": "held by an administrator, or after failing too often: ask them",
    "Licenses": "waits for a license",
    "Prolog": "the nodes are being prepared",
    "Cleaning": "its last attempt is being cleaned up",
    "ReqNodeNotAvail": "nodes it asked for are down, drained or reserved (a maintenance may be near: a shorter slurm.time may fit)",
    "NodeDown": "a node it needs is down",
    "BadConstraints": "no node meets slurm.constraint and the rest: it will not start",
    "PartitionDown": "the partition takes jobs but starts none",
    "PartitionInactive": "the partition is inactive",
    "PartitionNodeLimit": "asks for more nodes than the partition allows",
    "PartitionTimeLimit": "slurm.time is more than the partition allows",
    "PartitionConfig": "asks for what the partition does not have",
    "Reservation": "waits for its reservation to begin",
    "InvalidAccount": "slurm.account is not valid",
    "InvalidQOS": "slurm.qos is not valid",
    "AccountNotAllowed": "the partition does not take this slurm.account",
    "QOSNotAllowed": "the partition or account does not take this slurm.qos",
    "AssociationJobLimit": "the account runs as many jobs as it may",
    "AssociationResourceLimit": "the account uses as much as it may",
    "AssociationTimeLimit": "slurm.time is more than the account allows",
    "JobArrayTaskLimit": "as many tasks of the array run as it allows",
    "JobLaunchFailure": "could not be launched, perhaps for a missing directory or a bad node",
    "NonZeroExitCode": "ended with an error",
    "TimeLimit": "reached its time limit",
    "NodeFail": "a node failed",
    "launch failed requeued held": "could not be launched and is held: `scontrol release ID` after looking why",
}  # fmt: skip
_LIMIT = re.compile(
    r"(?P<who>QOS|Assoc)(?P<of>Max|Grp)(?P<what>[A-Za-z]+?)(?P<per>PerUser|PerJob|PerAccount|PerNode)?(Limit)?"
)
_WHO = {"QOS": "the QOS", "Assoc": "the account"}
_WHAT = {
    "CPU": "CPUs", "Cpu": "CPUs", "CPUMinutes": "CPU minutes", "CPURunMinutes": "CPU minutes of running jobs", "CpuRunMinutes": "CPU minutes of running jobs", "Gres": "GPUs", "GRES": "GPUs",
    "Jobs": "jobs", "Job": "jobs", "SubmitJob": "jobs in the queue", "Submit": "jobs in the queue", "Mem": "memory", "Memory": "memory", "MemMinutes": "memory minutes", "Node": "nodes",
    "Nodes": "nodes", "Wall": "hours", "WallDuration": "hours", "Billing": "billing units", "BillingMinutes": "billing minutes",
}  # fmt: skip
_PER = {
    "PerUser": " for one user",
    "PerJob": " in one job",
    "PerAccount": " for one account",
    "PerNode": " on one node",
}


class Seen(NamedTuple):
    """A job as Slurm shows it."""

    state: str
    """As squeue spells it: PENDING, RUNNING, COMPLETED, …; or GONE."""
    reason: str
    """Why it waits or ended, as squeue spells it; empty where unknown."""
    ended: tuple[str, ...] = ()
    """Components of a heterogeneous job that ended while its first one lives, each with its state: "6+1 CANCELLED"."""
    nodes: str = ""
    start: str = ""
    """When it started, or is expected to; empty where Slurm does not say."""

    @property
    def alive(self) -> bool:
        return self.state in ALIVE


def own_job() -> str | None:
    """Id of the job that this process is in, as Slurm's commands take it; None outside of jobs.

    An array's task is named ARRAY_TASK: its SLURM_JOB_ID is a number that one of the tasks shares with the array.
    """
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def number(job: str) -> tuple[int, ...]:
    """A sort key for the id of a job: (12,) for "12", (12, 3) for "12_3"."""
    return tuple(int(part) for part in job.split("_"))


def look(ids: Iterable[str]) -> dict[str, Seen | None]:
    """Ask Slurm about these jobs; each maps to its Seen, or None where Slurm could not be asked."""
    wanted = list(dict.fromkeys(ids))
    if not wanted:
        return {}
    # Without --array, tasks that wait are one row: 7_[2-3,5%2].
    done = ask(["squeue", "-h", "--array", "--states=all", "-o", "%i|%T|%r|%N|%S", "-j", ",".join(wanted)])
    if done is None:
        return {job: _by_scontrol(job) for job in wanted}
    if done.returncode and "Invalid job id" not in done.stderr:
        return dict.fromkeys(wanted)
    seen = _of_rows(done.stdout)
    missing = [job for job in wanted if job not in seen]
    if missing:
        accounted = ask(["sacct", "-n", "-X", "-P", "-o", "JobID,State,Reason", "-j", ",".join(missing)])
        if accounted is not None and accounted.returncode == 0:
            seen |= {job: found for job, found in _of_rows(accounted.stdout).items() if job in missing}
    return {job: seen.get(job, Seen(GONE, "")) for job in wanted}


def job_state(ids: Iterable[str]) -> dict[str, str | None]:
    """Ask Slurm for the states of these jobs alone; None where it could not be asked."""
    return {job: seen.state if seen else None for job, seen in look(ids).items()}


def end_of_job(job: str) -> float | None:
    """Unix time at which Slurm will end a running job; None where unknown or never."""
    said = os.environ.get("SLURM_JOB_END_TIME", "")  # our own job's, since 22.05 only where the site's Slurm sets it
    if job == own_job() and said.isdecimal():
        return float(said)
    done = ask(["squeue", "-h", "-o", "%e", "-j", job])
    text = done.stdout.split()[0] if done is not None and done.stdout.split() else ""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # Slurm says N/A or NONE
        return None


def reason_in_words(reason: str) -> str:
    """Put squeue's reason into words; return the reason itself where there are none for it."""
    name, _, details = reason.strip("()").partition(",")
    limit = _LIMIT.fullmatch(name)
    if name in _REASONS:
        words = _REASONS[name]
    elif limit is not None:
        whole = "uses" if limit["of"] == "Grp" else "allows no more than this job asks for, or uses already,"
        words = f"{_WHO[limit['who']]} {whole} its limit of {_WHAT.get(limit['what'], limit['what'])}{_PER.get(limit['per'] or '', '')}"
    else:
        return reason
    return f"{words} ({reason})" if details else words


def cancel(ids: Iterable[str]) -> bool:
    """Cancel these jobs in whatever state they are; return True if Slurm accepted. Jobs that have ended do no harm."""
    wanted = list(dict.fromkeys(ids))
    if not wanted:
        return True
    done = ask(["scancel", "--quiet", *wanted])
    return done is not None and done.returncode == 0


def our_jobs_of(script: str) -> list[str]:
    """Ids of this user's jobs in the queue that were sent with the script at this path."""
    done = ask(["squeue", "-h", "--array", "-u", getpass.getuser(), "-o", "%i|%o"])
    rows = [line.split("|", 1) for line in done.stdout.splitlines()] if done is not None else []
    return list(dict.fromkeys(whole(row[0]) for row in rows if len(row) == 2 and row[1].strip() == script))


def ask(command: list[str], **variables: str) -> subprocess.CompletedProcess[str] | None:
    """Run a Slurm command; None when it is not installed or does not answer. `variables`: added to its environment."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=ANSWER_S, env=outside_job(os.environ) | variables,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None


def outside_job(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the variables that describe our own job: a job sent from it would inherit them."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT")
    inside = ("SLURM_", "SLURMD_", "SRUN_", "PMI_", "PMIX_", "PMI2_")
    found = {k: v for k, v in environment.items() if k in kept or not k.startswith(inside)}
    return {**found, "LC_ALL": "C"} if "LC_ALL" not in environment else found


def whole(job: str) -> str:
    """Id of the whole job that a row of squeue is about: "6" for the component "6+1"; an array's task "7_2" is its own
    job.
    """
    return re.split(r"[+.]", job.strip(), maxsplit=1)[0]


def _of_rows(text: str) -> dict[str, Seen]:
    """Parse rows "id|state|reason", with or without nodes and start behind them, into whole jobs."""
    rows = [[word.strip() for word in line.split("|")] for line in text.splitlines()]
    return _together(
        (job, Seen(state.split()[0] if state else GONE, reason, (), *("" if word == "N/A" else word for word in place)))
        for job, state, reason, *place in rows
    )


def _together(rows: Iterable[tuple[str, Seen]]) -> dict[str, Seen]:
    """Join rows into whole jobs: the first component speaks for a heterogeneous one."""
    given, found = list(rows), dict[str, Seen]()
    for job, seen in given:
        if whole(job) not in found or job.endswith("+0"):
            found[whole(job)] = seen
    for job, seen in given:
        first = found[whole(job)]
        if seen.nodes and seen.nodes not in first.nodes.split(","):
            found[whole(job)] = first = first._replace(nodes=",".join(filter(None, (first.nodes, seen.nodes))))
        if first.alive and not seen.alive:
            found[whole(job)] = first._replace(ended=(*first.ended, f"{job} {seen.state}"))
    return found


def _by_scontrol(job: str) -> Seen | None:
    done = ask(["scontrol", "show", "job", job, "--oneliner"])
    if done is None:
        return None
    if done.returncode:
        return Seen(GONE, "") if "Invalid job id" in done.stderr + done.stdout else None
    lines = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in done.stdout.splitlines()]
    rows = (
        (f"{job}+{of.get('HetJobOffset', 0)}", Seen(of.get("JobState", GONE), of.get("Reason", "")))
        for of in lines
        if of
    )
    return _together(rows).get(job, Seen(GONE, ""))
