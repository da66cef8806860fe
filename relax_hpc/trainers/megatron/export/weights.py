"""Weights between a Hugging Face folder, the processes' shards, and the transport; no process holds the whole model.

fill     every process reads its own shards from the safetensors files
take     every process cuts its own shards from a version's tensors, which are mapped from files, or came by broadcast
export   shards ──a bucket at a time──► process 0 ──joined──► (Hugging Face name, tensor)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from safetensors import safe_open
from torch import Tensor
from torch.nn import Parameter

from relax_hpc.files.errors import RunError
from relax_hpc.files.tensor_files import split
from relax_hpc.huggingface import TURNED, language_config
from relax_hpc.media.families import family_of
from relax_hpc.trainers.build import files_of
from relax_hpc.trainers.megatron.export.fused import experts_apart, experts_together
from relax_hpc.trainers.megatron.export.weight_names import Part, part_of
from relax_hpc.trainers.megatron.head import Critic, Policy

BUCKET_BYTES = 256 * 2**20
"""Bytes of weights on their way to process 0 at once."""
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
Held = dict[Part, Parameter]


def parts(chunks: Iterable[Policy], groups: ProcessGroupCollection) -> Held:
    """This process's parameters, without the last stage's copy of tied weights and a critic's head."""
    held: Held = {}
    for chunk in chunks:
        experts = (chunk.config.num_moe_experts or 0) // groups.ep.size()
        for name, parameter in chunk.named_parameters():
            own = isinstance(chunk, Critic) or chunk.share_embeddings_and_output_weights
            if name.startswith("output_layer.") and own:
                continue
            match = LAYER.match(name)
            layer = chunk.decoder.layers[int(match[1])].layer_number - 1 if match else None
            part = part_of(name, layer, groups.ep.rank() * experts, family_of(chunk.hf))
            # Megatron marks what it initializes; without the mark, a shard is taken for a copy in the gradients' norm
            parameter.tensor_model_parallel = part.kind != "whole"
            held[part] = parameter
    return held


def fill(chunks: list[Policy], folder: Path, groups: ProcessGroupCollection) -> None:
    """Read this process's shards from the safetensors in `folder`. Raises RunError where they do not fill the model."""
    opened: dict[Path, Any] = {}

    def read(path: Path, name: str) -> Any:
        if path not in opened:
            opened[path] = safe_open(path, framework="pt")
        return opened[path].get_slice(name)

    prefix = family_of(chunks[0].hf).prefix  # a part that was saved by itself lacks it
    files = {prefix + n.removeprefix(prefix): partial(read, path, n) for n, path in files_of(folder).items()}
    _fill(chunks, files, folder, groups)


def load_tensors(
    chunks: list[Policy], tensors: Mapping[str, Tensor], where: Path, groups: ProcessGroupCollection
) -> None:
    """Cut this process's shards from a version's tensors; `where` names their place in errors."""
    _fill(chunks, {name: partial(_InMemory, tensor) for name, tensor in tensors.items()}, where, groups)


@dataclass(frozen=True, slots=True)
class _InMemory:
    """A tensor in memory with the interface of one in a safetensors file."""

    tensor: Tensor

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor[index]

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)


@torch.no_grad()
def _fill(
    chunks: list[Policy], sources: Mapping[str, Callable[[], Any]], folder: Path, groups: ProcessGroupCollection
) -> None:
    """Fill the model from tensors by Hugging Face's names, opened when they are needed."""
    held, model = parts(chunks, groups), language_config(chunks[0].hf)
    if model.model_type in TURNED:
        sources = experts_apart(sources, model)
    absent = sorted({name for part in held for name in part.names if name not in sources})
    if absent:
        raise RunError(
            f"the weights in '{folder}' do not fill its config.json: {absent[:3]} ({len(absent)} in all) are missing"
        )
    for part, parameter in held.items():
        group = groups.expt_tp if part.expert else groups.tp
        shard = part.cut(lambda name: sources[name](), group.rank(), group.size(), model)
        if shard.shape != parameter.shape:
            raise RunError(
                f"the weights in '{folder}' do not fill its config.json: {list(part.names)} make {list(shard.shape)}, "
                f"expected {list(parameter.shape)}"
            )
        parameter.copy_(shard)
    _copy_tied(chunks, groups)


def _copy_tied(chunks: list[Policy], groups: ProcessGroupCollection) -> None:
    """Give the last stage its copy of tied weights: it sets its own to zero, and the first stage's are added to them."""
    if groups.pp.size() == 1 or not chunks[0].share_embeddings_and_output_weights:
        return
    for chunk in chunks:
        if chunk.pre_process or chunk.post_process:
            weight = chunk.shared_embedding_or_output_weight().data
            if not chunk.pre_process:
                weight.zero_()
            dist.all_reduce(weight, group=groups.embd)


@dataclass(frozen=True, slots=True)
class Entry:
    """A part on its way to process 0."""

    part: Part
    shape: tuple[int, ...]  # of a shard
    dtype: torch.dtype
    holders: list[int]  # the process that has shard 0, 1, …

    @property
    def count(self) -> int:
        """Elements of a shard."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return self.count * self.dtype.itemsize * len(self.holders)


def plan_export(held: Held, groups: ProcessGroupCollection) -> list[Entry]:
    """Plan the export: the shards that each process sends, the same plan on every process; collective."""
    mine = []
    for part, parameter in held.items():
        group = groups.expt_tp if part.expert else groups.tp
        copies = groups.expt_dp if part.expert else groups.dp_cp
        if copies.rank() == 0 and (part.kind != "whole" or group.rank() == 0):
            mine.append((part, tuple(parameter.shape), parameter.dtype, group.rank(), dist.get_rank()))
    every: list[Any] = [mine] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    found: dict[Part, dict[int, int]] = {}
    about = {}
    for part, shape, dtype, shard, rank in (one for said in every for one in said):
        found.setdefault(part, {})[shard] = rank
        about[part] = (shape, dtype)
    entries = [Entry(part, *about[part], [ranks[i] for i in sorted(ranks)]) for part, ranks in found.items()]
    return sorted(entries, key=lambda entry: _order(entry.part.names[0]))


def _order(name: str) -> tuple[Any, ...]:
    """Sort key of names: embedding, layers, norm, head; numbers by value."""
    first = 0 if "embed" in name else 1 if ".layers." in name else 2
    return first, *((0, int(word)) if word.isdigit() else (1, word) for word in name.split("."))


def export(
    held: Held, entries: list[Entry], config: Any, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Export the model: process 0 yields all of it, tensor by tensor, on the CPU; the others send, and yield nothing."""
    model = language_config(config)
    tensors = _exported(held, entries, model, dtype, bucket_bytes)
    return experts_together(tensors) if model.model_type in TURNED else tensors


@torch.no_grad()
def _exported(
    held: Held, entries: list[Entry], model: Any, dtype: torch.dtype, bucket_bytes: int
) -> Iterator[tuple[str, Tensor]]:
    rank = dist.get_rank()
    for bucket in split(entries, lambda entry: entry.nbytes, bucket_bytes):
        if rank:
            _send(bucket, held, rank)
            continue
        yield from _joined(bucket, _receive(bucket, held), model, dtype)


def _joined(
    bucket: list[Entry], arrived: dict[Part, list[Tensor]], model: Any, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Join a bucket's tensors; in a generator of its own, so that nothing of it is left when the next one arrives."""
    for entry in bucket:
        for name, tensor in zip(entry.part.names, entry.part.join(arrived.pop(entry.part), model), strict=True):
            yield name, tensor.to("cpu", dtype, copy=True)


def _send(bucket: list[Entry], held: Held, rank: int) -> None:
    """Send this process's shards of a bucket, flattened."""
    mine = [held[entry.part].detach().flatten() for entry in bucket if rank in entry.holders]
    if mine:
        dist.send(torch.cat(mine), dst=0)


def _receive(bucket: list[Entry], held: Held) -> dict[Part, list[Tensor]]:
    """Receive all shards of a bucket's parts."""
    device = next(iter(held.values())).device
    flat: dict[int, Tensor] = {}
    waiting = []
    for sender in sorted({rank for entry in bucket for rank in entry.holders if rank}):
        count = sum(entry.count for entry in bucket if sender in entry.holders)
        flat[sender] = torch.empty(count, dtype=bucket[0].dtype, device=device)
        waiting.append(dist.irecv(flat[sender], src=sender))
    for work in waiting:
        assert work is not None  # this process is of the group
        work.wait()
    arrived: dict[Part, list[Tensor]] = {}
    for entry in bucket:
        arrived[entry.part] = []
        for sender in entry.holders:
            if sender == 0:
                arrived[entry.part].append(held[entry.part].detach())
                continue
            arrived[entry.part].append(flat[sender][: entry.count].view(entry.shape))
            flat[sender] = flat[sender][entry.count :]
    return arrived
