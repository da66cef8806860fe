"""Qwen3-VL, dense and MoE, and Qwen2.5-VL: images and video, positions on three axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from relax_hpc.media.families.base import Family, methods_of
from relax_hpc.recipe.tables.source import Media as Limits
from relax_hpc.records import Media

IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"


class QwenVision(Family):
    """The common part of Qwen's models with pictures: patches of one processor, sizes in whole merged patches."""

    def options(self, processor: Any, limits: Limits) -> dict[str, dict[str, Any]]:
        fewest, most = (tokens * _side(processor.image_processor) ** 2 for tokens in limits.image_tokens)
        frames = {"do_sample_frames": False, "do_resize": False}  # done while they are decoded
        if hasattr(processor.video_processor, "cap_pixels_per_frame"):  # until transformers 5.22, which has no choice
            frames["cap_pixels_per_frame"] = False
        return {"images_kwargs": {"size": {"shortest_edge": fewest, "longest_edge": most}}, "videos_kwargs": frames}

    def frame_size(self, processor: Any, limits: Limits) -> Callable[[int, int], tuple[int, int]]:
        from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

        side = _side(processor.video_processor)
        fewest, most = (tokens * side**2 for tokens in limits.video_frame_tokens)
        return lambda height, width: smart_resize(height, width, side, fewest, most)


def _side(processor: Any) -> int:
    """Pixels of a token's side."""
    return int(processor.patch_size * processor.merge_size)


class Qwen3VL(QwenVision):
    """Qwen3-VL and Qwen3-VL-MoE: every frame of a video stands between tokens of its own, with its time as text."""

    name = "qwen3_vl"
    language = "model.language_model."
    model_types = frozenset({"qwen3_vl", "qwen3_vl_moe"})
    placeholder_keys: ClassVar = {"image": "image_token_id", "video": "video_token_id"}
    axes = 3
    marks: ClassVar = {"image": IMAGE, "video": VIDEO}
    parts: ClassVar[Sequence[tuple[str, str]]] = (
        ("model.visual.merger.", "projector"),
        ("model.visual.deepstack_merger_list.", "projector"),
        ("model.visual.", "vision"),
    )

    def model_class(self) -> Any:
        from transformers import AutoModelForImageTextToText

        return AutoModelForImageTextToText

    def positions(self, config: Any, tokens: NDArray[np.integer[Any]], media: Media | None) -> NDArray[Any]:
        import torch

        tensors = {
            name: torch.from_numpy(np.asarray(value)) for name, value in (media.tensors if media else {}).items()
        }
        model = methods_of(self._body(config), config)
        positions, _ = model.get_rope_index(
            input_ids=torch.from_numpy(np.asarray(tokens, np.int64))[None],
            mm_token_type_ids=torch.from_numpy(self.token_types(config, tokens))[None],
            image_grid_thw=tensors.get("image_grid_thw"),
            video_grid_thw=tensors.get("video_grid_thw"),
            second_per_grid_ts=tensors.get("second_per_grid_ts"),
        )
        found: NDArray[Any] = positions[:, 0].numpy()
        return found

    def _body(self, config: Any) -> Any:
        """The class that has get_rope_index."""
        from transformers import AutoModel

        body: Any = AutoModel._model_mapping[type(config)]
        return body


class Qwen25VL(Qwen3VL):
    """Qwen2.5-VL: positions of video follow the seconds between its frames."""

    name = "qwen2_5_vl"
    model_types = frozenset({"qwen2_5_vl"})
    renamed = (("model.language_model.", "model."), ("model.visual.", "visual."))
    parts = (("model.visual.merger.", "projector"), ("model.visual.", "vision"))
