"""Cells of a data set ──► what a processor takes, by Pillow, soundfile and PyAV; this module imports all three."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_hpc.media.pictures import check_picture, picture
from relax_hpc.media.sounds import check_sound, sound
from relax_hpc.media.videos import check_video, video
from relax_hpc.recipe.tables.source import Media as Limits


def decoded(
    modality: str,
    value: Any,
    folder: Path,
    limits: Limits,
    frame_size: Callable[[int, int], tuple[int, int]],
    rate_hz: int,
) -> Any:
    """A Pillow image, a Video, or [samples] at `rate_hz`. Raises MediaError."""
    match modality:
        case "image":
            return picture(value, folder, limits.largest_image_pixels)
        case "video":
            return video(value, folder, limits, frame_size)
        case _:
            return sound(value, folder, rate_hz, limits.longest_audio_s)


def check_header(modality: str, value: Any, folder: Path, limits: Limits) -> None:
    """Raise MediaError for what a file's header alone shows to be unusable."""
    match modality:
        case "image":
            check_picture(value, folder, limits.largest_image_pixels)
        case "video":
            check_video(value, folder, limits)
        case _:
            check_sound(value, folder, limits.longest_audio_s)
