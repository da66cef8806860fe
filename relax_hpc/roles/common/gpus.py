"""The GPUs that a process sees and the one that it uses, compared with the recipe before anything is loaded.

    srun ──CUDA_VISIBLE_DEVICES──► as many as the recipe gives? ──► one: that one; several: by its place on the node
                                                                      └► taken by another process: an error, not a hang

A GPU is taken by a file in the incarnation's folder, created exclusively. Importing this module imports no torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import write_file
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.slurm import Resources
from relax_hpc.roles.common.process import RoleProcess

VARIABLE = "CUDA_VISIBLE_DEVICES"
NONE = ("", "NoDevFiles", "-1")
"""Values of CUDA_VISIBLE_DEVICES that mean no GPU; the middle one is Slurm's."""


def visible() -> list[str]:
    """Return the GPUs that this process sees, by index or UUID."""
    return [gpu for gpu in os.environ.get(VARIABLE, "").split(",") if gpu not in NONE]


def place(rank: int, slurm_task: bool) -> int:
    """Return the place of a trainer's process among those on its node, from 0."""
    return int(os.environ["SLURM_LOCALID"]) if slurm_task else rank


def assign(process: RoleProcess, commit_dir: Path) -> None:
    """Make its own GPU the current one of a trainer's process. Raises RunError if the GPUs are not as the recipe
    says."""
    arguments, config, slurm = process.arguments, process.recipe.trainer, process.recipe.slurm
    per_node = config.processes // config.nodes
    asks = slurm.group("trainer") if slurm and arguments.slurm_task else Resources()
    given, seen = asks.node_gpus(per_node), visible()
    local = place(arguments.rank, arguments.slurm_task)
    who = f"trainer rank {arguments.rank} on {os.uname().nodename}"
    each = given // per_node if asks.gpus_per_task is not None else 0
    right = len(seen) == each if each else len(seen) == 1 or len(seen) >= given
    if given and not right:
        raise _wrong(who, f"{each} (its own)" if each else f"1 (its own) or {given} (all of the node's)", asks)
    index = local if len(seen) != 1 and not each else 0
    if computes_on_gpu(config.device, "trainer"):
        own = _set_device(index, who)
    elif given:
        own = seen[index]
    else:
        return
    _take(commit_dir, own, arguments.rank, who)


def assign_beside(recipe: Recipe, role: str, first: int, rank: int, world: int) -> None:
    """Make a GPU the current one of a process of a role beside the trainer. It is chosen from the node's GPUs from the
    `first` on, which other roles do not have. Raises RunError if a group of `world` processes, each needing its own,
    is larger than their number."""
    import torch

    count = torch.cuda.device_count()
    if world > count:
        raise RunError(
            f"{role}.processes = {world}, and torch sees {count} GPUs on {os.uname().nodename}: each process needs one of its own; lower "
            f"{role}.processes, or give the trainer's nodes more GPUs"
            + (f", or set {role}.device = 'cpu'" if recipe.trainer.backend == "torch" else "")
        )
    torch.cuda.set_device((first + rank) % count)


def check_node(recipe: Recipe, workers: int) -> str:
    """Return why this node's rollout workers cannot have the GPUs that the recipe gives them; empty if they can."""
    asks = recipe.slurm.group("rollout") if recipe.slurm else Resources()
    given = asks.node_gpus(workers)
    if len(visible()) >= given:
        return ""
    return str(_wrong(f"the rollout node agent on {os.uname().nodename}", f"{given} for {workers} workers", asks))


def computes_on_gpu(device: str, role: str) -> bool:
    """Return True if a role computes on a GPU. Raises RunError if it was given some and torch sees none."""
    if device == "cpu":
        return False
    import torch

    if not torch.cuda.is_available() and visible():
        raise RunError(
            f"{VARIABLE} = '{os.environ[VARIABLE]}' on {os.uname().nodename}, but torch {torch.__version__} sees no GPU: install a "
            f"torch built for CUDA, look at the driver (`nvidia-smi` there), or set {role}.device = 'cpu'"
        )
    return torch.cuda.is_available()


def _set_device(index: int, who: str) -> str:
    """Select the GPU `index` of those that torch sees; return its name, unique on the machine."""
    import torch

    count = torch.cuda.device_count()
    if index >= count:
        raise RunError(
            f"{who} should take GPU {index} of those it sees, and torch sees {count}: one process has one GPU; lower "
            "trainer.processes, give more GPUs, or set trainer.device = 'cpu'"
        )
    torch.cuda.set_device(index)
    return str(torch.cuda.get_device_properties(index).uuid)


def _take(commit_dir: Path, gpu: str, rank: int, who: str) -> None:
    host = os.uname().nodename
    path = commit_dir / f"gpu-{host}-{gpu.replace('/', '_')}"
    try:
        write_file(path, f"rank {rank}".encode(), durable=False)
    except FileExistsError:
        raise RunError(
            f"{who} sees the same single GPU ({gpu}) as {path.read_text() or 'another rank'}: each process needs one of its own; "
            "set slurm.gpus_per_task = 1, which has Slurm bind them, or slurm.gpus_per_node to the processes of a node"
        ) from None


def _wrong(who: str, expected: str, asks: Resources) -> RunError:
    return RunError(
        f"{who} sees {len(visible())} GPUs ({VARIABLE} = '{os.environ.get(VARIABLE, '')}'), expected {expected} by {asks.gpu_key}: set "
        f"slurm.gpus_per_task = 1, which has Slurm bind them, and no {VARIABLE} in slurm.setup or slurm.environment; "
        f"`srun env | grep {VARIABLE}` in an allocation shows what this site's Slurm gives"
    )
