"""Encoders of media, transformers' own, whole on each process of the first pipeline stage.

embeddings of this process's tokens ──features of its placeholders put in──► input of the first layer
features of inner layers of the vision encoder ──► added behind the language model's first layers (deepstack)

Every process of a context- or tensor-parallel group encodes the whole micro-batch, or those of a tensor-parallel one a
share each and exchange the features. It takes those of its own tokens: where tokens are shared out, so are the encoders'
gradients, and they are summed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
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
TOWERS = {"visual": ("image", "video"), "audio_tower": ("audio",)}
"""Encoder's name in transformers' model -> modalities."""
ARGUMENTS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
    "audio": ("input_features", "feature_attention_mask"),
}
"""Tensors that a modality's encoder takes."""
BLANK_FRAMES = 8
"""Length of a sound that stands for none."""


class Encoders(Module):
    """Transformers' model without its language model; its weights are not set."""

    def __init__(self, hf: Any, config: TransformerConfig, group: Any) -> None:
        """group: the tensor-parallel processes."""
        super().__init__()
        self.group, self.sequence = group, config.sequence_parallel
        with torch.device("meta"):
            self.model: Any = from_config(hf)
        on_cpu = config.use_cpu_initialization
        device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        with no_init_weights():
            _keep_encoders(self.model, "", family_of(hf), config.params_dtype)
        self.to(device).model.eval()
        layers: list[Any] = [layer for layer in self.modules() if isinstance(layer, GradientCheckpointingLayer)]
        for layer in layers if config.recompute_granularity == "full" else []:
            layer.training = layer.gradient_checkpointing = True  # nothing in them is: no dropout
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
        # Megatron sums the gradients of parameters so marked over the tensor-parallel processes, or takes their mean
        mark = "sequence_parallel" if config.sequence_parallel else "average_gradients_across_tp_domain"
        for parameter in self.parameters():
            setattr(parameter, mark, True)

    def forward(self, embeddings: Tensor, shown: Shown) -> tuple[Tensor, Tensor | None]:
        """([t, 1, H] the embeddings with features in their places, [layers, n, H] features for the first layers).

        Encoders that a micro-batch has nothing for see a blank: reductions that overlap the backward pass wait for all
        gradients, which must come in one order on all processes.
        """
        found, deep = [], []
        for tower in (tower for tower in TOWERS if hasattr(self.model.base_model, tower)):
            seen = [modality for modality in TOWERS[tower] if sum(shown.counts[modality])]
            for modality in seen:
                features = _gathered(self._encode(modality, shown), shown.counts[modality], self.group, self.sequence)
                found.append(features[:, 0])
                deep += [features[:, 1:]] if features.shape[1] > 1 else []
            if not seen and torch.is_grad_enabled():
                embeddings = embeddings + 0 * self._encode(TOWERS[tower][0], shown).sum()
        if found:
            chosen = torch.cat(found)[shown.features].to(embeddings.dtype)
            embeddings = embeddings[:, 0].index_copy(0, shown.places, chosen)[:, None]
        return embeddings, torch.cat(deep).transpose(0, 1) if deep else None

    def _encode(self, modality: str, shown: Shown) -> Tensor:
        """[n, 1 + layers, H] the features of this process's share, then those for the first layers; of a blank for none."""
        own = shown.counts[modality][shown.rank]
        tensors = shown.tensors if own else self._blank(modality)
        encode = getattr(self.model.base_model, f"get_{modality}_features")
        made = encode(*(tensors[name] for name in ARGUMENTS[modality]), return_dict=True)
        main = made.last_hidden_state if modality == "audio" else torch.cat(made.pooler_output)
        if own and len(main) != own:
            raise RunError(f"prompts have {own} placeholders for {modality}, and its encoder made {len(main)} features")
        return torch.stack([main, *(torch.cat(layer) for layer in getattr(made, "deepstack_features", None) or [])], 1)

    def _blank(self, modality: str) -> dict[str, Tensor]:
        """The least that the encoder of a modality takes."""
        body = self.model.base_model
        if modality == "audio":
            like, shape = body.audio_tower.conv_out.weight, (1, body.audio_tower.num_mel_bins, BLANK_FRAMES)
            mask = like.new_ones(1, BLANK_FRAMES, dtype=torch.long)
            return {"input_features": like.new_zeros(shape), "feature_attention_mask": mask}
        side, like = body.visual.spatial_merge_size, body.visual.patch_embed.proj.weight
        grid = torch.tensor([[1, side, side]], device=like.device)
        return {"pixel_values": like.new_zeros(side * side, like[0].numel()), "image_grid_thw": grid,
                "pixel_values_videos": like.new_zeros(side * side, like[0].numel()), "video_grid_thw": grid}  # fmt: skip


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


class _Gather(torch.autograd.Function):
    """Concatenate the shares of a group; see _gathered."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, counts: list[int], group: Any, sequence: bool) -> Tensor:
        ctx.counts, ctx.group, ctx.sequence = counts, group, sequence
        padded = share.new_zeros((max(counts), *share.shape[1:]))
        padded[: len(share)] = share
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.sequence:  # each process has the gradients at its own tokens, and parameters' are summed later
            grad = grads[0].clone()
            dist.all_reduce(grad, group=ctx.group)
        else:  # each process has all, and the mean of parameters' is taken later
            grad = grads[0] * len(ctx.counts)
        return grad.split(ctx.counts)[ctx.group.rank()], None, None, None


def _gathered(share: Tensor, counts: list[int], group: Any, sequence: bool) -> Tensor:
    """[n, …] the features of all shares, the first `counts` of each."""
    if len(counts) == 1:
        return share
    share = share[: counts[group.rank()]]
    gathered: Tensor = _Gather.apply(share, counts, group, sequence)  # type: ignore[no-untyped-call]
    return gathered
