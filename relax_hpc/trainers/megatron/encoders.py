"""Encoders of media, transformers' own, whole on each process of the first pipeline stage.

embeddings of this process's tokens ──features of its placeholders put in──► input of the first layer
features of inner layers of the vision encoder ──► added behind the language model's first layers (deepstack)

Every process of a tensor- or context-parallel group encodes the whole micro-batch and takes the features of its own
tokens: where these are shared out, so are the encoders' gradients, and they are summed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import checkpoint
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from relax_hpc.files.errors import RunError
from relax_hpc.huggingface import from_config
from relax_hpc.media.families import Family, family_of
from relax_hpc.trainers.megatron.shown import Shown

PREFIX = "encoders.model."
"""Names of the encoders' parameters in a Policy begin with this; transformers' own follow."""
ARGUMENTS = {
    "image": ("visual", "pixel_values", "image_grid_thw"),
    "video": ("visual", "pixel_values_videos", "video_grid_thw"),
    "audio": ("audio_tower", "input_features", "feature_attention_mask"),
}
"""Modality -> its encoder's name in transformers' model, and the tensors that this takes."""


class Encoders(Module):
    """Transformers' model without its language model; its weights are not set."""

    def __init__(self, hf: Any, config: TransformerConfig) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model: Any = from_config(hf)
        device: Any = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        with no_init_weights():
            _keep_encoders(self.model, "", family_of(hf), config.params_dtype)
        self.model.to(device).eval()
        layers: list[Any] = [layer for layer in self.modules() if isinstance(layer, GradientCheckpointingLayer)]
        for layer in layers if config.recompute_granularity == "full" else []:
            layer.training = layer.gradient_checkpointing = True  # nothing in them is: no dropout
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        for parameter in self.parameters():  # each process has the gradients of its own tokens' features: to be summed
            setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, embeddings: Tensor, shown: Shown) -> tuple[Tensor, Tensor | None]:
        """([t, 1, H] the embeddings with features in their places, [layers, n, H] features for the first layers)."""
        body, found, deep = self.model.base_model, [], []
        idle: dict[str, bool] = {}
        for modality, count in shown.counts.items():
            tower, *names = ARGUMENTS[modality]
            if count:
                made = getattr(body, f"get_{modality}_features")(*(shown.tensors[n] for n in names), return_dict=True)
                found.append(_features(made, modality, count))
                inner = getattr(made, "deepstack_features", None)
                deep += [[torch.cat(layer) for layer in inner]] if inner else []
            idle[tower] = idle.get(tower, True) and not count
        if found:
            chosen = torch.cat(found)[shown.features].to(embeddings.dtype)
            embeddings = embeddings[:, 0].index_copy(0, shown.places, chosen)[:, None]
        for tower in (tower for tower, is_idle in idle.items() if is_idle):
            # reductions that overlap the backward pass wait for every parameter's gradient: one of zeros
            for parameter in getattr(body, tower).parameters():
                embeddings = embeddings + 0 * parameter.flatten()[0] if parameter.requires_grad else embeddings
        return embeddings, torch.stack([torch.cat(part) for part in zip(*deep, strict=True)]) if deep else None


def attach_deep(layers: Any, count: int) -> None:
    """Let the first `count` of all layers add the features that come as their context."""
    for layer in layers:
        if layer.layer_number <= count:
            layer.register_forward_hook(_add, with_kwargs=True)


def _add(layer: Any, args: Any, kwargs: dict[str, Any], output: tuple[Tensor, Tensor | None]) -> Any:
    hidden, deep = output
    if deep is None:
        return output
    shown: Shown = kwargs["packed_seq_params"].shown
    chosen = deep[layer.layer_number - 1][shown.features[: shown.visual]].to(hidden.dtype)
    return hidden.index_add(0, shown.places[: shown.visual], chosen[:, None]), deep


def _keep_encoders(module: Module, name: str, family: Family, dtype: torch.dtype) -> None:
    """Take the language model out of a module on the meta device, and make its encoders again, on the host."""
    for own, child in list(module.named_children()):
        parts = {family.part(f"{name}{own}.{parameter}") for parameter, _ in child.named_parameters()}
        if parts == {"language"}:
            delattr(module, own)
        elif "language" in parts:
            _keep_encoders(child, f"{name}{own}.", family, dtype)
        else:
            kind: Any = type(child)
            setattr(module, own, kind._from_config(child.config, dtype=dtype))


def _features(made: Any, modality: str, count: int) -> Tensor:
    """[n, H] the features of a modality. Raises RunError where the prompts have another number of placeholders."""
    found: Tensor = made.last_hidden_state if modality == "audio" else torch.cat(made.pooler_output)
    if len(found) != count:
        raise RunError(f"prompts have {count} placeholders for {modality}, and its encoder made {len(found)} features")
    return found
