"""Hugging Face names of Megatron-core's parameters, and how shards of the one make the other.

A parameter of Megatron's may hold several of Hugging Face's (queries, keys and values; gate and up), and tensor parallelism
cuts each of them. Parts are named as if one process held the whole model: layers and experts are counted over all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from relax_hpc.files.errors import RunError
from relax_hpc.huggingface import name_in_files
from relax_hpc.media.families import Family
from relax_hpc.trainers.megatron.encoders import PREFIX

Kind = Literal["whole", "rows", "columns", "vocabulary", "gated", "qkv"]
Reader = Callable[[str], Any]
"""A Hugging Face name -> something that slices like a tensor (safetensors reads just the slice)."""

_L, _E = r"decoder\.layers\.(?P<layer>\d+)\.", r"mlp\.experts\."
_MODEL = "model."
_LAYER, _ATTENTION, _EXPERT = (
    "model.layers.{layer}.",
    "model.layers.{layer}.self_attn.",
    "model.layers.{layer}.mlp.experts.{expert}.",
)
RULES: list[tuple[str, Kind, tuple[str, ...]]] = [
    (r"embedding\.word_embeddings\.weight", "vocabulary", ("model.embed_tokens.weight",)),
    (r"output_layer\.weight", "vocabulary", ("lm_head.weight",)),
    (r"decoder\.final_layernorm\.weight", "whole", ("model.norm.weight",)),
    (_L + r"(input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight)", "whole", (_LAYER + "input_layernorm.weight",)),
    (_L + r"(pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight)", "whole", (_LAYER + "post_attention_layernorm.weight",)),
    (_L + r"self_attention\.linear_qkv\.(?P<what>weight|bias)", "qkv", tuple(_ATTENTION + f"{p}_proj.{{what}}" for p in "qkv")),
    (_L + r"self_attention\.linear_proj\.weight", "columns", (_ATTENTION + "o_proj.weight",)),
    (_L + r"self_attention\.(?P<what>[qk])_layernorm\.weight", "whole", (_ATTENTION + "{what}_norm.weight",)),
    (_L + r"mlp\.linear_fc1\.weight", "gated", (_LAYER + "mlp.gate_proj.weight", _LAYER + "mlp.up_proj.weight")),
    (_L + r"mlp\.linear_fc2\.weight", "columns", (_LAYER + "mlp.down_proj.weight",)),
    (_L + r"mlp\.router\.weight", "whole", (_LAYER + "mlp.gate.weight",)),
    (_L + _E + r"(local_experts\.(?P<expert>\d+)\.linear_fc1\.weight|linear_fc1\.weight(?P<grouped>\d+))", "gated", (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight")),
    (_L + _E + r"(local_experts\.(?P<expert>\d+)\.linear_fc2\.weight|linear_fc2\.weight(?P<grouped>\d+))", "columns", (_EXPERT + "down_proj.weight",)),
]  # fmt: skip
"""(Megatron's name, how it is cut, Hugging Face's names). Where a name has two spellings, the second is Transformer
Engine's."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of Megatron's parameters, as the parts of Hugging Face's tensors that it holds."""

    kind: Kind
    names: tuple[str, ...]  # Hugging Face's
    expert: bool

    def join(self, shards: Sequence[Tensor], model: Any) -> list[Tensor]:
        """Join all shards, in their order, to Hugging Face's tensors; `model` is its configuration."""
        if self.kind == "whole":
            return [shards[0]]
        if self.kind == "columns":
            return [torch.cat(list(shards), 1)]
        if self.kind == "gated":
            return [torch.cat(halves) for halves in zip(*(s.chunk(2) for s in shards), strict=True)]
        whole = torch.cat(list(shards))
        if self.kind == "vocabulary":
            return [whole[: model.vocab_size]]
        if self.kind == "qkv":
            size = head_size(model)
            grouped = whole.view(model.num_key_value_heads, -1, size, *whole.shape[1:])
            return [part.flatten(0, 2) for part in (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])]
        return [whole]

    def cut(self, read: Reader, shard: int, shards: int, model: Any) -> Tensor:
        """Cut out shard number `shard` of `shards`; no more is read than it needs."""
        sources = [read(name) for name in self.names]
        if self.kind == "whole":
            return _tensor(sources[0][:])
        if self.kind == "columns":
            size = sources[0].get_shape()[1] // shards
            return _tensor(sources[0][:, shard * size : (shard + 1) * size])
        if self.kind == "vocabulary":
            rows = -(-model.vocab_size // shards)
            real = _tensor(sources[0][shard * rows : max(shard * rows, min((shard + 1) * rows, model.vocab_size))])
            return torch.cat([real, real.new_zeros(rows - len(real), *real.shape[1:])])
        parts = []
        for source in sources:
            size = source.get_shape()[0] // shards
            parts.append(_tensor(source[shard * size : (shard + 1) * size]))
        if self.kind == "qkv":
            groups, size = model.num_key_value_heads // shards, head_size(model)
            return torch.cat([p.view(groups, -1, size, *p.shape[1:]) for p in parts], 1).flatten(0, 2)
        return torch.cat(parts)


def part_of(name: str, layer: int | None, first_expert: int, family: Family) -> Part:
    """Look up a parameter of this process by its local name; `layer` counts over all stages."""
    if name.startswith(PREFIX):
        return Part("whole", (name_in_files(name.removeprefix(PREFIX), family),), False)
    for pattern, kind, names in RULES:
        match = re.fullmatch(pattern, name)
        if match:
            found = match.groupdict()
            local = found.get("expert") or found.get("grouped")
            values = {**found, "layer": layer, "expert": int(local or 0) + first_expert}
            own = (n.format(**values) for n in names)
            ours = (family.language + n.removeprefix(_MODEL) if n.startswith(_MODEL) else n for n in own)
            return Part(kind, tuple(name_in_files(n, family) for n in ours), local is not None)
    raise RunError(
        f"Megatron's parameter '{name}' has no Hugging Face name here: the megatron backend does not know this model"
    )


def head_size(model: Any) -> int:
    return int(getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads)


def _tensor(value: Tensor) -> Tensor:
    return value
