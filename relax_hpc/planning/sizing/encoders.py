"""Encoders of models with media: their parameters by part, and what their forward pass keeps for the backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_hpc.media.families import family_of

LANGUAGE = {
    "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe", "qwen2_5_vl": "qwen2",
    "qwen3_omni_moe": "qwen3_moe", "qwen3_omni_moe_thinker": "qwen3_moe",
}  # fmt: skip
"""Type of a model with media -> type of its language model, as far as sizes go."""


@dataclass(frozen=True, slots=True)
class Tower:
    """One encoder."""

    layers: int
    hidden: int
    intermediate: int
    rows: int
    """Patches, or frames, of a token that the language model gets."""
    beside: float
    """Values that are made for a token beside the layers: by convolutions over a sound, of patches, by projectors."""


@dataclass(frozen=True, slots=True)
class Encoders:
    """The encoders of a model, with their projectors. Every process that has the embedding holds all of them."""

    parameters: Mapping[str, int] = field(default_factory=dict)
    """By part: "vision", "audio", "projector"."""
    towers: Mapping[str, Tower] = field(default_factory=dict)
    """By part."""

    @property
    def all(self) -> int:
        return sum(self.parameters.values())


TEXT_ONLY = Encoders()


def read_encoders(about: dict[str, Any]) -> tuple[dict[str, Any], Encoders]:
    """(the language model's configuration, the encoders) of a configuration whose type is in LANGUAGE.

    Parameters are counted in the model that transformers builds of it without memory, with one language layer.
    """
    import torch
    from transformers import CONFIG_MAPPING

    from relax_hpc.huggingface import from_config

    whole: Any = CONFIG_MAPPING[about["model_type"]].from_dict(about)
    family, own = family_of(whole), family_of(whole).config(whole)
    text = own.get_text_config()
    language = {**text.to_dict(), "model_type": LANGUAGE[about["model_type"]]}
    language["tie_word_embeddings"] = bool(getattr(own, "tie_word_embeddings", False))
    text.num_hidden_layers = 1
    with torch.device("meta"):
        model = from_config(whole)
    count: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if (part := family.part(name)) != "language":
            count[part] += parameter.numel()
    return language, Encoders(dict(count), _towers(own))


def _towers(config: Any) -> dict[str, Tower]:
    vision, audio = config.vision_config, getattr(config, "audio_config", None)
    patches = vision.spatial_merge_size**2
    pixels = 3 * vision.temporal_patch_size * vision.patch_size**2
    beside = patches * (pixels / 2 + 6 * vision.hidden_size)
    found = {"vision": Tower(vision.depth, vision.hidden_size, vision.intermediate_size, patches, beside)}
    if audio is not None:  # each of three convolutions halves the bands and the eight frames of a token
        values = audio.downsample_hidden_size * audio.num_mel_bins * (4 / 2 + 2 / 4 + 1 / 8)
        found["audio"] = Tower(audio.encoder_layers, audio.d_model, audio.encoder_ffn_dim, 1, values)
    return found
