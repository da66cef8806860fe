"""A Hugging Face configuration as Megatron-core's: models that weight_names.py knows and that fit.py lets through."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from relax_hpc.huggingface import language_config
from relax_hpc.media.families import family_of
from relax_hpc.recipe.tables.trainer import Trainer
from relax_hpc.trainers.fit import sparse_layers
from relax_hpc.trainers.megatron.encoders import Encoders, attach_deep
from relax_hpc.trainers.megatron.head import Policy
from relax_hpc.trainers.megatron.layers import MultimodalRotary, block_spec
from relax_hpc.trainers.megatron.replay import attach


def transformer_engine() -> bool:
    """Return True if layers of Transformer Engine are used."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def transformer_config(config: Any, trainer: Trainer) -> TransformerConfig:
    """Megatron-core's description of the language model of `config`, split as the recipe says."""
    hf, axes = language_config(config), family_of(config).axes
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
        qk_layernorm=hf.model_type.startswith("qwen3"),
        add_bias_linear=False,
        add_qkv_bias=hf.model_type in ("qwen2", "qwen2_5_vl_text"),
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
        apply_rope_fusion=fused and axes == 1,  # the fused one counts positions itself
        mrope_section=hf.rope_parameters["mrope_section"] if axes > 1 else None,
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
        "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),
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
    whole: Any, config: TransformerConfig, groups: ProcessGroupCollection, kind: type[Policy] = Policy
) -> list[Policy]:
    """Build this process's part of the model `whole`, a chunk for each virtual stage; its weights are not set."""
    hf, family = language_config(whole), family_of(whole)
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
            share_embeddings_and_output_weights=family.config(whole).tie_word_embeddings,
            position_embedding_type="rope" if family.axes == 1 else "mrope",
            rotary_base=int(rope["rope_theta"]),
            rope_scaling=rope["rope_type"] == "llama3",
            rope_scaling_factor=rope.get("factor", 1.0),
            pg_collection=groups,
            vp_stage=stage,
        )
        for stage in ([None] if virtual is None else range(virtual))
    ]
    for chunk in chunks:
        chunk.real_vocabulary, chunk.hf = hf.vocab_size, whole
        attach(chunk.decoder.layers)
        if family.axes > 1:
            chunk.rotary_pos_emb = MultimodalRotary(rope, config.kv_channels, torch.cuda.current_device())
        if chunk.pre_process and family.modalities:
            chunk.encoders = Encoders(whole, config, groups.tp)
            attach_deep(chunk.decoder.layers, family.deep_layers(whole))
    return chunks
