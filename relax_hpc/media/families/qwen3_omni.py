"""Qwen3-Omni-MoE's thinker: images, video and audio, positions on three axes. Its talker is left as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from relax_hpc.media.families.base import methods_of
from relax_hpc.media.families.qwen_vl import IMAGE, VIDEO, QwenVision
from relax_hpc.records import Media


class Qwen3Omni(QwenVision):
    """The thinker of Qwen3-Omni-MoE, trained by itself; its names in the files begin with `thinker.`."""

    name = "qwen3_omni"
    model_types = frozenset({"qwen3_omni_moe", "qwen3_omni_moe_thinker"})
    placeholder_keys: ClassVar = {"image": "image_token_id", "video": "video_token_id", "audio": "audio_token_id"}
    axes = 3
    marks: ClassVar = {"image": IMAGE, "video": VIDEO, "audio": "<|audio_start|><|audio_pad|><|audio_end|>"}
    prefix = "thinker."
    frames_a_position = 8
    parts = (
        ("visual.merger.", "projector"),
        ("visual.merger_list.", "projector"),
        ("visual.", "vision"),
        ("audio_tower.proj1.", "projector"),
        ("audio_tower.proj2.", "projector"),
        ("audio_tower.", "audio"),
    )

    def model_class(self) -> Any:
        from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

        return Qwen3OmniMoeThinkerForConditionalGeneration

    def config(self, config: Any) -> Any:
        return getattr(config, "thinker_config", config)

    def tensors(self, processor: Any, made: dict[str, NDArray[Any]], fps: Sequence[float]) -> dict[str, NDArray[Any]]:
        """Give each video its own rate: the processor knows one for all of a call."""
        if not fps:
            return made
        seconds = np.array([processor.video_processor.temporal_patch_size / rate for rate in fps], np.float32)
        return {**made, "video_second_per_grid": seconds}

    def positions(self, config: Any, tokens: NDArray[np.integer[Any]], media: Media | None) -> NDArray[Any]:
        import torch

        own = self.config(config)
        tensors = {
            name: torch.from_numpy(np.asarray(value)) for name, value in (media.tensors if media else {}).items()
        }
        model = methods_of(self.model_class(), own, spatial_merge_size=own.vision_config.spatial_merge_size)
        heard = tensors.get("feature_attention_mask")
        positions, _ = model.get_rope_index(
            input_ids=torch.from_numpy(np.asarray(tokens, np.int64))[None],
            image_grid_thw=tensors.get("image_grid_thw"),
            video_grid_thw=tensors.get("video_grid_thw"),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            audio_seqlens=None if heard is None else heard.sum(-1),
            second_per_grids=tensors.get("video_second_per_grid"),
        )
        found: NDArray[Any] = positions[:, 0].floor().numpy()  # whole: servers of models know no others
        return found
