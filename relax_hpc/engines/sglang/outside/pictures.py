"""Media on their way to a server that was there before the worker: pictures, which it processes once more by itself.

pixel_values ──undone──► picture of whole patches ──PNG──► the server's processor, which has nothing to resize ──► the same values
expanded tokens ──► one placeholder for each picture ──► expanded by the server: as many tokens as before, or its answer is refused
"""

from __future__ import annotations

import base64
import io
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from relax_hpc.files.errors import RunError
from relax_hpc.media.families import family_of
from relax_hpc.records import Media

TENSORS = {"pixel_values", "image_grid_thw"}
"""Names of the tensors of pictures."""
COLORS = 3


class Pictures:
    """Makes requests with pictures for a model's folder, which the server has too."""

    def __init__(self, model_dir: Path, config: Any) -> None:
        self._folder, self._token = model_dir, family_of(config).placeholders(config)["image"]

    def unexpanded(self, tokens: NDArray[np.int32]) -> NDArray[np.int32]:
        """The tokens with one placeholder for each picture."""
        stands = tokens == self._token
        kept: NDArray[np.int32] = tokens[~(stands & np.roll(stands, 1))]
        return kept

    def name(self, media: Media) -> list[str]:
        """The pictures as data URIs. Raises RunError for media that the server's processor would make otherwise."""
        media.check("the engine's pictures")
        if more := sorted(set(media.tensors) - TENSORS):
            raise RunError(
                f"a prompt shows more than pictures ({more}), and a server at rollout.sglang.address is sent pictures alone: "
                "leave the address out, and the worker starts a server of its own"
            )
        pictures = self._undone(media)
        again = self._processor(images=pictures, return_tensors="np")
        if any(not np.array_equal(again[name], media.tensors[name]) for name in TENSORS):
            sizes = [list(picture.size) for picture in pictures]
            raise RunError(
                f"pictures of {sizes} pixels would be other ones behind the processor of the server at rollout.sglang.address: "
                f"its own limits are {self._processor.size}; give [media] image_tokens within these, or leave the address out"
            )
        return [_png(picture) for picture in pictures]

    @cached_property
    def _processor(self) -> Any:
        """The model's own, with its own limits, as the server has it."""
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(self._folder, local_files_only=True)

    def _undone(self, media: Media) -> list[Image.Image]:
        """The pictures that the processor cut into patches, of eight bits a color again."""
        about = self._processor
        side, merge, frames = about.patch_size, about.merge_size, about.temporal_patch_size
        mean, spread = (255 * np.array(values, np.float64) for values in (about.image_mean, about.image_std))
        values, first, found = media.tensors["pixel_values"], 0, []
        for _, height, width in media.tensors["image_grid_thw"].tolist():
            patches = values[first : first + height * width]
            first += height * width
            blocks = patches.reshape(height // merge, width // merge, merge, merge, COLORS, frames, side, side)
            plain = blocks[..., 0, :, :].transpose(0, 2, 5, 1, 3, 6, 4).reshape(height * side, width * side, COLORS)
            found.append(Image.fromarray((plain * spread + mean).round().clip(0, 255).astype(np.uint8)))
        return found


def _png(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
