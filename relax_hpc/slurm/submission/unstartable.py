"""Finds jobs that Slurm took and will never start: once after sending, and from rollout nodes that wait for a leader.

squeue %r ──► a reason that waiting does not end? ──► submit: cancel all that was sent, say what mends it
                                                  └─► rollout job: leave, its nodes would idle for nobody
"""

from __future__ import annotations

import getpass
import re
import time
from collections.abc import Iterable

from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.slurm.client import WAITING, ask, reason_in_words, whole
from relax_hpc.slurm.submission.sbatch import jobs, key_to_change
from relax_hpc.supervise.lease import Holder

LOOKS_AFTER_SENDING = 4
UNDECIDED = ("None", "Priority", "WaitingForScheduling")
"""Reasons of a job that the scheduler has not looked at yet, or that other jobs come before."""
LOOK_S = 60.0
"""Seconds between a rollout job's looks at a leader that waits."""
_NODES = "trainer.nodes and rollout.nodes"
_ASSOCIATIONS = "`sacctmgr show assoc user=$USER format=account,partition,qos` lists yours"
MENDED_BY = {
    "PartitionNodeLimit": f"{_NODES}: `sinfo -s` shows how many nodes a partition has, `scontrol show partition` how many it allows",
    "PartitionTimeLimit": "slurm.time: `sinfo -o '%P %l'` shows each partition's limit",
    "PartitionConfig": f"{_NODES}, slurm.cpus_per_task, slurm.mem and the GPUs: `sinfo -o '%P %D %c %m %G'` shows what there is",
    "BadConstraints": "slurm.constraint, slurm.mem and the GPUs: `sinfo -o '%P %f %m %G'` shows what there is",
    "MaxMemPerLimit": "slurm.mem: `scontrol show partition` shows MaxMemPerNode and MaxMemPerCPU",
    "AccountNotAllowed": f"slurm.account or slurm.partition: {_ASSOCIATIONS}",
    "InvalidAccount": f"slurm.account: {_ASSOCIATIONS}",
    "InvalidQOS": f"slurm.qos: {_ASSOCIATIONS}",
    "QOSNotAllowed": f"slurm.qos or slurm.partition: {_ASSOCIATIONS}",
    "ReservationDeleted": "slurm.reservation: `scontrol show reservation` lists them",
    "DependencyNeverSatisfied": "nothing: send the run again",
    "JobHeldUser": "slurm.options.hold, or let it go with `scontrol release ID`",
    "JobHoldMaxRequeue": "look at its log for why it was requeued so often, then `scontrol release ID`",
    "launch failed requeued held": "look at its log and its nodes, then `scontrol release ID`",
}  # fmt: skip
"""Reasons that no waiting ends, and what mends each.

Meanings: https://slurm.schedmd.com/job_reason_codes.html (24.05). Left out, because they do end: resources, priority,
limits on a group's or account's use, nodes and partitions that are down, an administrator's hold. `PartitionNodeLimit`
"can also indicate that required nodes are DOWN", says that page; 22.05 has other words for those.
"""
_TOO_MUCH = re.compile(r"(QOS|Assoc)Max\w+Per(Job|Node)(Limit)?|QOSMin\w+")
"""One job asks for more, or less, than the QOS or account allows for a single job."""
_PER_USER = re.compile(r"(QOS|Assoc)Max(\w+PerUser|Jobs)(Limit)?")
"""Limits on all running jobs of a user together: they end when others of the user's jobs do."""
_TOGETHER = "the jobs of a run need to run at the same time (slurm.shape = 'single' makes one of them)"


def hopeless(ids: Iterable[str]) -> dict[str, str]:
    """Job -> why no waiting starts it, with the recipe's key that mends it; empty where Slurm cannot be asked.

    Waits a few seconds until the scheduler has looked at all of them: they may have been sent a moment ago.
    """
    wanted = list(ids)
    for _ in range(LOOKS_AFTER_SENDING):
        rows = _rows(wanted)
        found = _hopeless(rows, wanted)
        if found or not any(state in WAITING and reason in UNDECIDED for _, state, reason in rows):
            return found
        time.sleep(1)
    return {}


def _rows(ids: list[str]) -> list[tuple[str, str, str]]:
    """(job, state, reason) of jobs that have not ended; several for a heterogeneous job whose components differ in
    reason.
    """
    done = ask(["squeue", "-h", "--array", "-o", "%i|%T|%r", "-j", ",".join(ids)]) if ids else None
    rows = [line.split("|", 2) for line in done.stdout.splitlines()] if done is not None else []
    return [(whole(row[0]), row[1].strip(), row[2].strip()) for row in rows if len(row) == 3]


def _hopeless(rows: list[tuple[str, str, str]], ours: list[str]) -> dict[str, str]:
    waiting = [(job, reason, _fix(reason, ours)) for job, state, reason in rows if state in WAITING]
    return {job: f"{reason}: {reason_in_words(reason)}; change {fix}" for job, reason, fix in waiting if fix}


def _fix(reason: str, ours: list[str]) -> str:
    name = reason.partition(",")[0].strip("()")
    if name in MENDED_BY:
        return MENDED_BY[name]
    if _TOO_MUCH.fullmatch(name):
        return key_to_change(name)
    return f"{key_to_change(name)}; {_TOGETHER}" if _PER_USER.fullmatch(name) and not _others(ours) else ""


def _others(ours: list[str]) -> bool:
    """Return True if this user has other jobs at work, whose end may make room, or where Slurm does not say."""
    done = ask(
        ["squeue", "-h", "--array", "--states=RUNNING,COMPLETING,SUSPENDED", "-u", getpass.getuser(), "-o", "%i"]
    )
    return done is None or done.returncode != 0 or bool({whole(job) for job in done.stdout.split()} - set(ours))


class Vigil:
    """Watches the leader from a rollout job that waits for it, and learns when none can come."""

    def __init__(self, run: RunDir, recipe: Recipe) -> None:
        self._run, self._silent_s = run, recipe.supervision.leader_silent_s
        self._leader = Holder(run)
        self._next_s = self._silent_s

    def in_vain(self) -> str:
        """Say why no leader of the run can start; empty while one leads, may come, or nobody knows."""
        silent_s = self._leader.silent_for()
        if silent_s < self._silent_s:
            self._next_s = self._silent_s
        if silent_s < self._next_s:
            return ""
        self._next_s = silent_s + LOOK_S
        leaders = [job["id"] for job in jobs(self._run) if job["kind"] == "leader"]
        rows = _rows(leaders)
        first = {job for job, _, reason in rows if reason != "Dependency"}  # the other jobs wait for these
        why = _hopeless(rows, leaders)
        return "; ".join(f"job {job}: {words}" for job, words in why.items()) if first and first <= why.keys() else ""
