"""[media]: limits of what prompts show, the same for all sources, since one processor serves the run."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from relax_hpc.recipe.tables.table import Key, Table, conflict

Modality = Literal["image", "video", "audio"]
MODALITIES: tuple[Modality, ...] = ("image", "video", "audio")


class Media(Table):
    """Limits of images, video and audio in prompts. What is larger is made smaller or refused before the model sees it."""

    image_tokens: tuple[PositiveInt, PositiveInt] = Key(
        (4, 16384), "Fewest and most tokens of a picture; it is made larger or smaller to fit."
    )
    largest_image_pixels: PositiveInt = Key(
        1 << 26, "Most pixels of a picture's file, and of a video's frame; larger ones are refused unread."
    )
    video_fps: PositiveFloat = Key(2.0, "Frames a second that are taken of a video.")
    video_frames: tuple[PositiveInt, PositiveInt] = Key(
        (4, 768), "Fewest and most frames of a video; the rate becomes higher or lower to fit."
    )
    video_frame_tokens: tuple[PositiveInt, PositiveInt] = Key(
        (128, 768), "Fewest and most tokens that a frame would have as a picture of its size."
    )
    longest_video_s: PositiveFloat = Key(3600.0, "Longest video in seconds; longer ones are refused.")
    longest_audio_s: PositiveFloat = Key(300.0, "Longest sound in seconds; longer ones are refused.")

    @model_validator(mode="after")
    def _ordered(self) -> Media:
        for key in ("image_tokens", "video_frames", "video_frame_tokens"):
            fewest, most = getattr(self, key)
            if fewest > most:
                raise conflict(f"media.{key} = {[fewest, most]} has its fewest first: [{most}, {fewest}]")
        return self
