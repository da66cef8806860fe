"""The trainer's state as safetensors, never pickle: a checkpoint is data, and data must not be able to run.

model.safetensors        float32 master weights, tied ones once
optimizer-N.safetensors  "exp_avg/NAME", "exp_avg_sq/NAME", "step/NAME" of AdamW, in a few files; empty before its first step
adapter_model.safetensors  in place of model.safetensors where an adapter learns; with adapter_config.json, PEFT reads it
reference.safetensors    the reference weights, where they are held
critic.safetensors       and critic_optimizer-N.safetensors: weights and optimizer of a critic, where there is one
rng.safetensors          "RANK/cpu" and "RANK/cuda": random states, uint8
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import Parameter

from relax_hpc.files import folder_checksums, read_ahead, tensor_files
from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import write_file
from relax_hpc.files.run_dir import OPTIMIZERS
from relax_hpc.files.tensor_files import differences, shapes
from relax_hpc.huggingface.lora import CONFIG_FILE

MODEL, REFERENCE, RNG, CRITIC = (f"{n}.safetensors" for n in ("model", "reference", "rng", "critic"))
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", CONFIG_FILE
OPTIMIZER, CRITIC_OPTIMIZER = OPTIMIZERS["trainer"], OPTIMIZERS["critic"]
PARTS = 4
"""Files of an optimizer, and threads that read and write them: to touch memory for the first time is what costs."""

A = TypeVar("A")
T = TypeVar("T")
INCOMPLETE = "checkpoint has no '{}': it is incomplete or of another trainer backend"
UNREADABLE = "'{}' cannot be read: {}; go back to an older checkpoint"


def write(folder: Path, files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """Write these files, which must not exist, into `folder` and onto the disk; returns their checksums, by name."""

    def write_one(name: str) -> str:
        data = tensor_files.pieces(files[name].items())
        write_file(folder / name, data)
        return folder_checksums.of_pieces(data)

    return dict(zip(files, _in_threads(write_one, files), strict=True))


def cast(path: Path, dtype: str) -> dict[str, Tensor]:
    """Load the tensors of the file `path`, floating-point ones converted to torch's type `dtype`."""
    return in_dtype(load_file(path), dtype)


def in_dtype(tensors: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Convert tensors of floating-point numbers to torch's type `dtype`."""
    return {name: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for name, t in tensors.items()}


def in_parts(stem: str, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Distribute tensors over PARTS files of about as many bytes each; returns file name -> tensors."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(PARTS)]
    sizes = [0] * PARTS
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].nbytes):
        least = sizes.index(min(sizes))
        parts[least][name] = tensor
        sizes[least] += tensor.nbytes
    return {f"{stem}-{number}.safetensors": part for number, part in enumerate(parts)}


def has(folder: Path, stem: str) -> bool:
    """Return True if a checkpoint holds this optimizer."""
    return any((folder / name).exists() for name in in_parts(stem, {}))


def read(path: Path) -> dict[str, Tensor]:
    """The tensors in `path`, mapped from it: to be copied, not kept. Raises RunError, DamagedCheckpoint."""
    folder_checksums.compare(path)
    try:
        return load_file(path)
    except FileNotFoundError:
        raise RunError(INCOMPLETE.format(path)) from None
    except SafetensorError as error:
        raise folder_checksums.DamagedCheckpoint(UNREADABLE.format(path, error)) from error


def read_parts(folder: Path, stem: str, *, keep: bool) -> dict[str, Tensor]:
    """Read the tensors of all files of `stem` as `read` does; `keep`: into memory that is the caller's own."""
    found: dict[str, Tensor] = {}
    for part in _in_threads(_in_memory if keep else read, [folder / name for name in in_parts(stem, {})]):
        found |= part
    return found


def _in_memory(path: Path) -> dict[str, Tensor]:
    # Not mapped: each page that AdamW writes of a mapped file is copied then, one by one, in its first step.
    try:
        memory, found = read_ahead.contents(path)
        folder_checksums.compare(path, found)
        return tensor_files.views(torch.frombuffer(memory, dtype=torch.uint8))
    except FileNotFoundError:
        folder_checksums.compare(path)
        raise RunError(INCOMPLETE.format(path)) from None
    except ValueError as error:
        raise folder_checksums.DamagedCheckpoint(UNREADABLE.format(path, error)) from error


def fill(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy `tensors` into `own`. Raises RunError, before anything is copied, when names or shapes differ."""
    compare(shapes(tensors.items()), shapes(own.items()), path)
    _in_threads(lambda name: own[name].copy_(tensors[name]), own)


def compare(saved: Mapping[str, Sequence[int]], model: Mapping[str, Sequence[int]], path: Path) -> None:
    """Raise RunError unless the checkpoint at `path` has the tensors of the model, by names and shapes."""
    if wrong := differences(saved, model):
        raise RunError(f"'{path}' is of another model: {wrong}")


def _in_threads(work: Callable[[A], T], items: Iterable[A]) -> list[T]:
    """Call `work` for each item, in threads and without gradients (torch's setting holds for one thread only)."""
    with ThreadPoolExecutor(PARTS, "checkpoint") as pool:
        return list(pool.map(torch.no_grad()(work), items))


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Parameter]) -> dict[str, Tensor]:
    return {f"{key}/{name}": value for name, p in parameters.items() for key, value in optimizer.state[p].items()}


def fill_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Parameter], folder: Path, stem: str
) -> None:
    """Load the optimizer's state from `folder`. Raises RunError when it belongs to other parameters, or is not whole."""
    state: dict[str, dict[str, Tensor]] = {}
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters.values())
    for key, value in read_parts(folder, stem, keep=on_cpu).items():
        kind, _, name = key.partition("/")
        state.setdefault(name, {})[kind] = value
    if state:
        moments = {n: s["exp_avg"] for n, s in state.items() if "exp_avg" in s}
        compare(shapes(moments.items()), shapes(parameters.items()), folder / f"{stem}-*.safetensors")
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
    """Restore the random states of `rank`; a rank that has none among them keeps its own."""
    if f"{rank}/cpu" in tensors:
        torch.set_rng_state(tensors[f"{rank}/cpu"])
    if f"{rank}/cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors[f"{rank}/cuda"], device)
