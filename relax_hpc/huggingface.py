"""Models of transformers as engines and trainers hold them: with weights that were not drawn, and experts one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

APART = {"qwen2_moe", "qwen3_moe"}
"""Model types whose files hold each expert by itself, where transformers has one tensor for all experts of a layer."""
GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def unfilled(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Make a frozen causal model whose weights, tied where they should be, are whatever was in memory: fill all of them."""
    from torch.nn import Module
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():  # seconds for a billion parameters, minutes for more
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    frozen: PreTrainedModel = Module.to(model, device).eval().requires_grad_(False)
    return frozen


def one_by_one(tensors: Mapping[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """Rename a model's weights to the names that its files use; each expert is a view of the tensor for all."""
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
