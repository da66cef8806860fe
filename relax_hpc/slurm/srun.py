"""srun's arguments for the processes of a plan: the words that the batch script's process puts before its commands. Pure.

    trainer  one task a process, all end when one does
    rollout  one task a node: the node agent, which starts that node's workers and outlives them
    scorer   one task on a node of the trainer's, which shares what that has; under megatron as the critic's
    critic   its tasks on a node of the trainer's, likewise; all end when one does

All options stand on the command line. What sbatch leaves in the environment describes the first component of a
heterogeneous job, and another version of Slurm reads other parts of it: `step_environment` takes it out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from relax_hpc.recipe.tables.slurm import gpu_count
from relax_hpc.slurm.plan import Group, Plan, SidecarName, gres_text

TRAINER_COMPONENT, ROLLOUT_COMPONENT = "0", "1"
"""Component numbers in a heterogeneous job."""
STAGE_MODULE = "relax_hpc.slurm.stage"
_ASKED = re.compile(
    r"SLURM_(NTASKS|NPROCS|NTASKS_PER_\w+|TASKS_PER_NODE|NNODES|CPUS_PER_TASK|CPUS_PER_GPU|GPUS|GPUS_PER_\w+|GPU_\w+|GRES|"
    r"TRES_\w+|MEM_\w+|DISTRIBUTION|CPU_BIND\w*|EXACT|EXCLUSIVE|OVERLAP|WHOLE|HINT|THREADS_PER_CORE|EXPORT_ENV)"
    r"|SRUN_CPUS_PER_TASK"
)
_GPU_FLAGS = ("--nv", "--nvccli", "--rocm", "--intel-hpu")


def trainer_step(plan: Plan) -> list[str]:
    """The words before `PYTHON …` that start all trainer processes: srun with its options, and the container."""
    return _step(plan, plan.trainer, plan.trainer.per_node, ["--kill-on-bad-exit=1"])


def rollout_step(plan: Plan, *, elastic: bool = False) -> list[str]:
    """The words before `PYTHON …` that start the node agents, one a node. `elastic`: in an elastic job, of one node."""
    group = plan.elastic if elastic else plan.rollout
    # A lost node agent does not end the others, and the last ones left are not ended either.
    return _step(plan, group, 1, ["--kill-on-bad-exit=0", "--wait=0"], alone=elastic)


def sidecar_step(plan: Plan, name: SidecarName) -> list[str]:
    """The words before `PYTHON …` that start one scorer, a group of scorers, or the critic.

    --overlap: the step shares CPUs, memory and GPUs with the trainer's, and neither waits for the other.
    """
    # --overcommit: the trainer's CPUs may be fewer than these tasks.
    role = plan.sidecars[name]
    group, single = plan.trainer, plan.slurm.shape == "single"
    held = group.asks.cpus_per_task and group.asks.cpus_per_task * group.per_node
    tasks = role.processes if role.together else 1
    cpus = min(role.threads, max(held // tasks, 1)) if held else role.threads
    component = [f"--het-group={TRAINER_COMPONENT}"] if plan.slurm.shape == "het" else []
    gpus = []
    if group.has_gpus or (single and plan.rollout.has_gpus):
        takes = group.has_gpus and role.takes_gpus
        gpus = [f"--gres={gres_text(group.node_gres) if takes else 'none'}"]
    return [
        "srun", *component, f"--job-name={name}", "--nodes=1", f"--ntasks={tasks}", f"--cpus-per-task={cpus}",
        *(["--kill-on-bad-exit=1", "--overcommit"] if role.together else []), "--overlap",
        *(["--mem=0"] if single else []), *gpus, f"--cpu-bind={plan.slurm.cpu_bind or 'none'}", *container(plan, group),
    ]  # fmt: skip


def with_options(options: list[str], python: list[str]) -> list[str]:
    """`srun … python` with further options for srun, which takes the last of an option given twice."""
    own = next(i for i, word in enumerate(python[1:], 1) if not word.startswith("-"))
    return [*python[:own], *options, *python[own:]]


def step_python(plan: Plan) -> str:
    """The Python that runs the processes: the container's where there is one."""
    return plan.slurm.container.python if plan.slurm.container else job_python(plan)


def step_command(plan: Plan) -> list[str]:
    """The command that starts this Python: through the environment staged on the node, where there is one."""
    packed = plan.slurm.stage_environment
    return [step_python(plan), *(["-P", "-m", STAGE_MODULE, str(packed)] if packed else [])]


def job_python(plan: Plan) -> str:
    """The Python of the batch script's own process."""
    return plan.slurm.python or sys.executable


def step_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the options sbatch asked for in the job's name: srun would take them for the step's."""
    return {name: value for name, value in environment.items() if not _ASKED.fullmatch(name)}


def _step(plan: Plan, group: Group, tasks: int, options: list[str], *, alone: bool = False) -> list[str]:
    shape = "split" if alone else plan.slurm.shape
    components = {"trainer": TRAINER_COMPONENT, "rollout": ROLLOUT_COMPONENT}
    component = [f"--het-group={components[group.name]}"] if shape == "het" else []
    size = [f"--nodes={group.nodes}", f"--ntasks={group.nodes * tasks}", f"--ntasks-per-node={tasks}"]
    # Since 22.05 srun does not inherit this from sbatch.
    cpus = [f"--cpus-per-task={(group.asks.cpus_per_task or 1) * group.per_node // tasks}"]
    shared = _divided(plan, group) if shape == "single" else ["--overlap", *_gpus(group)]
    # Where nobody said how many CPUs, the job may hold more of them (--exclusive): bound to one core, the rest would idle.
    # Steps that overlap would be bound to the same cores.
    unbound = group.asks.cpus_per_task is None if shape != "single" else plan.shares_devices
    bind = plan.slurm.cpu_bind or ("none" if unbound else None)
    srun = ["srun", *component, f"--job-name={group.name}", *size, *cpus, *options, *shared]
    return [*srun, *([f"--cpu-bind={bind}"] if bind else []), *container(plan, group)]


def _gpus(group: Group) -> list[str]:
    """GPU options of a step that has its nodes for itself."""
    asks = group.asks
    if asks.gres is not None:
        return [f"--gres={asks.gres}"]
    if asks.gpus_per_node is not None:
        return [f"--gpus-per-node={asks.gpus_per_node}"]
    if asks.gpus_per_task is None:
        return []
    if group.name == "trainer":
        return [f"--gpus-per-task={asks.gpus_per_task}"]
    # The node agent is one task and hands the node's GPUs out itself.
    kind, count = gpu_count(asks.gpus_per_task)
    return [f"--gpus-per-node={f'{kind}:'.removeprefix('gpu:')}{count * group.per_node}"]


def _divided(plan: Plan, group: Group) -> list[str]:
    """Resource options for two steps on the same nodes at the same time."""
    if plan.shares_devices:
        return ["--overlap", *_gpus(group)]
    # --exact: only the CPUs that were asked for. --mem=0: the node's memory is not divided, or the second step waits.
    exact = ["--exact", "--mem=0"]
    if not group.has_gpus:
        other = plan.rollout if group.name == "trainer" else plan.trainer
        return [*exact, *(["--gres=none"] if other.has_gpus else [])]
    if group.name == "trainer" and group.asks.gpus_per_task is not None:
        return [*exact, f"--gpus-per-task={group.asks.gpus_per_task}"]
    return [*exact, f"--gres={gres_text(group.node_gres)}"]


def container(plan: Plan, group: Group) -> list[str]:
    """The words between srun and a program that runs in the container image; none where there is no image."""
    image, root = plan.slurm.container, Path(plan.root)
    if image is None:
        return []
    if image.name == "pyxis":
        return [f"--container-image={image.image}", f"--container-mounts={','.join([f'{root}:{root}', *image.mounts])}"]
    gpus = ["--nv"] if group.has_gpus and not set(image.options) & set(_GPU_FLAGS) else []
    mounts = [word for mount in [str(root), *image.mounts] for word in ("--bind", mount)]
    return ["apptainer", "exec", *gpus, *mounts, *image.options, image.image]
