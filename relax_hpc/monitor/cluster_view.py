"""The cluster part of a run's view: jobs, what comes next, rollout nodes."""

from __future__ import annotations

import time

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from relax_hpc.monitor.status import Status
from relax_hpc.slurm.chain import NO_SUCCESSOR
from relax_hpc.slurm.overview import UNKNOWN, JobRow, Overview
from relax_hpc.slurm.plan import job_name

PAST_SHOWN = 4
"""How many former rollout nodes to show: the newest."""


def plain_table(*headers: str, whole: str | None = None) -> Table:
    """A table without lines, whose words are folded where they do not fit, but for those of the column `whole`."""
    columns = (Column(header, overflow="fold", no_wrap=header == whole) for header in headers)
    return Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="dim")


def parts(status: Status) -> list[RenderableType]:
    """Tables and lines to stand below the roles; none when no job was ever sent."""
    overview = status.slurm
    if overview is None or not (overview.jobs or overview.node_agents):
        return []
    return [
        Text(),
        _jobs(status.recipe.run.name, overview),
        _chain(status, overview),
        *_refused(overview),
        *([_node_agents(status, overview)] if overview.node_agents else []),
    ]


def one_line(overview: Overview) -> str:
    """The run's jobs in one line, for use without a terminal."""
    alive = [f"{job.kind} {job.id} {job.state.lower()}{_why(job)}" for job in overview.jobs if job.alive]
    return "; ".join(alive) or "no job is in the queue"


def _jobs(run: str, overview: Overview) -> Table:
    table = plain_table("job", "name", "state", "nodes", "start", "remarks", whole="name")
    for job in overview.shown():
        state = "unknown" if job.state == UNKNOWN else job.state.lower()
        table.add_row(*map(Text, (job.id, job_name(run, job.kind), state, job.nodes, _start(job), job.why)))
    return table


def _chain(status: Status, overview: Overview) -> Text:
    words = [f"restarts so far: {overview.restarts}"]
    following, slurm = overview.successor, status.recipe.slurm
    if following is not None:
        words.append(f"next: job {following.id}")
    elif slurm is not None and slurm.restart == "chain" and status.state == "running" and overview.leaders:
        why = overview.refused.get("successor", "") if slurm.queue_ahead else "slurm.queue_ahead = 0"
        words.append(f"{NO_SUCCESSOR}{f' ({why})' if why else ''}")
    if any(job.state == UNKNOWN for job in overview.jobs):
        words.append("Slurm cannot be asked on this machine: this is what the run's files say")
    return Text("; ".join(words), style="dim")


def _refused(overview: Overview) -> list[Text]:
    """Lines about rollout jobs that Slurm refused and that will be sent again."""
    alive = {f"{job.kind} job" for job in overview.jobs if job.alive}
    found = {role: why for role, why in overview.refused.items() if role != "successor" and role not in alive}
    return [Text(f"no {role}: {why}", style="yellow") for role, why in found.items()]


def _node_agents(status: Status, overview: Overview) -> Table:
    table = plain_table("rollout node", "state", "heartbeat", "group", "job", "workers")
    limit_s, now = status.recipe.supervision.node_agent_silent_s, time.time()
    there = [b for b in overview.node_agents.values() if b["state"] != "gone" and now - b["time"] <= limit_s]
    past = sorted((b for b in overview.node_agents.values() if b not in there), key=lambda b: -b["time"])
    for heartbeat in [*sorted(there, key=lambda b: (b["group"], b["index"])), *past[:PAST_SHOWN]]:
        state = Text(heartbeat["state"])
        if heartbeat["state"] != "gone" and heartbeat not in there:
            state = Text("silent", style="red" if status.state == "running" else "")
        ago = f"{now - heartbeat['time']:.0f} s ago"
        workers = str(len(heartbeat.get("claim_dirs", ())))
        table.add_row(heartbeat["host"], state, ago, heartbeat["group"], str(heartbeat.get("job") or ""), workers)
    if len(past) > PAST_SHOWN:
        table.add_row(Text(f"and {len(past) - PAST_SHOWN} more that are gone", style="dim"))
    return table


def _start(job: JobRow) -> str:
    when = job.start.replace("T", " ")
    return f"expected {when}" if when and job.waits else when


def _why(job: JobRow) -> str:
    words = [job.why, f"expected {job.start}" if job.start and job.waits else ""]
    said = ", ".join(word for word in words if word)
    return f" ({said})" if said else ""
