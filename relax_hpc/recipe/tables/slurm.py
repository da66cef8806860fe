"""[slurm]: what a run asks of a Slurm cluster, in Slurm's own words where it has some.

Values go into #SBATCH lines and srun's arguments, so control characters are refused in all of them.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from relax_hpc.recipe.tables.table import Key, Table, conflict

LEAST_WORK_S = 60
"""Seconds that a job must have before the signal that ends it."""
GPU_KEYS = ("gpus_per_node", "gres", "gpus_per_task")
OURS = {
    "array": "it would start one run several times; `relax-hpc render --seeds N` writes an array of runs",
    "begin": "successors carry their own dependency; send the first job later instead",
    "chdir": "paths in the script are absolute",
    "dependency": "successors carry their own",
    "error": "it goes to RUN/logs/slurm with the output",
    "hetjob": "use slurm.shape = 'het'",
    "job-name": "it is run.name and the group",
    "no-requeue": "use slurm.restart",
    "nodes": "use trainer.nodes and rollout.nodes",
    "ntasks": "use trainer.processes and rollout.workers",
    "ntasks-per-node": "use trainer.processes and rollout.workers",
    "open-mode": "logs of a job that is requeued are appended",
    "output": "it goes to RUN/logs/slurm",
    "parsable": "it belongs to the command, not to the script",
    "requeue": "use slurm.restart = 'requeue'",
    "signal": "use slurm.signal_lead_s",
    "test-only": "use `relax-hpc submit --dry-run`",
    "wait": "it belongs to the command, not to the script",
    "wrap": "the script has its own command",
}
"""sbatch options that a recipe may not give -> the reason, or what to use instead."""
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d{1,3}):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d)")
_SECRET = re.compile(r"(^|_)KEY$|TOKEN|SECRET|PASSW", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def time_s(value: str | int) -> int | None:
    """Convert a time limit to seconds: minutes, "HH:MM:SS" or "D-HH:MM:SS"; None for anything else."""
    if isinstance(value, int) or value.isdecimal():
        return int(value) * 60
    found = _TIME.fullmatch(value)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


class Container(Table):
    """An image in which processes run; the job's own script runs outside."""

    name: Literal["apptainer", "pyxis"] = Key(
        "apptainer",
        "`apptainer`: `apptainer exec` (Singularity) around each process; `pyxis`: srun --container-image (enroot).",
    )
    image: str = Key(
        help="The image: a .sif file, or a URI that compute nodes can reach; of pyxis a .sqsh file, or REGISTRY#IMAGE.",
        resume=True,
    )
    mounts: list[str] = Key([], "Further paths to mount, SRC[:DEST[:FLAGS]]; run.root is mounted already.", resume=True)
    options: list[str] = Key(
        [], "Further options of `apptainer exec`; --nv is given where there are GPUs.", resume=True
    )
    python: str = Key("python3", "Python inside the image; relax_hpc's dependencies must be there.", resume=True)

    @model_validator(mode="after")
    def _options_of_apptainer(self) -> Container:
        if self.options and self.name == "pyxis":
            raise conflict(
                f"slurm.container.options = {self.options} are for `apptainer exec`, but name = 'pyxis': leave them out"
            )
        return self


class Resources(Table):
    """Resources of one group of nodes; a key that is not given here is taken from [slurm]."""

    partition: str | None = Key(None, "Partition, or several with commas.", resume=True)
    account: str | None = Key(None, "Account that pays.", resume=True)
    qos: str | None = Key(None, "Quality of service.", resume=True)
    constraint: str | None = Key(None, "Node features, such as 'a100&nvlink'.", resume=True)
    exclude: str | None = Key(None, "Nodes not to use.", resume=True)
    reservation: str | None = Key(None, "Reservation.", resume=True)
    time: str | int | None = Key(None, 'Time limit of one job: "HH:MM:SS", "D-HH:MM:SS" or minutes.', resume=True)
    cpus_per_task: PositiveInt | None = Key(None, "CPUs of one process (a trainer process, a worker).", resume=True)
    mem: str | None = Key(
        None, "Memory of a node, such as '64G'; '0' is all of it.", resume=True, pattern=r"^\d+[KMGTkmgt]?$"
    )
    gpus_per_node: PositiveInt | str | None = Key(
        None, "GPUs of a node: a number, or TYPE:NUMBER. One of the three GPU keys at most.", resume=True
    )
    gres: str | None = Key(None, "Value of --gres, such as 'gpu:a100:4'.", resume=True)
    gpus_per_task: PositiveInt | str | None = Key(
        None, "GPUs of one process, which sees no others: a number, or TYPE:NUMBER.", resume=True
    )
    options: dict[str, str | int | float | bool] = Key(
        {}, "Any other sbatch option by its long name; `true` for one without a value.", resume=True
    )

    @model_validator(mode="after")
    def _sound(self) -> Resources:
        where = "slurm" if isinstance(self, Slurm) else "slurm.trainer or slurm.rollout"
        given = [key for key in GPU_KEYS if getattr(self, key) is not None]
        if len(given) > 1:
            shown = ", ".join(f"{key} = {getattr(self, key)!r}" for key in given)
            raise conflict(f"{where}: {shown}: they say the same thing in three ways, give one of {list(GPU_KEYS)}")
        for key in ("gpus_per_node", "gpus_per_task"):
            value = getattr(self, key)
            if isinstance(value, str) and not re.fullmatch(r"(\w[\w.-]*:)?[1-9]\d*", value):
                raise conflict(f"{where}.{key} = '{value}': expected a number, or TYPE:NUMBER such as 'a100:4'")
        if self.time is not None and not time_s(self.time):
            raise conflict(
                f'{where}.time = \'{self.time}\': expected "HH:MM:SS", "D-HH:MM:SS" or minutes above 0, '
                'such as "04:00:00", "2-00:00:00" or 90'
            )
        for option in self.options:
            _refuse_ours(where, option)
        _refuse_control(where, self.model_dump())
        return self

    def node_gres(self, per_node: int) -> Counter[str]:
        """Generic resources that the group uses of a node with so many of its processes, as --gres counts them:
        {"gpu:a100": 4}."""
        if self.gpus_per_task is not None:
            kind, count = gpu_count(self.gpus_per_task)
            return Counter({kind: count * per_node})
        if self.gpus_per_node is not None:
            kind, count = gpu_count(self.gpus_per_node)
            return Counter({kind: count})
        return _gres(self.gres or "")

    def node_gpus(self, per_node: int) -> int:
        """GPUs among those resources; 0 where no key says."""
        return sum(n for name, n in self.node_gres(per_node).items() if name.partition(":")[0] == "gpu")

    @property
    def gpu_key(self) -> str:
        """The GPU key that is given, as a person wrote it."""
        return next((f"slurm.{key} = {getattr(self, key)!r}" for key in GPU_KEYS if getattr(self, key) is not None), "")


class Autoscale(Table):
    """Automatic growing and shrinking of the run, one rollout node at a time, each a further job."""

    max_nodes: PositiveInt = Key(8, "Greatest number of rollout nodes; the least is rollout.nodes.", resume=True)
    grow_when_waiting: float = Key(
        0.3,
        "Add a node when the trainer waited for data for more than this share of the window.",
        resume=True,
        gt=0,
        lt=1,
    )
    window_s: PositiveFloat = Key(120.0, "Seconds of the run that a decision looks back on.", resume=True)
    cooldown_s: PositiveFloat = Key(
        300.0, "Seconds from one change to the next; a job needs time to start and to show its effect.", resume=True
    )
    partition: str | None = Key(None, "Partition of the further jobs, such as a preemptible one.", resume=True)


class Slurm(Resources):
    """Submission to a Slurm cluster; every key of [slurm.trainer] and [slurm.rollout] stands here for both."""

    shape: Literal["split", "het", "single"] = Key(
        "split",
        "`split`: a trainer job and a rollout job, each with its own status; `het`: one heterogeneous job; `single`: both "
        "groups on the same nodes of one job.",
        resume=True,
    )
    time: str | int = Key("01:00:00", 'Time limit of one job: "HH:MM:SS", "D-HH:MM:SS" or minutes.', resume=True)
    mail_user: str | None = Key(None, "Address for the scheduler's mails.", resume=True)
    mail_type: str | None = Key(None, "Events that the scheduler sends mail about: 'END,FAIL', …", resume=True)
    signal_lead_s: int = Key(
        120, "USR2 comes this many seconds before the time limit; checkpoint within.", resume=True, ge=10, le=65535
    )
    restart: Literal["chain", "requeue", "none"] = Key(
        "chain",
        "How the run continues after a job's end: `chain`, a successor queued in advance; `requeue`, the same job again (slow, "
        "forbidden at some sites); `none`.",
        resume=True,
    )
    queue_ahead: int = Key(1, "Successors that wait in the queue, with restart = 'chain'.", resume=True, ge=0, le=20)
    rollout_after_leader: bool = Key(
        False,
        "With shape = 'split', the rollout job waits in the queue until the trainer's has begun: no rollout node idles for a trainer "
        "that waits, but the trainer's nodes then idle for rollout. By default both queue at once, and whoever is first waits.",
        resume=True,
    )
    max_jobs: PositiveInt = Key(50, "The most trainer jobs of a chain.", resume=True)
    max_idle_jobs: PositiveInt = Key(
        3, "Trainer jobs in a row without a new step after which the chain ends itself.", resume=True
    )
    ask_every_s: PositiveFloat = Key(
        30.0,
        "Seconds between two queries to Slurm about the run's jobs, of the leader and of each live view. A successor that Slurm "
        "refuses is sent again after six times as long.",
        resume=True,
    )
    setup: list[str] = Key([], "Shell lines before Python starts: modules, conda. They run as they stand.", resume=True)
    environment: dict[str, str] = Key({}, "Variables for all processes; no secrets, they can be read.", resume=True)
    python: str | None = Key(
        None, "Python on the nodes, such as '/lustre/me/venv/bin/python'; by default the one that submits.", resume=True
    )
    stage_environment: Path | None = Key(
        None,
        "A tar of a virtual environment (`tar -cf ENV.tar -C ENVIRONMENT .`): each node unpacks it on its own disk, and processes "
        "run its bin/python.",
        resume=True,
        looked_up=True,
    )
    interface: str | None = Key(
        None, "Network interface for NCCL, gloo and MPI, such as 'ib0'; they choose where it is absent.", resume=True
    )
    cpu_bind: str | None = Key(None, "srun --cpu-bind for the processes, such as 'cores'.", resume=True)
    container: Container | None = Key(None, "The image that processes run in.", resume=True)
    autoscale: Autoscale | None = Key(
        None, "Further rollout nodes, depending on how long the trainer waits for data.", resume=True
    )
    trainer: Resources | None = Key(None, "Other resources for the trainer's nodes.", resume=True)
    rollout: Resources | None = Key(None, "Other resources for the rollout nodes.", resume=True)

    def group(self, name: Literal["trainer", "rollout"]) -> Resources:
        """Resources of a group: its own keys over those of [slurm]; one GPU key replaces another."""
        own = self.trainer if name == "trainer" else self.rollout
        common = {key: getattr(self, key) for key in Resources.model_fields}
        if own is None:
            return Resources(**common)
        given = {key: getattr(own, key) for key in Resources.model_fields if getattr(own, key) is not None}
        if any(key in given for key in GPU_KEYS):
            common.update(dict.fromkeys(GPU_KEYS))
        return Resources(**{**common, **given, "options": {**self.options, **own.options}})

    @property
    def own_gpus(self) -> str:
        """The GPU key by which a group has GPUs of its own; empty where there is none."""
        for name, own in (("trainer", self.trainer), ("rollout", self.rollout)):
            for key in GPU_KEYS:
                if own is not None and getattr(own, key) is not None:
                    return f"slurm.{name}.{key} = {getattr(own, key)!r}"
        return "" if self.gpus_per_task is None else f"slurm.gpus_per_task = {self.gpus_per_task!r}"

    def refuse_too_few_gpus(self, per_node: int) -> None:
        """Raise a conflict when trainer processes of a node, which take a GPU each, are more than its GPUs."""
        asks = self.group("trainer")
        gpus = asks.node_gpus(per_node)
        if 0 < gpus < per_node:
            raise conflict(
                f"{asks.gpu_key} for {per_node} trainer processes of a node (trainer.processes / trainer.nodes): each takes "
                f"one GPU; give {per_node}, or lower trainer.processes, or set trainer.device = 'cpu'"
            )

    @model_validator(mode="after")
    def _fits(self) -> Slurm:
        for name in ("trainer", "rollout"):
            own = self.trainer if name == "trainer" else self.rollout
            limit = own.time if own is not None and own.time is not None else self.time
            key = f"slurm.{name}.time" if own is not None and own.time is not None else "slurm.time"
            if (time_s(limit) or 0) < self.signal_lead_s + LEAST_WORK_S:
                raise conflict(
                    f"{key} = '{limit}' leaves less than {LEAST_WORK_S} s before the signal that comes "
                    f"slurm.signal_lead_s = {self.signal_lead_s} s before its end: raise the one or lower the other"
                )
            if own is not None and self.shape == "single":
                _refuse_alone(name, own)
        if self.rollout_after_leader and self.shape != "split":
            raise conflict(
                f"slurm.rollout_after_leader = true: with slurm.shape = '{self.shape}' there is no rollout job of its own that could "
                "wait; leave it out, or use shape = 'split'"
            )
        self._fit_environment()
        return self

    def _fit_environment(self) -> None:
        for name in self.environment:
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise conflict(f"slurm.environment: '{name}' is no name of a variable: letters, digits and _ only")
            if _SECRET.search(name):
                raise conflict(
                    f"slurm.environment.{name} looks like a secret, and the recipe is kept in the run's directory: "
                    f"`export {name}=…` in the shell that submits instead, sbatch hands that to the job"
                )
        if self.container is not None and self.stage_environment is not None:
            raise conflict(
                f"slurm.stage_environment = '{self.stage_environment}' and slurm.container = '{self.container.name}': processes run "
                "the one or the other, give one of them"
            )
        if self.cpu_bind is not None and not self.cpu_bind:
            raise conflict("slurm.cpu_bind is empty: leave it out, or use 'cores' or 'none'")


def gpu_count(value: int | str) -> tuple[str, int]:
    """Read GPUs as (name in --gres, count): 4 is ("gpu", 4), "a100:4" is ("gpu:a100", 4)."""
    kind, _, count = str(value).rpartition(":")
    return (f"gpu:{kind}" if kind else "gpu"), int(count)


def _gres(text: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(?P<name>.+):(?P<count>\d+)", part)
        found[match["name"] if match else part] += int(match["count"]) if match else 1
    return found


def _refuse_ours(where: str, option: str) -> None:
    name = option.replace("_", "-")
    if name in OURS:
        raise conflict(f"{where}.options.{option}: it is set for you ({OURS[name]})")
    if name.replace("-", "_") in Slurm.model_fields:
        raise conflict(f"{where}.options.{option}: it is a key of its own, {where}.{name.replace('-', '_')}")
    if not re.fullmatch(r"[a-z][a-z0-9-]+", name):
        raise conflict(
            f"{where}.options.{option}: expected sbatch's long name without dashes before it, such as 'nice'"
        )


def _refuse_control(where: str, value: Any, key: str = "") -> None:
    if isinstance(value, dict):
        for name, item in value.items():
            _refuse_control(where, item, f"{key}.{name}")
    elif isinstance(value, list):
        for item in value:
            _refuse_control(where, item, key)
    elif isinstance(value, str) and _CONTROL.search(value):
        raise conflict(f"{where}{key} = {value!r}: a line break or control character cannot stand in a batch script")


def _refuse_alone(name: str, own: Resources) -> None:
    """Refuse keys for one group alone in the single shape, where both are one job, unless the job's steps can divide
    them."""
    divided = {"cpus_per_task", *GPU_KEYS}
    given = [k for k in Resources.model_fields if k not in divided and getattr(own, k) not in (None, {})]
    if given:
        raise conflict(
            f"slurm.{name}.{given[0]} = {getattr(own, given[0])!r}: with slurm.shape = 'single' both groups are one job, "
            f"say it in [slurm]; a group can have its own {sorted(divided)} only"
        )
