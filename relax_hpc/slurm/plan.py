"""recipe ──► plan: which groups of processes, on how many nodes, in which jobs, with which resources. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from relax_hpc.files.errors import RunError
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.scoring import CriticRole, Scorer
from relax_hpc.recipe.tables.slurm import GPU_KEYS, Resources, Slurm

GroupName = Literal["trainer", "rollout"]
SidecarName = Literal["scorer", "critic"]
"""Roles with steps of their own on the trainer's nodes."""
Kind = Literal["leader", "rollout", "elastic"]
"""Kind of job: "leader" has the run's supervisor; "rollout" is the rollout job of the split shape; "elastic" is a further
rollout job of one node.
"""
KINDS: tuple[Kind, ...] = ("leader", "rollout", "elastic")

SETUP_FAILED = ".setup-failed"
"""Suffix behind a job's id in RUN/slurm/jobs: the file in which its script names the line of slurm.setup that ended it.
"""


def job_name(run: str, kind: str) -> str:
    """Name of a run's job, as squeue shows it."""
    return f"{run}-{'trainer' if kind == 'leader' else kind}"


@dataclass(frozen=True, slots=True)
class Group:
    """The processes of one role."""

    name: GroupName
    nodes: int
    per_node: int
    """Processes on a node: trainer processes, or rollout workers."""
    asks: Resources

    @property
    def has_gpus(self) -> bool:
        return any(getattr(self.asks, key) is not None for key in GPU_KEYS)

    @property
    def node_gres(self) -> Counter[str]:
        """Resources that the group uses of a node, as --gres counts them: {"gpu:a100": 4}."""
        return self.asks.node_gres(self.per_node)


@dataclass(frozen=True, slots=True)
class Sidecar:
    """The processes of a scorer or critic, which run in steps of their own."""

    processes: int
    threads: int
    takes_gpus: bool
    together: bool
    """True where they are one group in one step; else each is a step of its own."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run on a cluster: its groups of processes, their nodes and resources, its jobs."""

    name: str
    root: Path
    """The folder that holds the run's directory: containers must see it."""
    slurm: Slurm
    trainer: Group
    rollout: Group
    takes_turns: bool
    """True where both groups use the same devices, one after the other."""
    generates: bool
    """True where rollout nodes have anything to do; else the trainer's job is the whole run, as if the shape were
    split.
    """
    sidecars: dict[SidecarName, Sidecar]
    """The sidecars that the run has."""

    @property
    def jobs(self) -> tuple[Kind, ...]:
        """The jobs sent to start the run; elastic ones may come later."""
        return ("leader", "rollout") if self.slurm.shape == "split" and self.generates else ("leader",)

    @property
    def groups(self) -> list[Group]:
        """The groups that ask for nodes of their own."""
        return [self.trainer, self.rollout] if self.slurm.shape != "single" and self.generates else [self.trainer]

    @property
    def shares_devices(self) -> bool:
        """True where both groups see the same devices.

        That is in one job where they take turns, or where [slurm] gives the GPUs of a node and not of a group.
        """
        given = any(getattr(self.slurm, key) is not None for key in ("gpus_per_node", "gres"))
        return self.slurm.shape == "single" and (self.takes_turns or (given and not self.slurm.own_gpus))

    @property
    def elastic(self) -> Group:
        """The group of one elastic job: one rollout node."""
        return Group("rollout", 1, self.rollout.per_node, self.rollout.asks)


def make_plan(recipe: Recipe) -> Plan:
    """Make the plan of a recipe. Raises RunError when it has no [slurm] table."""
    if recipe.slurm is None:
        raise RunError(
            "the recipe has no [slurm] table, so nothing says how to send it to a cluster: add one (an empty one asks for "
            "the defaults: two jobs of an hour), or a site profile, or --set slurm.partition=NAME"
        )
    trainer, rollout = recipe.trainer, recipe.rollout
    roles: dict[SidecarName, tuple[Scorer | CriticRole | None, bool]] = {
        "scorer": (recipe.scorer, recipe.scores_together),
        "critic": (recipe.critic, True),
    }
    return Plan(
        recipe.run.name,
        recipe.run.root,
        recipe.slurm if recipe.generates else recipe.slurm.model_copy(update={"shape": "split"}),
        Group("trainer", trainer.nodes, trainer.processes // trainer.nodes, recipe.slurm.group("trainer")),
        Group("rollout", rollout.nodes, rollout.workers // rollout.nodes, recipe.slurm.group("rollout")),
        recipe.run.placement == "colocate",
        recipe.generates,
        {
            name: Sidecar(config.processes, trainer.threads, trainer.device != "cpu", together)
            for name, (config, together) in roles.items()
            if config is not None
        },
    )


def unset_cpus(plan: Plan) -> str:
    """A warning about processes that Slurm may give a single CPU each; empty where the recipe says how many."""
    said = ("exclusive", "cpus_per_gpu", "cpus-per-gpu")
    silent = [g.name for g in plan.groups if g.asks.cpus_per_task is None and not any(map(g.asks.options.get, said))]
    if not silent:
        return ""
    return (
        f"slurm.cpus_per_task is not set for {' and '.join(silent)}: at most sites each process then has one CPU, and waits for it in "
        "tokenizing, rewards and reading; set it to the CPUs of a node divided by its processes (`sinfo -o '%P %c'`)"
    )


def gres_text(gres: Counter[str]) -> str:
    """Format resources as --gres takes them: "gpu:a100:4"."""
    return ",".join(f"{name}:{count}" for name, count in gres.items())
