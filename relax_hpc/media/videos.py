"""Video, by PyAV: the frames of a steady rate, made small while they are decoded, so that memory stays bounded.

packets (their times alone) ──► which frames are shown at 0, 1/fps, 2/fps … ──► those are decoded and kept
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from relax_hpc.media.pictures import picture
from relax_hpc.media.values import MediaError, Stored, stored
from relax_hpc.recipe.tables.source import Media as Limits

_LENGTH = re.compile(r"(\d+):(\d+):([\d.]+)")
"""Matches hours, minutes and seconds."""
ROUGHLY_S = 1.0
"""Seconds by which a video may be shorter than its header says: its last frame may be shown for long."""
FrameSize = Callable[[int, int], tuple[int, int]]
"""(height, width) of a frame ──► those that the model is to see."""


@dataclass(frozen=True, slots=True)
class Video:
    """Frames at a steady rate."""

    frames: NDArray[np.uint8]  # [frames, height, width, 3]
    fps: float


def video(value: Any, folder: Path, limits: Limits, size: FrameSize) -> Video:
    """Decode a cell with a video, or with its frames. Raises MediaError."""
    frames, fps = listed(value, limits)
    if frames is not None:
        return _of_pictures(frames, fps, folder, limits, size)
    file = stored(value, folder)
    with file.open() as opened:
        try:
            times, duration_s = _times(file, opened, limits)
            wanted, rate = _chosen(times, duration_s, limits)
            opened.seek(0)
            return Video(_decode(file, opened, wanted, size), rate)
        except (av.FFmpegError, UnicodeError) as error:
            raise MediaError(f"{file.name} is no video, or is damaged: {error}") from None


def check_video(value: Any, folder: Path, limits: Limits) -> None:
    """Look at a video's header alone. Raises MediaError for what it shows to be unusable."""
    frames, _ = listed(value, limits)
    if frames is not None:
        for frame in frames:
            stored(frame, folder).check()
        return
    file = stored(value, folder)
    with file.open() as opened:
        try:
            with av.open(opened) as container:
                _check_header(file, container, limits)
        except (av.FFmpegError, UnicodeError) as error:
            raise MediaError(f"{file.name} is no video, or is damaged: {error}") from None


def listed(value: Any, limits: Limits) -> tuple[Sequence[Any] | None, float]:
    """Frames that are given one by one, with their rate; None for the file of a video. Raises MediaError for no frames."""
    frames, fps = (value, None) if isinstance(value, list) else (None, None)
    if isinstance(value, Mapping) and value.get("frames") is not None:
        frames, fps = value["frames"], value.get("fps")
    if frames is None:
        return None, 0.0
    if not len(frames):
        raise MediaError("a video without frames")
    rate = limits.video_fps if fps is None else float(fps)
    if not 0 < rate < float("inf"):
        raise MediaError(f"a video of {fps} frames a second")
    return frames, rate


def _of_pictures(frames: Sequence[Any], fps: float, folder: Path, limits: Limits, size: FrameSize) -> Video:
    wanted, rate = _chosen(np.arange(len(frames)) / fps, len(frames) / fps, limits)
    kept = [picture(frames[i], folder, limits.largest_image_pixels) for i in wanted]
    height, width = size(kept[0].height, kept[0].width)
    resized = [np.asarray(one.resize((width, height), Image.Resampling.BICUBIC)) for one in kept]
    return Video(np.stack(resized), rate)


def _check_header(file: Stored, container: Any, limits: Limits) -> Any:
    """Return the stream of pictures. Raises MediaError for a video without one, or beyond the limits."""
    if not container.streams.video:
        raise MediaError(f"{file.name} has no pictures: it is a sound, or a part of it is missing")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise MediaError(f"{file.name} has pictures of an unknown kind, or is damaged")
    if stream.width * stream.height > limits.largest_image_pixels:
        raise MediaError(
            f"{file.name} has frames of {stream.width} × {stream.height} pixels, more than "
            f"media.largest_image_pixels = {limits.largest_image_pixels}"
        )
    if container.duration:
        _check_length(file, container.duration / av.time_base, limits)
    return stream


def _check_length(file: Stored, seconds: float, limits: Limits) -> None:
    if seconds > limits.longest_video_s:
        raise MediaError(
            f"{file.name} lasts {seconds:.1f} s, longer than media.longest_video_s = {limits.longest_video_s:g}"
        )


def _times(file: Stored, opened: Any, limits: Limits) -> tuple[NDArray[np.float64], float]:
    """When each frame is shown, in seconds from the first, and how long all last."""
    with av.open(opened) as container:
        stream = _check_header(file, container, limits)
        declared, rate, whole_s = stream.frames, float(stream.average_rate or 0), _declared_s(container, stream)
        stamps = [
            float(p.pts * p.time_base)
            for p in container.demux(stream)
            if p.pts is not None and p.size and not p.is_discard
        ]
    if not stamps:
        raise MediaError(f"{file.name} is a video without frames")
    if len(stamps) < declared:
        raise MediaError(f"{file.name} is truncated: {len(stamps)} of {declared} frames are there")
    times = np.sort(np.array(stamps)) - min(stamps)
    usual_s = 1 / rate if rate else float(np.median(np.diff(times))) if len(times) > 1 else 1 / limits.video_fps
    duration_s = float(times[-1]) + usual_s
    if duration_s + max(ROUGHLY_S, float(np.diff(times).max(initial=0))) < whole_s:
        raise MediaError(f"{file.name} is truncated: {duration_s:.1f} of {whole_s:.1f} s are there")
    _check_length(file, duration_s, limits)
    return times, duration_s


def _declared_s(container: Any, stream: Any) -> float:
    """Seconds of pictures that a header speaks of; 0 where it speaks of none, or of a sound too."""
    if said := _LENGTH.fullmatch(stream.metadata.get("DURATION", "")):  # Matroska and WebM, which count no frames
        return int(said[1]) * 3600 + int(said[2]) * 60 + float(said[3])
    alone = len(container.streams) == 1 and container.duration
    return container.duration / av.time_base if alone else 0.0


def _chosen(times: NDArray[np.float64], duration_s: float, limits: Limits) -> tuple[list[int], float]:
    """Indices of the frames that are seen at a steady rate, and that rate; a frame may be seen several times."""
    fewest, most = limits.video_frames
    count = min(max(round(duration_s * limits.video_fps), fewest), most)
    seen_at = np.arange(count) * (duration_s / count)
    wanted = np.searchsorted(times, seen_at + duration_s * 1e-9, side="right") - 1
    return wanted.clip(0).tolist(), count / duration_s


def _decode(file: Stored, opened: Any, wanted: list[int], size: FrameSize) -> NDArray[np.uint8]:
    kept: dict[int, NDArray[np.uint8]] = {}
    needed, index = set(wanted), -1
    with av.open(opened) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"  # a corrupt frame is then the same frame each time
        shape: tuple[int, int] | None = None
        for index, frame in enumerate(container.decode(stream)):
            if index in needed:
                shape = shape or size(frame.height, frame.width)
                plain = frame.reformat(width=shape[1], height=shape[0], format="rgb24", interpolation="BICUBIC")
                kept[index] = plain.to_ndarray()
    if missing := len(needed - set(kept)):
        raise MediaError(
            f"{file.name} is damaged: {index + 1} frames can be decoded, {missing} of those to be shown cannot"
        )
    return np.stack([kept[i] for i in wanted])
