"""A Hugging Face configuration as Megatron-core's: models that `weight_names` knows, and what is different is refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from relax_hpc.recipe.schema import Trainer
from relax_hpc.run_dir import RunError
from relax_hpc.trainers.megatron.head import Policy
from relax_hpc.trainers.megatron.layers import block_spec
from relax_hpc.trainers.megatron.sizes import sparse_layers

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron-core's scaling of rotary frequencies has built in."""


def transformer_engine() -> bool:
    """Whether layers of Transformer Engine are taken."""
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


def build(hf: Any, config: TransformerConfig, groups: ProcessGroupCollection) -> list[Policy]:
    """This process's part of the model, a chunk for each virtual stage; its weights are not set."""
    stages: int = groups.pp.size()
    rank: int = groups.pp.rank()
    virtual: int | None = config.virtual_pipeline_model_parallel_size
    rope = hf.rope_parameters
    return [
        Policy(
            config=config,
            transformer_layer_spec=block_spec(config, transformer_engine(), stage),
            vocab_size=padded_vocabulary(hf.vocab_size, config.tensor_model_parallel_size),
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


def padded_vocabulary(size: int, tensor: int) -> int:
    """Rows of the embedding: a multiple of the processes that share it."""
    return -(-size // tensor) * tensor


def refuse_foreign(hf: Any) -> None:
    """Raise RunError for a model that Megatron-core would compute differently."""
    wrong = None
    rope = getattr(hf, "rope_parameters", None) or {}
    scaling = {key: rope.get(key) for key in LLAMA3_ROPE}
    if hf.model_type not in ("qwen3", "qwen3_moe", "qwen2", "llama"):
        wrong = f"model_type '{hf.model_type}': qwen3, qwen3_moe, qwen2 and llama are known"
    elif rope.get("rope_type") not in ("default", "llama3") or (
        rope["rope_type"] == "llama3" and scaling != LLAMA3_ROPE
    ):
        wrong = f"rope_parameters {rope}: the default ones, or llama3's with {LLAMA3_ROPE}, are known"
    elif float(rope["rope_theta"]) != int(rope["rope_theta"]):
        wrong = f"rope_theta {rope['rope_theta']}: a whole number is expected"
    elif set(getattr(hf, "layer_types", None) or []) - {"full_attention"}:
        wrong = "layers without full attention"
    elif hf.hidden_act != "silu":
        wrong = f"hidden_act '{hf.hidden_act}': silu is known"
    elif getattr(hf, "mlp_bias", False) or (hf.model_type != "qwen2" and getattr(hf, "attention_bias", False)):
        wrong = "biases in attention or MLP"
    if wrong:
        raise RunError(f'trainer.backend = "megatron" cannot train this model: it has {wrong}; use the torch backend')
