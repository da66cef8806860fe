"""Sends jobs: sbatch with a script of the run, patient with a busy controller; each job is recorded.

    RUN/slurm/leader.sbatch ──sbatch──► id ──► RUN/slurm/jobs/ID.json

Light to import: a run's supervisor sends successors with it.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import names, publish, read_json, replace, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe import load_recipe
from relax_hpc.slurm.client import ask, cancel, number, our_jobs_of
from relax_hpc.slurm.plan import KINDS, Kind, Plan, make_plan
from relax_hpc.slurm.submission.scripts import render
from relax_hpc.supervise.io_retry import at_first

ATTEMPTS = 6
LONGEST_WAIT_S = 60.0
_JOB = re.compile(r"\d+(_\d+)?\.json")
_BUSY = re.compile(
    r"Socket timed out|Unable to contact slurm controller|Slurm backup controller in standby|temporarily unable to accept|"
    r"Resource temporarily unavailable|Slurm temporarily unable|Connection refused|Zero Bytes were transmitted|"
    r"slurm_persist_conn_open|Transport endpoint is not connected",
    re.IGNORECASE,
)
_TOO_FEW_NODES = re.compile(r"node (count|configuration)|nodes? .*not available", re.IGNORECASE)
_LIMIT = "(QOS|Assoc)(Max|Min|Grp)"
_ELSE = "or another slurm.qos or slurm.account"
_FIXES = (
    (r"Access/permission denied",
     "slurm.partition: it takes no jobs of yours, or none from this machine (`scontrol show partition`: AllocNodes, AllowGroups). Where "
     "compute nodes may not send jobs, slurm.queue_ahead = the jobs that the run needs sends all of them at once"),
    (r"partition specified|partition name|Invalid partition", "slurm.partition: `sinfo -s` lists partitions"),
    (r"account or account/partition|Invalid account", "slurm.account or slurm.partition: `sacctmgr show assoc user=$USER` lists yours"),
    (f"{_LIMIT}(Submit|Jobs?(Per|Limit|$))", f"slurm.queue_ahead or slurm.shape = 'single', for fewer jobs at once, {_ELSE}"),
    (f"{_LIMIT}Wall", f"slurm.time, {_ELSE}"),
    (f"{_LIMIT}Cpu(Run)?Minutes", f"slurm.time, slurm.cpus_per_task, the numbers of nodes, {_ELSE}"),
    (f"{_LIMIT}Cpu", f"slurm.cpus_per_task, the numbers of nodes, {_ELSE}"),
    (f"{_LIMIT}GRES", f"slurm.gpus_per_node, slurm.gres or slurm.gpus_per_task, the numbers of nodes, {_ELSE}"),
    (f"{_LIMIT}Mem", f"slurm.mem, {_ELSE}"),
    (f"{_LIMIT}Node", f"trainer.nodes and rollout.nodes, {_ELSE}"),
    (f"violates accounting|[a-z]Limit\\b|{_LIMIT}", f"slurm.time, the numbers of nodes and GPUs, fewer jobs at once (slurm.queue_ahead), {_ELSE}"),
    (r"qos", "slurm.qos: `sacctmgr show assoc user=$USER format=account,partition,qos` lists yours"),
    (r"time limit|--time|time specification", "slurm.time: `sinfo -o '%P %l'` shows each partition's limit"),
    (r"gres|gpu|tres", "slurm.gpus_per_node, slurm.gres or slurm.gpus_per_task: `sinfo -o '%P %G'` shows what nodes have"),
    (r"Memory (specification|required)|--mem", "slurm.mem: `sinfo -o '%P %m'` shows what nodes have, in MB"),
    (r"node name", "slurm.exclude: `sinfo -N` lists the nodes"),
    (r"feature|constraint", "slurm.constraint: `sinfo -o '%P %f'` shows the features"),
    (r"reservation", "slurm.reservation: `scontrol show reservation` lists them"),
    (f"{_TOO_FEW_NODES.pattern}|More processors|too many|CPU count",
     "trainer.nodes, rollout.nodes, slurm.cpus_per_task, slurm.mem and the GPUs: `sinfo -o '%P %D %c %m %G'` shows what there is"),
    (r"unrecognized option|invalid option|unknown option|ambiguous", "slurm.options: `sbatch --help` lists what this Slurm takes"),
    (r"requeue|not permitted", "slurm.restart or slurm.options"),
)  # fmt: skip
"""(pattern in sbatch's words, the recipe's key that mends it); the first match counts."""


class _Busy(Exception):
    """Raised when the controller did not answer: it is not known whether it took the job."""


def write_scripts(run: RunDir, plan: Plan) -> None:
    """Write the scripts of all kinds of jobs into RUN/slurm; elastic jobs may be sent at any time."""
    (run.slurm / "jobs").mkdir(parents=True, exist_ok=True)
    # Slurm makes no directory for output: the job would just fail.
    (run.logs / "slurm").mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        replace(script(run, kind), render(plan, kind).encode())


def script(run: RunDir, kind: Kind) -> Path:
    return run.slurm / f"{kind}.sbatch"


def read_leaders(run: RunDir) -> list[dict[str, Any]]:
    """The records of the jobs that led the run, the newest last."""
    path = leaders(run)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def submit_script(
    run: RunDir,
    kind: Kind,
    *,
    after: str | None = None,
    begun: str | None = None,
    options: Sequence[str] = (),
    first_wait_s: float = 2.0,
) -> str:
    """Send RUN/slurm/KIND.sbatch, record the job, and return its id.

    `after`: the job starts when that one has ended, however; `begun`: when that one has begun. `options`: further ones
    for sbatch, over those in the script. Waits up to minutes for a controller that is busy or being restarted. Where too few
    nodes would be left, none is avoided any more: what fails on all of them is not a node.

    Raises RunError with sbatch's own words and the key of the recipe that mends it.
    """
    path = script(run, kind)
    if not path.is_file():
        raise RunError(f"'{run.root}' has no batch script '{path}': `relax-hpc submit {run.root}` writes them")
    dependency = f"afterany:{after}" if after else f"after:{begun}" if begun else None
    waits = [f"--dependency={dependency}"] if dependency else []
    avoiding = _excluding(run, kind)
    retrying = Retrying(
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_random_exponential(multiplier=first_wait_s, max=LONGEST_WAIT_S),
        retry=retry_if_exception_type(_Busy),
        reraise=True,
    )

    def send(*avoiding: str) -> str:
        return retrying(_send_once, run, ["sbatch", "--parsable", *waits, *avoiding, *options, str(path)], path)

    try:
        try:
            job = send(*avoiding)
        except RunError as error:
            if not (avoiding and _TOO_FEW_NODES.search(str(error))):
                raise
            _excluded(run).unlink(missing_ok=True)
            job = send()
    except _Busy as error:
        raise RunError(
            f"Slurm's controller does not answer, after {ATTEMPTS} attempts: {error}; look with `scontrol ping`, then "
            f"`relax-hpc submit {run.root}`"
        ) from None
    # Slurm has the job: without a record of it, another would be sent.
    at_first(run)(lambda: record(run, job, kind, dependency=dependency))
    return job


def exclude(run: RunDir, host: str, reason: str) -> None:
    """Have all jobs sent from now on avoid a node that keeps failing, until a person sends the run again."""
    replace(_excluded(run), to_json({**(read_json(_excluded(run)) or {}), host: reason}))


def _excluded(run: RunDir) -> Path:
    return run.slurm / "excluded.json"


def _excluding(run: RunDir, kind: Kind) -> list[str]:
    """sbatch's --exclude options, with the recipe's nodes too.

    An option on sbatch's command line replaces the script's, in each component.
    """
    hosts = read_json(_excluded(run))
    if not hosts:
        return []
    plan = make_plan(load_recipe(run.recipe))
    groups = [plan.trainer if kind == "leader" else plan.rollout]
    if kind == "leader" and plan.slurm.shape == "het":
        groups.append(plan.rollout)
    components = [f"--exclude={','.join(filter(None, (group.asks.exclude, *hosts)))}" for group in groups]
    return [word for component in components for word in (":", component)][1:]


def record(run: RunDir, job: str, kind: Kind, *, dependency: str | None = None) -> None:
    """Record that a job of this run was sent."""
    folder = run.slurm / "jobs"
    folder.mkdir(parents=True, exist_ok=True)
    about = {"id": job, "kind": kind, "script": str(script(run, kind)), "dependency": dependency, "submitted": time.time(), "by": _me()}  # fmt: skip
    replace(folder / f"{job}.json", to_json(about))


def record_own(run: RunDir, job: str, kind: Kind) -> None:
    """Record the calling job where nobody did: a person sent its script with sbatch."""
    if not (run.slurm / "jobs" / f"{job}.json").exists():
        record(run, job, kind)


def end_jobs(run: RunDir, ids: Iterable[str], reason: str) -> bool:
    """Cancel jobs of the run; return False where Slurm did not accept it.

    Each is recorded first, so that nobody takes the end for a person's scancel.
    """
    wanted = list(ids)
    about = to_json({"by": _me(), "reason": reason, "time": time.time()})
    # Each caller writes its own note: all node agents of a run end a lost leader at once, and one that gets no answer takes back only its own.
    notes = [_ended(run) / f"{job}.{uuid.uuid4().hex[:8]}.json" for job in wanted]
    ended = False
    try:
        for note in notes:
            publish(note, about)
        ended = cancel(wanted)
    finally:
        if not ended:
            for note in notes:
                note.unlink(missing_ok=True)
    return ended


def ended_by_us(run: RunDir, job: str) -> bool:
    """Return True if `end_jobs` cancelled the job."""
    return any(name.partition(".")[0] == job for name in names(_ended(run)))


def _ended(run: RunDir) -> Path:
    return run.slurm / "ended"


def _me() -> str:
    return f"{getpass.getuser()}@{os.uname().nodename} pid {os.getpid()}"


def forget_end(run: RunDir) -> None:
    """Forget the outcome and the attempts so far: a person sends the run again."""
    for path in (run.stop, run.outcome, leaders(run), _excluded(run)):
        path.unlink(missing_ok=True)


def leaders(run: RunDir) -> Path:
    """The file in which jobs that led the run record themselves; it begins anew when a person sends the run again."""
    return run.slurm / "leaders.jsonl"


def job_files(run: RunDir) -> list[Path]:
    """Records of all jobs, each file named by its job's id; other names in the folder are nobody's."""
    folder = run.slurm / "jobs"
    return [folder / name for name in names(folder) if _JOB.fullmatch(name)]


def jobs(run: RunDir) -> list[dict[str, Any]]:
    """All jobs that were sent for this run, the oldest first: id, kind, script, dependency, submitted, by."""
    found = [read_json(path) for path in job_files(run)]
    return sorted(found, key=lambda about: (about["submitted"], number(about["id"])))


def _send_once(run: RunDir, command: list[str], path: Path) -> str:
    before = {about["id"] for about in jobs(run)}
    # The script puts the run's code first again: along a chain the path would grow.
    path_before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    done = ask(command, PYTHONPATH=os.pathsep.join(p for p in path_before if p != str(run.snapshot / "code")))
    if done is None:
        _explain_silence(command[0])
        return _accepted(path, before, "sbatch did not return")
    if done.returncode == 0:
        found = re.match(r"\d+", done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "")
        if found is None:
            raise RunError(f"sbatch printed no job id for '{path}' but {done.stdout!r}: is it wrapped by the site?")
        return found[0]
    words = (
        " ".join(done.stderr.replace("sbatch: ", "").replace("error: ", "").split()) or f"exit code {done.returncode}"
    )
    if _BUSY.search(words):
        return _accepted(path, before, words)
    raise RunError(f"sbatch refuses '{path}': {words}; {_fix(run, words)}")


def _accepted(path: Path, before: set[str], words: str) -> str:
    """Find the id of a job that a controller took although it timed out; sent again, there would be two."""
    new = [job for job in our_jobs_of(str(path)) if job not in before]
    if new:
        return new[0]
    raise _Busy(words)


def _explain_silence(program: str) -> None:
    if not any(os.access(os.path.join(folder, program), os.X_OK) for folder in os.get_exec_path()):
        raise RunError(
            f"there is no {program} on this machine ({os.uname().nodename}): send the run from a login node of the cluster, "
            "or run it here with `relax-hpc run`"
        )


def _fix(run: RunDir, words: str) -> str:
    if "configuration source" in words:
        return "Slurm's commands find no slurm.conf here: send it from a login node, or set SLURM_CONF"
    return (
        f"change {key_to_change(words)}. The run is there: `relax-hpc submit {run.root} --set KEY=VALUE` sends it again"
    )


def key_to_change(words: str) -> str:
    """The recipe's key that mends what sbatch complains of, or the reason for which a limit keeps a job waiting."""
    return next((fix for pattern, fix in _FIXES if re.search(pattern, words, re.IGNORECASE)), "the keys of [slurm]")
