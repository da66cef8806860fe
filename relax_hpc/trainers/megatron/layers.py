"""Layers for use without Transformer Engine: an RMSNorm, and attention on torch SDPA.

Megatron-core's own stand-ins refuse sequence parallelism, context parallelism and packed sequences.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from relax_hpc.trainers.megatron.packing import Packed


def block_spec(config: TransformerConfig, transformer_engine: bool, vp_stage: int | None) -> Any:
    """The specification of the layers in this process's part of the model."""
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=transformer_engine, normalization="RMSNorm", vp_stage=vp_stage
    )
    if not transformer_engine:
        _replace(spec, {WrappedTorchNorm: RMSNorm, DotProductAttention: Attention}, set())
    return spec


def _replace(spec: Any, by: dict[type, type], seen: set[int]) -> None:
    """Exchange module classes in a tree of specifications."""
    if id(spec) in seen:
        return
    seen.add(id(spec))
    if isinstance(spec, list):
        for part in spec:
            _replace(part, by, seen)
    elif isinstance(spec, ModuleSpec):
        spec.module = by.get(spec.module, spec.module)
        _replace(spec.submodules, by, seen)
    elif hasattr(spec, "__dict__"):
        for name, value in vars(spec).items():
            if isinstance(value, type):
                setattr(spec, name, by.get(value, value))
            else:
                _replace(value, by, seen)


class MultimodalRotary(torch.nn.Module):
    """Rotary angles of positions on three axes: each frequency turns by one of them, all in turns or a stretch each.

    Megatron-core's own knows stretches only.
    """

    def __init__(self, rope: dict[str, Any], size: int, device: Any) -> None:
        super().__init__()
        sections: list[int] = rope["mrope_section"]
        axes = [axis for axis, length in enumerate(sections) for _ in range(length)]
        if rope.get("mrope_interleaved"):
            axes = [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(size // 2)]
        self.axes = torch.tensor(axes, device=device)
        self.frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2, device=device).float() / size))

    def forward(self, positions: Tensor, sections: Any, cp_group: Any = None) -> Tensor:
        """[T, 1, 1, size] angles of positions [3, 1, T]."""
        angles = positions[self.axes, 0].T.float() * self.frequencies
        return torch.cat((angles, angles), -1)[:, None, None]


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm with a marked weight: under sequence parallelism each process sees some tokens, so gradients are summed."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **ignored: Any) -> None:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010


class Attention(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """Causal attention within each packed sequence, a batch of sequences of like length at a time. Under context
    parallelism keys and values are gathered whole, queries stay where they are."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **ignored: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.group = pg_collection.cp

    def forward(
        self,
        query: Tensor,  # [t, heads, D]
        key: Tensor,  # [t, kv heads, D]
        value: Tensor,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: Packed | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None
        layout = packed_seq_params.attention
        if self.group.size() > 1:
            key, value = (_Gather.apply(x, self.group)[layout.gathered] for x in (key, value))  # type: ignore[no-untyped-call]
        parts = []
        for block in layout.blocks:
            # [B, L] indices of tokens; padding repeats a token, and what it attends to is not taken
            q, k, v = (
                x[index].transpose(1, 2)
                for x, index in ((query, block.queries), (key, block.keys), (value, block.keys))
            )
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=block.mask, is_causal=block.mask is None, scale=self.scale, enable_gqa=True
            )
            parts.append(out.transpose(1, 2).flatten(0, 1)[block.real])
        return torch.cat(parts)[layout.order].flatten(1)


class _Gather(torch.autograd.Function):
    """Concatenate the processes' tokens; in the backward pass gradients are summed and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = x.new_empty((len(x) * group.size(), *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0]
        out = grad.new_empty((len(grad) // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None
