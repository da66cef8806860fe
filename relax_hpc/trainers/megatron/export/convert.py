"""Conversion of a Hugging Face folder to a Megatron-core distributed checkpoint and back, on one process.

    to_megatron   model.safetensors … ──► Megatron's parameters ──► torch_dist, with config.json and tokenizer beside it
    to_hugging    torch_dist ──► Megatron's parameters ──► model-0000N-of-0000M.safetensors

A checkpoint of a training run has float32 master weights: those are taken. Otherwise the weights themselves are, in
their own type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from torch import Tensor
from transformers import AutoConfig

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import to_json, write_file
from relax_hpc.files.tensor_files import buckets
from relax_hpc.recipe.tables.trainer import Trainer
from relax_hpc.trainers import fit, state_files
from relax_hpc.trainers.build import copy_small_files, dtype_of
from relax_hpc.trainers.megatron import groups
from relax_hpc.trainers.megatron.checkpoint import index, moments, state
from relax_hpc.trainers.megatron.cpu import supported
from relax_hpc.trainers.megatron.export import weights
from relax_hpc.trainers.megatron.model import build, transformer_config

FILE_BYTES = 5 * 2**30
"""The most bytes of a safetensors file."""
INDEX = "model.safetensors.index.json"
MASTER = moments.name_of("param", "")


@supported
def to_megatron(source: Path, output: Path) -> None:
    """Write the Hugging Face model in `source` as a distributed checkpoint in the empty `output`. Raises RunError."""
    hf = _config(source)
    trainer = _trainer(dtype_of(source), source)
    own = groups.join(trainer.parallel, seed=0)
    chunks = build(hf, transformer_config(hf, trainer), own)
    weights.fill(chunks, source, own)
    state.Saving(output, {"model": state.sharded(chunks, own), "steps": 0}).finish()
    copy_small_files(source, output)


@supported
def to_hugging(
    source: Path,
    model: Path,
    output: Path,
    dtype: str | None = None,
    beside: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Write the weights of the checkpoint `source` into `output`, in their own type or `dtype`, with the tensors
    `beside`; `model` has config.json and the tokenizer. Raises RunError."""
    hf, saved = _config(model), index.tensors(source)
    master = any(name.startswith(MASTER) for name in saved)
    kept = next(about for name, about in saved.items() if name.startswith(MASTER) or not master)
    trainer = _trainer(kept.properties.dtype, source)
    own = groups.join(trainer.parallel, seed=0)
    chunks = build(hf, transformer_config(hf, trainer), own)
    wanted = state.sharded(chunks, own)
    for chunk in wanted.values():  # frozen weights have no master weights
        add_prefix_for_sharding({name: t for name, t in chunk.items() if MASTER + t.key in saved}, MASTER)
    state.compare(source, {"model": wanted}, everything=False)
    loaded = state.load(source, {"model": wanted})["model"]
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"chunk{number}"], strict=False)
    copy_small_files(model, output)
    held = weights.parts(chunks, own)
    written = getattr(torch, dtype) if dtype else kept.properties.dtype
    _write(chain(weights.export(held, weights.plan_export(held, own), hf, written), beside.items()), output)


def _trainer(dtype: torch.dtype, source: Path) -> Trainer:
    """The trainer table of one process with weights of this type."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise RunError(f"the weights in '{source}' are {dtype}: float32 and bfloat16 are known; convert them first")
    return Trainer.model_validate({"backend": "megatron", "dtype": str(dtype).removeprefix("torch.")})


def _write(tensors: Iterable[tuple[str, Tensor]], output: Path) -> None:
    """Write the tensors as safetensors files of at most FILE_BYTES; with an index where there are several."""
    files: dict[str, str] = {}
    total = 0
    for number, bucket in enumerate(buckets(tensors, FILE_BYTES)):
        file = f"model-{number:05d}.safetensors"
        state_files.write(output, {file: dict(bucket)})
        files |= {name: file for name, _ in bucket}
        total += sum(tensor.nbytes for _, tensor in bucket)
    if len(set(files.values())) == 1:
        (output / file).rename(output / state_files.MODEL)
    else:
        write_file(output / INDEX, to_json({"metadata": {"total_size": total}, "weight_map": files}))


def _config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise RunError(f"'{folder}' has no config.json: it is not a Hugging Face model directory")
    hf = AutoConfig.from_pretrained(folder, local_files_only=True)
    fit.refuse_foreign(hf)
    return hf
