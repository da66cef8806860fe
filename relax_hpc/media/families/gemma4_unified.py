"""Gemma4Unified: images, video and audio without towers. Patches and frames of sound enter through linear layers; one axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from relax_hpc.files.errors import RunError
from relax_hpc.media.families.base import Family
from relax_hpc.recipe.tables.source import Media as Limits

PADDING = -1
"""Position of a patch that only fills a picture up to the processor's number of patches."""


class Gemma4Unified(Family):
    """Every picture and every frame is stretched to about the processor's number of tokens, its own or a smaller one."""

    name = "gemma4_unified"
    model_types = frozenset({"gemma4_unified"})
    placeholder_keys: ClassVar = {"image": "image_token_id", "video": "video_token_id", "audio": "audio_token_id"}
    marks: ClassVar = {"image": "<|image|>", "video": "<|video|>", "audio": "<|audio|>"}
    parts: ClassVar[Sequence[tuple[str, str]]] = (
        ("model.embed_vision.multimodal_embedder.", "projector"),
        ("model.embed_vision.", "vision"),
        ("model.embed_audio.", "audio"),
    )
    renamed = (
        ("model.embed_vision.multimodal_embedder.embedding_projection.", "model.embed_vision.embedding_projection."),
        ("model.embed_vision.", "model.vision_embedder."),
    )
    filling: ClassVar = {"image_position_ids": PADDING, "video_position_ids": PADDING}

    def model_class(self) -> Any:
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText

    def check(self, config: Any) -> None:
        wanted = config.get_text_config().use_bidirectional_attention
        if wanted is not None:
            raise RunError(
                f"the model ({self.name}) has text_config.use_bidirectional_attention = '{wanted}' in its config.json, and "
                "engines and trainers let no token see a later one: set it to null there, and images are seen in their order"
            )

    def options(self, processor: Any, limits: Limits) -> dict[str, dict[str, Any]]:
        frames = {"do_sample_frames": False, "do_resize": False}  # done while they are decoded
        return {
            "images_kwargs": {"max_soft_tokens": _tokens(processor.image_processor, "image_tokens", limits)},
            "videos_kwargs": {
                "max_soft_tokens": _tokens(processor.video_processor, "video_frame_tokens", limits),
                **frames,
            },
        }

    def frame_size(self, processor: Any, limits: Limits) -> Callable[[int, int], tuple[int, int]]:
        from transformers.models.gemma4_unified.video_processing_gemma4_unified import get_aspect_ratio_preserving_size

        own = processor.video_processor
        pool = int(own.pooling_kernel_size)
        most = _tokens(own, "video_frame_tokens", limits) * pool**2
        return lambda height, width: get_aspect_ratio_preserving_size(height, width, own.patch_size, most, pool)

    def arguments(self, model: Any, shown: dict[str, Any]) -> dict[str, Any]:
        """Embed frames here: the forward of transformers 5.19 loses how many each video has."""
        if "pixel_values_videos" not in shown:
            return shown
        frames = ("pixel_values_videos", "video_position_ids", "num_frames_per_video")
        embedded = {"video": model.get_video_features(*(shown.pop(name) for name in frames))}
        if "pixel_values" in shown:
            pictures = ("pixel_values", "image_position_ids")
            embedded["image"] = model.get_image_features(*(shown.pop(name) for name in pictures))
        return {**shown, "mm_encoder_outputs": embedded}


def _tokens(processor: Any, key: str, limits: Limits) -> int:
    """Tokens of a picture: as many as the processor makes, or as the limit allows of the numbers that it knows."""
    from transformers.models.gemma4_unified import image_processing_gemma4_unified as known

    most: int = getattr(limits, key)[1]
    allowed = [n for n in known._SUPPORTED_SOFT_TOKENS if n <= min(most, processor.max_soft_tokens)]
    if not allowed:
        raise RunError(
            f"media.{key} allows {most} tokens, and the model's processor makes one of "
            f"{list(known._SUPPORTED_SOFT_TOKENS)}: allow one of these"
        )
    return int(max(allowed))
