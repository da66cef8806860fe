"""Qwen3-VL, dense and MoE, and Qwen2.5-VL: images and video, positions on three axes."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from relax_hpc.media.families.base import Family, methods_of
from relax_hpc.records import Media


class Qwen3VL(Family):
    """Qwen3-VL and Qwen3-VL-MoE: every frame of a video stands between tokens of its own, with its time as text."""

    name = "qwen3_vl"
    model_types = frozenset({"qwen3_vl", "qwen3_vl_moe"})
    placeholder_keys: ClassVar = {"image": "image_token_id", "video": "video_token_id"}
    axes = 3
    parts = (
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

    def _body(self, config: Any) -> type[Any]:
        """The class that has get_rope_index."""
        from transformers import AutoModel

        body: type[Any] = AutoModel._model_mapping[type(config)]
        return body


class Qwen25VL(Qwen3VL):
    """Qwen2.5-VL: positions of video follow the seconds between its frames."""

    name = "qwen2_5_vl"
    model_types = frozenset({"qwen2_5_vl"})
    renamed = (("model.language_model.", "model."), ("model.visual.", "visual."))
    parts = (("model.visual.merger.", "projector"), ("model.visual.", "vision"))
