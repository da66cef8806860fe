"""What a parallel plan must divide, from a Hugging Face configuration. Needs no Megatron."""

from __future__ import annotations

from typing import Any

from relax_hpc.recipe.parallel import Sizes


def sparse_layers(hf: Any) -> list[int]:
    """1 for each layer with experts, 0 for each dense one."""
    step, dense = getattr(hf, "decoder_sparse_step", 1), getattr(hf, "mlp_only_layers", None) or []
    return [int(i not in dense and (i + 1) % step == 0) for i in range(hf.num_hidden_layers)]


def sizes(hf: Any) -> Sizes:
    experts = getattr(hf, "num_experts", 0)
    dense = not experts or not all(sparse_layers(hf))
    return Sizes(
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        layers=hf.num_hidden_layers,
        intermediate=hf.intermediate_size if dense else 0,
        experts=experts,
        expert_intermediate=hf.moe_intermediate_size if experts else 0,
    )
