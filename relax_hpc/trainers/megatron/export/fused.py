"""Experts of a layer in one tensor, as the files of Qwen3-VL-MoE have them, and one by one, as Megatron-core does.

    experts.gate_up_proj [E, H, 2 I], experts.down_proj [E, I, H] ◄──► experts.N.gate_proj, up_proj [I, H], down_proj [H, I]

transformers writes them with the last two axes exchanged when it saves a model itself: they are told by their sizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
Sources = Mapping[str, Callable[[], Any]]
"""Hugging Face's name -> opens what slices like a tensor."""


@dataclass(frozen=True, slots=True)
class _One:
    """One expert's matrix [rows, columns], cut out of the tensor of all."""

    all: Any
    expert: int
    first_row: int
    shape: tuple[int, int]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        start, stop, _ = rows.indices(self.shape[0])
        rows, columns = slice(self.first_row + start, self.first_row + stop), slice(*columns.indices(self.shape[1]))
        if self.all.get_shape()[2] == self.shape[1]:
            found: Tensor = self.all[self.expert, rows, columns]
            return found
        found = self.all[self.expert, columns, rows]
        return found.T


def experts_apart(sources: Sources, model: Any) -> Sources:
    """Add every expert's own matrices."""
    rows, columns = model.moe_intermediate_size, model.hidden_size
    places = {"gate": ("gate_up_proj", 0, (rows, columns)), "up": ("gate_up_proj", rows, (rows, columns)),
              "down": ("down_proj", 0, (columns, rows))}  # fmt: skip
    apart = dict(sources)
    for name, source in sources.items():
        for own, (fused, first_row, shape) in places.items():
            if name.endswith(f".experts.{fused}"):
                where = name.removesuffix(fused)
                for expert in range(model.num_experts):
                    one = partial(_open, source, expert, first_row, shape)
                    apart[f"{where}{expert}.{own}_proj.weight"] = one
    return apart


def _open(source: Callable[[], Any], expert: int, first_row: int, shape: tuple[int, int]) -> _One:
    return _One(source(), expert, first_row, shape)


def experts_together(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Join a layer's experts, which come one after the other."""
    where, layer = "", dict[str, list[Tensor]]()
    for name, tensor in tensors:
        match = EXPERT.fullmatch(name)
        if where and (match is None or match[1] != where):
            yield from _joined(where, layer)
            where, layer = "", {}
        if match is None:
            yield name, tensor
            continue
        where = match[1]
        layer.setdefault(match[3], []).append(tensor)
    if where:
        yield from _joined(where, layer)


def _joined(where: str, layer: dict[str, list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    gate_up = torch.cat([torch.stack(layer["gate"]), torch.stack(layer["up"])], 1)
    yield f"{where}gate_up_proj", gate_up.transpose(1, 2).contiguous()
    yield f"{where}down_proj", torch.stack(layer["down"]).transpose(1, 2).contiguous()
