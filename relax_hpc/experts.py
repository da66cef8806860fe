"""Experts' weights: transformers holds one tensor for all experts of a layer, files and inference engines have one each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

APART = {"qwen2_moe", "qwen3_moe"}
"""Model types whose experts are one by one in files, [out, in] like any linear layer."""
GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def one_by_one(tensors: Mapping[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """The same weights, by the names that the model's files use; each expert is a view of the tensor of all."""
    if model_type not in APART:
        return dict(tensors)
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(GATE_UP):
            where = name.removesuffix("gate_up_proj")
            for expert, both in enumerate(tensor):
                named[f"{where}{expert}.gate_proj.weight"], named[f"{where}{expert}.up_proj.weight"] = both.chunk(2)
        elif name.endswith(DOWN):
            where = name.removesuffix("down_proj")
            named |= {f"{where}{expert}.down_proj.weight": one for expert, one in enumerate(tensor)}
        else:
            named[name] = tensor
    return named
