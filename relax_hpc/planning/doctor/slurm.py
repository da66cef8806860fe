"""Compares the cluster with the recipe's [slurm]: partitions, limits, nodes, preemption, and sbatch's own words.

scontrol show partition, sinfo -N ──► Cluster ──► checks (pure)          rendered scripts ──► sbatch --test-only
"""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

from relax_hpc.planning.doctor.checks import Check, failed, note, ok, warning
from relax_hpc.planning.doctor.files import kind_of
from relax_hpc.recipe.tables.slurm import time_s
from relax_hpc.slurm.client import ask
from relax_hpc.slurm.plan import Group, Plan
from relax_hpc.slurm.submission.sbatch import key_to_change
from relax_hpc.slurm.submission.scripts import render
from relax_hpc.slurm.submission.submit import LOCAL_ROOTS

PROGRAMS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
OLDEST = (22, 5)
"""Oldest release of Slurm that is tested: (year, month)."""
UNUSABLE = ("down", "drain", "fail", "maint", "unk", "power", "reboot", "future", "planned_down")
_MEMORY = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}


@dataclass(frozen=True, slots=True)
class Node:
    """A node as `sinfo -N` shows it."""

    name: str
    state: str
    cpus: int
    memory_mb: int
    gres: dict[str, int]  # {"gpu": 4, "gpu:a100": 4}

    @property
    def usable(self) -> bool:
        return not self.state.endswith("*") and not self.state.startswith(UNUSABLE)


@dataclass(slots=True)
class Cluster:
    """Partitions, nodes and configuration as Slurm's controller reports them."""

    partitions: dict[str, dict[str, str]] = field(default_factory=dict)
    nodes: dict[str, list[Node]] = field(default_factory=dict)
    """Partition -> its nodes."""
    config: dict[str, str] = field(default_factory=dict)

    @property
    def default(self) -> str | None:
        return next((name for name, about in self.partitions.items() if about.get("Default") == "YES"), None)


def programs() -> list[Check]:
    """Check Slurm's commands and the controller."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return [failed("commands", f"no {', '.join(missing)} on PATH", "Slurm's client commands", "call this on a login node of the cluster (`module load slurm`?), or use `relax-hpc run`")]  # fmt: skip
    said = ask(["sbatch", "--version"])
    text = said.stdout.strip() if said is not None else ""
    found = re.search(r"(\d+)\.(\d+)", text)
    version = ok("commands", text or "they do not say their version")
    if found is not None and (int(found[1]), int(found[2])) < OLDEST:
        newer = f"{OLDEST[0]}.{OLDEST[1]:02d} or newer"
        version = warning("commands", text, newer, "older releases were not tried")
    ping = ask(["scontrol", "ping"])
    words = " ".join(ping.stdout.split()) if ping is not None else "no answer"
    if " UP" not in words:
        return [version, failed("controller", words, "a controller that is UP", "wait, or ask the site; SLURM_CONF names the cluster")]  # fmt: skip
    return [version, ok("controller", words)]


def look() -> Cluster:
    """Ask the controller, with three commands in all."""
    cluster = Cluster()
    for line in _lines("scontrol", "show", "partition", "--all", "--oneliner"):
        about = fields(line)
        if "PartitionName" in about:
            cluster.partitions[about["PartitionName"]] = about
    for line in _lines("sinfo", "--all", "-h", "-N", "-o", "%N|%R|%T|%c|%m|%G"):
        name, partition, state, *numbers, gres = line.split("|")
        cpus, memory = (int(re.sub(r"\D.*", "", text) or 0) for text in numbers)
        cluster.nodes.setdefault(partition, []).append(Node(name, state, cpus, memory, gres_of(gres)))
    for line in _lines("scontrol", "show", "config"):
        key, equals, value = line.partition("=")
        if equals:
            cluster.config[key.strip()] = value.strip()
    return cluster


def _lines(*command: str) -> list[str]:
    done = ask([*command])
    return done.stdout.splitlines() if done is not None else []


def fields(line: str) -> dict[str, str]:
    """Parse `A=1 B=2` into a dictionary."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def gres_of(text: str) -> dict[str, int]:
    """Parse sinfo's "gpu:a100:4(S:0-1),shard:8" into counts by name, with and without type."""
    found: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        name, *kind, count = part.split(":") if ":" in part else (part, "1")
        if name and count.isdecimal():
            for key in {name, ":".join([name, *kind])}:
                found[key] = found.get(key, 0) + int(count)
    return found


def cluster_checks(plan: Plan, cluster: Cluster, checkpoint_s: float | None) -> list[Check]:
    """Make all checks that need nothing to be sent. checkpoint_s: of this run's longest checkpoint; None if unknown."""
    groups = plan.groups
    scale = plan.slurm.autoscale
    if scale is not None and scale.partition is not None and len(groups) > 1:
        asks = plan.elastic.asks.model_copy(update={"partition": scale.partition})
        groups.append(replace(plan.elastic, asks=asks))
    checks: list[Check] = []
    for group in groups:
        names = (group.asks.partition or cluster.default or "").split(",")
        for name in names:
            checks += _partition(plan, group, name, cluster, checkpoint_s)
    return [*checks, *_requeue(plan, cluster), *_walltime(plan, checkpoint_s)]


def _partition(plan: Plan, group: Group, name: str, cluster: Cluster, checkpoint_s: float | None) -> list[Check]:
    what, about = f"{group.name}: partition {name}", cluster.partitions.get(name)
    there = ", ".join(cluster.partitions) or "none"
    if not name:
        return [failed(f"{group.name}: partition", "none given, and the cluster has no default", f"one of {there}", "--set slurm.partition=NAME")]  # fmt: skip
    if about is None:
        return [failed(what, "no such partition", f"one of {there}", f"--set slurm.partition=NAME (or slurm.{group.name}.partition)")]  # fmt: skip
    if about.get("State") != "UP":
        return [failed(what, f"it is {about.get('State')}", "UP", "another partition, or wait: `sinfo -s`")]
    nodes = cluster.nodes.get(name, [])
    return [*_limits(what, group, about), *_nodes(what, plan, group, nodes), *_preemption(what, plan, group, about, name, cluster, checkpoint_s)]  # fmt: skip


def _limits(what: str, group: Group, about: dict[str, str]) -> list[Check]:
    asked = time_s(group.asks.time or 60) or 0
    most = time_s(about.get("MaxTime", "")) or math.inf  # UNLIMITED is no number
    if asked > most:
        return [failed(what, f"slurm.time = '{group.asks.time}'", f"at most {about['MaxTime']} (MaxTime)", f"--set slurm.time={about['MaxTime']}; the run goes on in successors")]  # fmt: skip
    if about.get("MaxNodes", "UNLIMITED").isdecimal() and group.nodes > int(about["MaxNodes"]):
        return [failed(what, f"{group.name}.nodes = {group.nodes}", f"at most {about['MaxNodes']} (MaxNodes)", f"lower {group.name}.nodes, or another partition")]  # fmt: skip
    return [ok(what, f"UP, time limit {about.get('MaxTime')}, {about.get('TotalNodes')} nodes")]


def _nodes(what: str, plan: Plan, group: Group, nodes: list[Node]) -> list[Check]:
    """Check that enough nodes are large enough, and up."""
    asks, single = group.asks, plan.slurm.shape == "single"
    both = (plan.trainer, plan.rollout) if single else (group,)
    cpus = sum((g.asks.cpus_per_task or 1) * g.per_node for g in both)
    together = single and not plan.shares_devices
    gres = dict(plan.trainer.node_gres + plan.rollout.node_gres if together else group.node_gres)
    memory = memory_mb(asks.mem) if asks.mem else 0
    parts = [f"{cpus} CPUs", *(f"{count} {name}" for name, count in gres.items()), asks.mem if memory else None]
    wanted = ", ".join(filter(None, parts))
    large = [
        node for node in nodes
        if node.cpus >= cpus and node.memory_mb >= memory and all(node.gres.get(n, 0) >= c for n, c in gres.items())
    ]  # fmt: skip
    title = f"{what}: nodes"
    kinds = sorted({_kind(node) for node in nodes})
    if len(large) < group.nodes:
        keys = f"{group.name}.nodes, slurm.gpus_per_node, slurm.cpus_per_task, slurm.mem"
        return [failed(title, f"{len(large)} of {len(nodes)} nodes have {wanted}; nodes have: {'; '.join(kinds)}", f"{group.nodes} nodes", f"lower what is asked ({keys}), or another partition")]  # fmt: skip
    up = [node for node in large if node.usable]
    off = ", ".join(f"{node.name} {node.state}" for node in large if not node.usable)
    words = f"{len(up)} of {len(nodes)} nodes have {wanted} and are up" + (f"; not up: {off}" if off else "")
    if len(up) < group.nodes:
        fix = "the job waits until they are back: `sinfo -R` says why"
        return [warning(title, words, f"{group.nodes} nodes", fix)]
    return [ok(title, words)]


def _kind(node: Node) -> str:
    gres = "".join(f", {count} {name}" for name, count in sorted(node.gres.items()) if count)
    return f"{node.cpus} CPUs, {node.memory_mb} MB{gres}"


def memory_mb(text: str) -> float:
    """Convert '64G' to MB, in units of 1024 as Slurm counts."""
    unit = text[-1].upper()
    return float(text[:-1]) * _MEMORY[unit] if unit in _MEMORY else float(text)


def _preemption(
    what: str, plan: Plan, group: Group, about: dict[str, str], name: str, cluster: Cluster, checkpoint_s: float | None
) -> list[Check]:
    """Check that a preempted trainer has the time for a checkpoint."""
    title, kind = f"{what}: preemption", cluster.config.get("PreemptType", "preempt/none")
    mode = about.get("PreemptMode", "OFF")
    if group.name != "trainer" or kind == "preempt/none" or mode == "OFF":
        return []
    if kind == "preempt/partition_prio":
        own = {node.name for node in cluster.nodes.get(name, [])}
        tier = int(about.get("PriorityTier", 1))
        above = [
            other for other, told in cluster.partitions.items()
            if int(told.get("PriorityTier", 1)) > tier and own & {node.name for node in cluster.nodes.get(other, [])}
        ]  # fmt: skip
        if not above:
            return [ok(title, "no other partition comes first on its nodes")]
    grace = int(re.sub(r"\D.*", "", about.get("GraceTime", "0")) or 0)
    needed, measured = (checkpoint_s, "a checkpoint of this run took") if checkpoint_s is not None else (plan.slurm.signal_lead_s, "slurm.signal_lead_s is")  # fmt: skip
    words = f"{mode}, GraceTime {grace} s, {measured} {needed:.0f} s"
    if mode in ("SUSPEND", "GANG", "SUSPEND,GANG", "GANG,SUSPEND"):
        return [warning(title, words, "REQUEUE or CANCEL", "a suspended trainer keeps its lease silent: use another partition")]  # fmt: skip
    if grace < needed:
        return [warning(title, words, f"{needed:.0f} s of grace", "steps since the last checkpoint are trained again after a preemption: lower run.checkpoint_every")]  # fmt: skip
    return [ok(title, words)]


def _requeue(plan: Plan, cluster: Cluster) -> list[Check]:
    allowed = cluster.config.get("JobRequeue", "?")
    words = f"slurm.restart = '{plan.slurm.restart}', the site's JobRequeue = {allowed}"
    if plan.slurm.restart == "requeue" and allowed == "0":
        return [warning("restart", words, "JobRequeue = 1", "the script asks with --requeue, which sites may refuse: slurm.restart = 'chain'")]  # fmt: skip
    return [ok("restart", words)]


def _walltime(plan: Plan, checkpoint_s: float | None) -> list[Check]:
    if checkpoint_s is None:
        return [note("checkpoint time", f"not measured yet; slurm.signal_lead_s = {plan.slurm.signal_lead_s} sets aside room for one")]  # fmt: skip
    lead, limit = plan.slurm.signal_lead_s, time_s(plan.trainer.asks.time or 60) or 0
    words = f"a checkpoint took {checkpoint_s:.1f} s at most, slurm.signal_lead_s = {lead}, slurm.time = '{plan.trainer.asks.time}'"
    wanted = max(10, int(3 * checkpoint_s))
    if lead < checkpoint_s:
        return [failed("checkpoint time", words, f"signal_lead_s above {checkpoint_s:.0f}", f"--set slurm.signal_lead_s={wanted}")]  # fmt: skip
    if lead < 2 * checkpoint_s:
        return [warning("checkpoint time", words, f"signal_lead_s of {wanted} or more: the step must end too", f"--set slurm.signal_lead_s={wanted}")]  # fmt: skip
    if limit - lead < 10 * checkpoint_s:
        return [warning("checkpoint time", words, "jobs that are far longer than a checkpoint", "raise slurm.time")]
    return [ok("checkpoint time", words)]


def try_scripts(plan: Plan, folder: Path) -> list[Check]:
    """Ask sbatch about each script without sending it: account, QOS and the site's own rules show only here."""
    checks = []
    for kind in plan.jobs:
        what, path = f"sbatch: {kind}", folder / f"{kind}.sbatch"
        path.write_text(render(plan, kind))
        done = ask(["sbatch", "--test-only", str(path)])
        if done is None:
            checks.append(failed(what, "no answer", "an answer", "look with `scontrol ping`"))
            continue
        words = " ".join(re.sub("sbatch: |error: ", "", done.stderr + done.stdout).split())
        if done.returncode:
            checks.append(failed(what, words, "to be taken", f"change {key_to_change(words)}"))
        else:
            checks.append(ok(what, re.sub(r"^Job \d+ to start", "would start", words)))
    return checks


def root_is_shared(plan: Plan, local_root_ok: bool) -> Check:
    """Check if nodes can be expected to see the run's directory."""
    real = plan.root.resolve()
    kind, networked = kind_of(plan.root)
    local = next((root for root in LOCAL_ROOTS if real.is_relative_to(root)), None)
    fix = "--set run.root=DIR on the shared file system; --local-root-ok if it is one"
    if local is not None and not local_root_ok:
        return failed("run.root", f"'{plan.root}' lies in {local}, which each machine has for itself", "a folder that nodes see", fix)  # fmt: skip
    if networked or local_root_ok:
        return ok("run.root", f"'{plan.root}' on {kind}" + ("" if networked else " (taken to be shared)"))
    return warning("run.root", f"'{plan.root}' lies on {kind}, which looks local to this machine", "a shared file system", f"{fix}; --on-nodes shows whether nodes see it")  # fmt: skip
