"""`--on-nodes`: a short job for each group, one task a node; collects what its nodes find, and which ones say nothing.

plan ► srun (trainer nodes) ┐
     ► srun (rollout nodes) ┴─► SCRATCH/found-GROUP-INDEX.json ─► rows; jobs are cancelled and files removed in any case

srun and not sbatch --wait, which polls less and less often. Slurm is asked for the job by its name, which is unique.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import relax_hpc
from relax_hpc.files.publish import read_json, to_json, write_file
from relax_hpc.planning.doctor.checks import Check, failed
from relax_hpc.slurm.client import ask, cancel, outside_job, reason_in_words
from relax_hpc.slurm.plan import Group, Plan, gres_text
from relax_hpc.slurm.srun import container, step_environment, step_python
from relax_hpc.slurm.submission.sbatch import key_to_change
from relax_hpc.slurm.submission.scripts import node_script, place

POLL_S = 0.2
ASK_EVERY_S = 2.0
LEAVE_S = 5.0
"""How long tasks may take to leave once told to."""
NODES_WAIT = 0.6
"""Share of the time-out after which a node stops waiting for the others, so that it can still say so."""


@dataclass(slots=True)
class Job:
    """The job of one group."""

    group: Group
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    id: str = ""
    state: str = ""
    reason: str = ""
    nodes: str = ""
    since: float = field(default_factory=time.monotonic)
    """When the job was sent; once it runs, when it was first seen to run."""

    def words(self) -> str:
        """The end of srun's log."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return "; ".join(line.replace("srun: ", "").replace("error: ", "") for line in lines[-3:])


def on_nodes(plan: Plan, folder: Path, timeout_s: float, *, libraries: bool) -> list[Check]:
    """Check the nodes of each group from a job there, within about twice `timeout_s`: to start, then to answer."""
    _code(folder)
    jobs: list[Job] = []
    try:
        for group in plan.groups:
            jobs.append(_start(plan, group, folder, timeout_s, libraries))
        return [check for job in _wait(jobs, folder, timeout_s) for check in _findings(job, folder, timeout_s)]
    finally:
        _end(jobs, folder)


def _start(plan: Plan, group: Group, folder: Path, timeout_s: float, libraries: bool) -> Job:
    both = plan.slurm.shape == "single" and not plan.shares_devices
    gres = plan.trainer.node_gres + plan.rollout.node_gres if both else group.node_gres
    asked = {
        "group": group.name, "nodes": group.nodes, "wait_s": timeout_s * NODES_WAIT, "leave_s": timeout_s, "interface": plan.slurm.interface,
        "gpus": sum(count for name, count in gres.items() if name.startswith("gpu")), "libraries": libraries,
        "trainer_processes": plan.trainer.nodes * plan.trainer.per_node,
    }  # fmt: skip
    about, script, log = (folder / f"{group.name}{suffix}" for suffix in (".json", ".sh", ".log"))
    write_file(about, to_json(asked))
    write_file(script, node_script(plan, ['exec "$@"']).encode())
    script.chmod(0o700)
    name = f"doctor-{uuid.uuid4().hex[:10]}"
    minutes = max(1, round(2 * timeout_s / 60))
    options = [
        f"--job-name={name}", *place(group), f"--time={minutes}", f"--nodes={group.nodes}", f"--ntasks={group.nodes}", "--ntasks-per-node=1",
        "--kill-on-bad-exit=0", "--no-kill", *([f"--gres={gres_text(gres)}"] if gres else []), *([f"--mem={group.asks.mem}"] if group.asks.mem else []),
    ]  # fmt: skip
    # Lines of slurm.setup are for the machine, not for an image.
    begin = container(plan, group) or [str(script)]
    inside = [*begin, step_python(plan), "-P", "-m", "relax_hpc.planning.doctor.probe", str(about)]
    environment = step_environment(outside_job(os.environ)) | {"PYTHONPATH": str(folder / "code")}
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["srun", *options, *inside], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True, cwd="/",
        )  # fmt: skip
    return Job(group, name, process, log)


def _wait(jobs: list[Job], folder: Path, timeout_s: float) -> list[Job]:
    """Wait until all nodes have answered, or time is up for those that have not."""
    asked_at = 0.0
    while True:
        if time.monotonic() - asked_at > ASK_EVERY_S:
            asked_at = time.monotonic()
            _ask(jobs)
        late = [time.monotonic() - job.since > timeout_s for job in jobs]
        over = [late[i] or job.process.poll() is not None or not _silent(job, folder) for i, job in enumerate(jobs)]
        if all(over):
            return jobs
        time.sleep(POLL_S)


def _ask(jobs: list[Job]) -> None:
    names = ",".join(job.name for job in jobs)
    done = ask(["squeue", "-h", "-u", getpass.getuser(), "-n", names, "-o", "%j|%i|%T|%r|%N"])
    for line in done.stdout.splitlines() if done is not None else ():
        name, number, state, reason, nodes = line.split("|", 4)
        job = next(job for job in jobs if job.name == name)
        if state == "RUNNING" and job.state != "RUNNING":
            job.since = time.monotonic()
        job.id, job.state, job.reason, job.nodes = number, state, reason, nodes.strip() or job.nodes


def _found(job: Job, folder: Path) -> list[dict[str, Any]]:
    found = [read_json(folder / f"found-{job.group.name}-{i}.json") for i in range(job.group.nodes)]
    return [about for about in found if about is not None]


def _silent(job: Job, folder: Path) -> bool:
    return len(_found(job, folder)) < job.group.nodes


def _findings(job: Job, folder: Path, timeout_s: float) -> list[Check]:
    found = _found(job, folder)
    checks = _by_what(job, [(about["host"], Check(**check)) for about in found for check in about["checks"]])
    if len(found) == job.group.nodes:
        return checks
    return [_why_not(job, [about["host"] for about in found], timeout_s), *checks]


def _why_not(job: Job, answered: list[str], timeout_s: float) -> Check:
    """Explain, as far as is known, why nodes did not answer."""
    what, expected = f"{job.group.name} nodes", f"{job.group.nodes} nodes that answer"
    if job.state == "PENDING":
        words = f"job {job.id} did not start within {timeout_s:.0f} s: {reason_in_words(job.reason)}"
        return failed(what, words, expected, "try again later, or with a longer --timeout")
    if not job.nodes:
        words = job.words() or "the job ended before it was seen"
        return failed(what, words, expected, f"change {key_to_change(words)}")
    silent = sorted(set(_names(job.nodes)) - set(answered)) or [job.nodes]
    said = f" ({job.words()})" if job.words() else ""
    words = f"no answer from {', '.join(silent)} within {timeout_s:.0f} s{said}"
    return failed(what, words, expected, f"slurm.exclude = '{','.join(silent)}', and tell the site; `scontrol show node {silent[0]}`")  # fmt: skip


def _names(nodes: str) -> list[str]:
    """Expand Slurm's n[1-3] into names."""
    done = ask(["scontrol", "show", "hostnames", nodes])
    return done.stdout.split() if done is not None and done.returncode == 0 else [nodes]


def _by_what(job: Job, checks: list[tuple[str, Check]]) -> list[Check]:
    """Make one row of what all nodes report alike, and a row for each node that differs for the worse."""
    rows: list[Check] = []
    for what in dict.fromkeys(check.what for _, check in checks):
        of = [(host, check) for host, check in checks if check.what == what]
        good = [(host, check) for host, check in of if check.verdict in ("ok", "note")]
        if good:
            host, first = good[0]
            same = {check.found for _, check in good} == {first.found}
            found = first.found if same else f"{len({h for h, _ in good})} nodes, such as {host}: {first.found}"
            rows.append(Check(f"{job.group.name}: {what}", first.verdict, found))
        bad = [(host, check) for host, check in of if check.verdict not in ("ok", "note")]
        rows += [replace(c, what=f"{job.group.name}: {what}", found=f"{host}: {c.found}") for host, c in bad]
    return rows


def _code(folder: Path) -> None:
    """Copy our own code into `folder` where it is a source tree: nodes need not see where we are installed."""
    package = Path(relax_hpc.__file__).parent
    (folder / "code").mkdir()
    installed = package.parent.name in ("site-packages", "dist-packages")
    if (package.parent / "setup.cfg").exists() or not installed:
        shutil.copytree(package, folder / "code" / "relax_hpc", ignore=shutil.ignore_patterns("__pycache__"))


def _end(jobs: list[Job], folder: Path) -> None:
    """End all tasks: by the file `over`, then by scancel, then by signal. Nothing of them stays in the queue."""
    with contextlib.suppress(OSError):
        write_file(folder / "over", b"", durable=False)
    deadline = time.monotonic() + LEAVE_S
    for job in jobs:
        if job.process.poll() is None and job.state == "RUNNING" and not _silent(job, folder):
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.process.wait(max(0.1, deadline - time.monotonic()))
    if any(job.process.poll() is None for job in jobs):
        _ask(jobs)
        cancel(job.id for job in jobs if job.id and job.process.poll() is None)
    for job in jobs:
        if job.process.poll() is None:
            job.process.terminate()
            try:
                job.process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:  # srun keeps waiting for a node that is cut off
                job.process.kill()
                job.process.wait()
