"""The trainer's state as safetensors, never pickle: a checkpoint is data, and data must not be able to run.

model.safetensors      float32 master weights, tied ones once
optimizer.safetensors  "exp_avg/NAME", "exp_avg_sq/NAME", "step/NAME" of AdamW; empty before its first step
reference.safetensors  the frozen reference's weights, where one is held
critic.safetensors     and critic_optimizer.safetensors: the same two of a critic, where there is one
rng.safetensors        "RANK/cpu" and "RANK/cuda": random states, uint8
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter

from relax_hpc.run_dir import RunError

MODEL, OPTIMIZER, REFERENCE, RNG = (f"{n}.safetensors" for n in ("model", "optimizer", "reference", "rng"))
CRITIC, CRITIC_OPTIMIZER = (f"{n}.safetensors" for n in ("critic", "critic_optimizer"))
SHOWN = 3
"""Differences that an error names."""


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` to `path` and onto the disk."""
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it private, unlike every other file of a run
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> dict[str, Tensor]:
    """The tensors in `path`, on the CPU. Raises RunError when it is missing or torn."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise RunError(f"checkpoint has no '{path}': it is incomplete or of another trainer backend") from None
    except SafetensorError as error:
        raise RunError(f"'{path}' cannot be read: {error}; go back to an older checkpoint") from error


def fill(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy `tensors` into `own`. Raises RunError, before anything is copied, when names or shapes differ."""
    differences = [f"'{n}' is missing in the checkpoint" for n in own if n not in tensors]
    differences += [f"'{n}' is not in the model" for n in tensors if n not in own]
    differences += [
        f"'{n}' is {list(tensors[n].shape)} in the checkpoint and {list(t.shape)} in the model"
        for n, t in own.items()
        if n in tensors and tensors[n].shape != t.shape
    ]
    if differences:
        raise RunError(f"'{path}' is of another model: {shown(differences)}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def shown(differences: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = f"; {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    return "; ".join(differences[:SHOWN]) + more


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    return {f"{key}/{name}": value for name, p in parameters.items() for key, value in optimizer.state[p].items()}


def fill_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Parameter], tensors: Mapping[str, Tensor], path: Path
) -> None:
    """Give `optimizer` the state in `tensors`. Raises RunError when it belongs to other parameters."""
    state: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        state.setdefault(name, {})[kind] = value
    moments = {n: s["exp_avg"] for n, s in state.items() if "exp_avg" in s}
    if state:
        fill({n: torch.empty(p.shape) for n, p in parameters.items()}, moments, path)
    optimizer.state.clear()
    for name, entries in state.items():
        parameter = parameters[name]
        optimizer.state[parameter] = {kind: value.to(parameter.device) for kind, value in entries.items()}


def rng_tensors(rank: int, device: torch.device) -> dict[str, Tensor]:
    """This process's random states."""
    states = {f"{rank}/cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states[f"{rank}/cuda"] = torch.cuda.get_rng_state(device)
    return states


def fill_rng(rank: int, device: torch.device, tensors: Mapping[str, Tensor]) -> None:
    """Go on with the states of `rank`; a rank that was not there when they were written keeps its own."""
    if f"{rank}/cpu" in tensors:
        torch.set_rng_state(tensors[f"{rank}/cpu"])
    if f"{rank}/cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors[f"{rank}/cuda"], device)
