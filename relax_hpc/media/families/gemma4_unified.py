"""Gemma 4 unified: patches and sound go through linear layers, without encoders; positions have one axis."""

from __future__ import annotations

from typing import Any, ClassVar

from relax_hpc.media.families.base import Family


class Gemma4Unified(Family):
    """Gemma 4 unified. It is trained with causal attention over images too."""

    name = "gemma4_unified"
    model_types = frozenset({"gemma4_unified"})
    placeholder_keys: ClassVar = {"image": "image_token_id", "video": "video_token_id", "audio": "audio_token_id"}
    parts = (
        ("model.embed_vision.multimodal_embedder.", "projector"),
        ("model.embed_vision.", "vision"),
        ("model.embed_audio.", "audio"),
    )

    def model_class(self) -> Any:
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText
