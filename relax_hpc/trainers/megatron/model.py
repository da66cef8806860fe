"""A Hugging Face configuration as Megatron-core's: models that weight_names.py knows and that fit.py lets through."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from relax_hpc.recipe.tables.trainer import Trainer
from relax_hpc.trainers.fit import sparse_layers
from relax_hpc.trainers.megatron.head import Policy
from relax_hpc.trainers.megatron.layers import block_spec
from relax_hpc.trainers.megatron.replay import attach


def transformer_engine() -> bool:
    """Return True if layers of Transformer Engine are used."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def transformer_config(hf: Any, trainer: Trainer) -> TransformerConfig:
    """Megatron-core's description of the model `hf`, split as the recipe says."""
    plan, cpu = trainer.parallel, not torch.cuda.is_available()
    fused = transformer_engine()
    heads = hf.num_attention_heads
    dtype = getattr(torch, trainer.dtype)
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // heads,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=hf.model_type in ("qwen3", "qwen3_moe"),
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **_experts(hf, fused),
        tensor_model_parallel_size=plan.tensor,
        sequence_parallel=plan.sequence,
        pipeline_model_parallel_size=plan.pipeline,
        virtual_pipeline_model_parallel_size=plan.virtual_pipeline if plan.virtual_pipeline > 1 else None,
        context_parallel_size=plan.context,
        expert_model_parallel_size=plan.expert,
        expert_tensor_parallel_size=plan.expert_tensor,
        moe_token_dispatcher_type="alltoall",  # the one that lets lengths vary, for dense models too
        variable_seq_lengths=True,
        overlap_p2p_comm=plan.virtual_pipeline > 1,
        batch_p2p_comm=plan.virtual_pipeline == 1,
        **_recompute(trainer),
        calculate_per_token_loss=True,  # gradients are sums; each loss is divided by the step's tokens beforehand
        perform_initialization=False,  # weights are read
        use_cpu_initialization=cpu,
        bf16=trainer.dtype == "bfloat16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        persist_layer_norm=fused,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        masked_softmax_fusion=False,
        apply_rope_fusion=fused,
        moe_permute_fusion=fused,
        gradient_accumulation_fusion=False,  # needs kernels of Apex
    )


def _experts(hf: Any, fused: bool) -> dict[str, Any]:
    if not getattr(hf, "num_experts", 0):
        return {}
    return {
        "num_moe_experts": hf.num_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_layer_freq": sparse_layers(hf),
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": fused,
    }


def _recompute(trainer: Trainer) -> dict[str, Any]:
    if trainer.parallel.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if trainer.parallel.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def build(
    hf: Any, config: TransformerConfig, groups: ProcessGroupCollection, kind: type[Policy] = Policy
) -> list[Policy]:
    """Build this process's part of the model, a chunk for each virtual stage; its weights are not set."""
    stages: int = groups.pp.size()
    rank: int = groups.pp.rank()
    virtual: int | None = config.virtual_pipeline_model_parallel_size
    tensor = config.tensor_model_parallel_size
    rows = -(-hf.vocab_size // tensor) * tensor  # rounded up to a multiple of the processes that share the embedding
    rope = hf.rope_parameters
    chunks = [
        kind(
            config=config,
            transformer_layer_spec=block_spec(config, transformer_engine(), stage),
            vocab_size=rows,
            max_sequence_length=hf.max_position_embeddings,
            pre_process=rank == 0 and not stage,
            post_process=rank == stages - 1 and (stage is None or virtual is None or stage == virtual - 1),
            share_embeddings_and_output_weights=hf.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_base=int(rope["rope_theta"]),
            rope_scaling=rope["rope_type"] == "llama3",
            rope_scaling_factor=rope.get("factor", 1.0),
            pg_collection=groups,
            vp_stage=stage,
        )
        for stage in ([None] if virtual is None else range(virtual))
    ]
    for chunk in chunks:
        chunk.real_vocabulary = hf.vocab_size
        attach(chunk.decoder.layers)
    return chunks
