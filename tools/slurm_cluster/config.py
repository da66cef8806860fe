"""What a cluster consists of, and the text of its configuration files (pure: settings in, text out)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SUBNET = "10.77.0"
CONTROLLER = "ctl"
GPUS_PER_NODE = 4
CLUSTER = "toy"
DATABASE = "slurm"
LOW_TIER, PLAIN_TIER, HIGH_TIER = 1, 10, 100
GRACE_S = 4


class ClusterError(Exception):
    """Something that the user can put right; the text says how."""


@dataclass(frozen=True)
class Node:
    name: str
    partition: str
    address: str
    port: int
    started: bool
    """False: declared only; `node-start` brings it."""


@dataclass(frozen=True)
class Settings:
    folder: str
    user: str
    controller: str
    controller_address: str
    ports: dict[str, int]
    """Of slurmctld and slurmdbd."""
    nodes: tuple[Node, ...]
    namespaces: bool
    preempt_signal: bool
    requeue: bool
    accounting: bool
    cpus: int
    memory_mb: int
    slurmd_timeout_s: int


def plan_nodes(partitions: dict[str, int], declared_only: int) -> list[tuple[str, str, bool]]:
    """Name, partition and whether it is started, of every node: trainer=2 gives t1 and t2."""
    initials = [partition[0] for partition in partitions]
    if len(set(initials)) != len(initials) or not {"low", "high"}.isdisjoint(partitions):
        raise ClusterError(
            f"--nodes {' '.join(partitions)}: nodes are named by the first letter of their partition, "
            "so these must differ; `low` and `high` exist anyway, over all nodes"
        )
    return [
        (f"{partition[0]}{number}", partition, number <= count)
        for partition, count in partitions.items()
        for number in range(1, count + declared_only + 1)
    ]


def slurm_conf(settings: Settings) -> str:
    folder = Path(settings.folder)
    every = ",".join(node.name for node in settings.nodes)
    lines = [
        f"ClusterName={CLUSTER}",
        f"SlurmctldHost={settings.controller}({settings.controller_address})",
        f"SlurmctldPort={settings.ports['slurmctld']}",
        f"SlurmUser={settings.user}",
        f"SlurmdUser={settings.user}",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        f"TmpFS={folder}/tmp/%n",
        f"SlurmctldPidFile={folder}/run/slurmctld.pid",
        f"SlurmdPidFile={folder}/run/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/log/slurmctld.log",
        f"SlurmdLogFile={folder}/log/slurmd-%n.log",
        "SlurmctldDebug=debug",
        "SlurmdDebug=debug",
        "# Nobody else reaches these daemons, so nobody has to be told apart.",
        "AuthType=auth/none",
        "CredType=cred/none",
        "# A requeued job waits cred_expire + 1 s. 5 is the least; anything lower silently becomes 120.",
        "AuthInfo=cred_expire=5",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "JobAcctGatherType=jobacct_gather/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "GresTypes=gpu",
        "# The nodes are believed what is declared below, whatever this machine has.",
        "SlurmdParameters=config_overrides",
        "SchedulerType=sched/backfill",
        "SchedulerParameters=bf_interval=1,bf_resolution=1,sched_interval=1,sched_min_interval=0,bf_continue",
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        f"JobRequeue={int(settings.requeue)}",
        "ReturnToService=2",
        "SlurmctldTimeout=10",
        f"SlurmdTimeout={settings.slurmd_timeout_s}",
        "InactiveLimit=0",
        "# Preemption is tried again every KillWait + MessageTimeout seconds.",
        "KillWait=2",
        "MessageTimeout=5",
        "# Ended jobs stay visible to scontrol for an hour.",
        "MinJobAge=3600",
    ]
    if settings.preempt_signal:
        lines.append("SlurmctldParameters=preempt_send_user_signal")
    if settings.accounting:
        lines += [
            "AccountingStorageType=accounting_storage/slurmdbd",
            "AccountingStorageHost=localhost",
            f"AccountingStoragePort={settings.ports['slurmdbd']}",
            "AccountingStorageEnforce=associations,limits,qos",
            "AccountingStoreFlags=job_comment",
        ]
    for node in settings.nodes:
        host = node.name if settings.namespaces else settings.controller
        lines.append(
            f"NodeName={node.name} NodeHostname={host} NodeAddr={node.address} Port={node.port} CPUs={settings.cpus} "
            f"RealMemory={settings.memory_mb} Gres=gpu:{GPUS_PER_NODE} State={'UNKNOWN' if node.started else 'DOWN'}"
        )
    grace = f"GraceTime={GRACE_S}"
    partitions = list(dict.fromkeys(node.partition for node in settings.nodes))
    for partition in partitions:
        members = ",".join(node.name for node in settings.nodes if node.partition == partition)
        default = " Default=YES" if partition == partitions[0] else ""
        lines.append(f"PartitionName={partition} Nodes={members} PriorityTier={PLAIN_TIER} {grace}{default}")
    lines += [
        f"PartitionName=low Nodes={every} PriorityTier={LOW_TIER} PreemptMode=REQUEUE {grace}",
        f"PartitionName=high Nodes={every} PriorityTier={HIGH_TIER}",
    ]
    return "\n".join(lines) + "\n"


def gres_conf(settings: Settings) -> str:
    every = ",".join(node.name for node in settings.nodes)
    files = f"{settings.folder}/dev/nvidia[0-{GPUS_PER_NODE - 1}]"
    return f"NodeName={every} Name=gpu Count={GPUS_PER_NODE} File={files}\n"


def hosts(settings: Settings) -> str:
    known = [(settings.controller_address, settings.controller)]
    known += [(node.address, node.name) for node in settings.nodes]
    return "".join(
        f"{address} {name}\n" for address, name in [("127.0.0.1", "localhost"), ("::1", "localhost"), *known]
    )


def slurmdbd_conf(settings: Settings) -> str:
    return f"""\
AuthType=auth/none
DbdHost=localhost
DbdPort={settings.ports["slurmdbd"]}
SlurmUser={settings.user}
LogFile={settings.folder}/log/slurmdbd.log
PidFile={settings.folder}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={DATABASE}
StoragePass={DATABASE}
StorageLoc={DATABASE}
"""
