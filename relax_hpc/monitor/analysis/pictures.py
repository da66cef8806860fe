"""Media of a prompt as a page shows them: pictures and frames as the model saw them, sounds as their spectrum, or to be played
where the shard keeps their files; small, embedded.

tensors of a shard + the settings of the model's processor ──► [frames, height, width, 3] ──► a small JPEG in a data URI
files of a shard (spool.media = "source") ──► sounds ──► a data URI

Only patches as the processors of Qwen's families lay them out are understood; of others nothing is shown.
"""

from __future__ import annotations

import base64
import html
import io
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from relax_hpc.files.errors import RunError

if TYPE_CHECKING:
    from relax_hpc.monitor.analysis import RunView

MOST_SHOWN = 4
"""Pictures, videos and sounds of one prompt that a page shows."""
FRAMES = 6
"""Frames of a video that are shown, side by side."""
SIDE = 240
"""Most pixels of the shorter side."""


MOST_SOUND_BYTES = 1 << 19
"""Longest file of a sound that a page plays; of a longer one it shows the spectrum."""
SOUNDS = {b"RIFF": "audio/wav", b"fLaC": "audio/flac", b"OggS": "audio/ogg"}
"""Beginnings of sounds' files; others are taken for MP3, and a browser finds out."""


class Shown(NamedTuple):
    """A picture or a sound for a page."""

    label: str
    uri: str

    @property
    def html(self) -> str:
        """The element that shows or plays it."""
        if self.uri.startswith("data:audio/"):
            return f'<audio controls class="shown" src="{self.uri}" title="{self.label}"></audio>'
        return f'<img class="shown" src="{self.uri}" alt="{self.label}" title="{self.label}">'


class Page(str):
    """HTML that a notebook shows as it is."""

    def _repr_html_(self) -> str:
        return str(self)


def shown(view: RunView, request: str, group: int) -> list[Shown]:
    """The first few media of a group's prompt; nothing where its shard is gone, damaged, or keeps no tensors."""
    try:
        tensors = view.media(request, group)
        sounds = [data for modality, data in view.media_files(request, group) if modality == "audio"]
    except RunError:
        return []
    played = [Shown("audio", _sound(data)) for data in sounds if len(data) <= MOST_SOUND_BYTES]
    drawn = (Shown(label, _uri(pixels)) for label, pixels in _pictures(tensors, view.run.model))
    return [*itertools.islice(drawn, MOST_SHOWN), *played[:MOST_SHOWN]]


def page(view: RunView, request: str, groups: Sequence[int]) -> Page:
    """The media of some groups as HTML with everything in it."""
    parts = [f"<h1>{html.escape(request)}</h1>"]
    for group in groups:
        media = "\n".join(one.html for one in shown(view, request, group)) or "nothing to show"
        parts.append(f"<h2>group {group}</h2>\n{media}")
    return Page('<meta charset="utf-8">\n' + "\n".join(parts) + "\n")


def _pictures(tensors: Mapping[str, NDArray[Any]], model: Path) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    for label, values, grid, kind in (
        ("image", "pixel_values", "image_grid_thw", "image_processor"),
        ("video", "pixel_values_videos", "video_grid_thw", "video_processor"),
    ):
        if values in tensors and grid in tensors:
            for frames in frames_of(tensors[values], tensors[grid], _settings(model, kind)):
                picked = np.unique(np.linspace(0, len(frames) - 1, FRAMES if label == "video" else 1).astype(int))
                yield label, np.concatenate([*frames[picked]], axis=1)
    for spectrum in tensors.get("input_features", ()):
        low, high = float(spectrum.min()), float(spectrum.max())
        gray = ((spectrum[::-1] - low) / max(high - low, 1e-9) * 255).astype(np.uint8)
        yield "audio (its spectrum)", np.repeat(gray[:, :, None], 3, axis=2)


def frames_of(
    patches: NDArray[Any], grids: NDArray[Any], settings: Mapping[str, Any]
) -> Iterator[NDArray[np.uint8]]:  # [frames, height, width, 3] each
    """Put the patches of Qwen's processors together again; nothing where they are laid out otherwise."""
    merge, patch, frames = (settings.get(k) for k in ("merge_size", "patch_size", "temporal_patch_size"))
    begin = 0
    for t, h, w in grids.tolist():
        part = patches[begin : begin + t * h * w]
        begin += t * h * w
        if not (merge and patch and frames) or part.size != t * h * w * frames * 3 * patch**2:
            return
        split = part.reshape(t, h // merge, w // merge, merge, merge, 3, frames, patch, patch)
        pixels = split.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(t * frames, h * patch, w * patch, 3)
        pixels = pixels * np.float32(settings["image_std"]) + np.float32(settings["image_mean"])
        yield (pixels * 255).round().clip(0, 255).astype(np.uint8)


def _settings(model: Path, kind: str) -> Mapping[str, Any]:
    """Settings of a part of the model's processor, in whichever of its files they are."""
    own = {"image_processor": "preprocessor_config.json", "video_processor": "video_preprocessor_config.json"}
    for path in (model / own[kind], model / "processor_config.json"):
        if path.is_file():
            found: dict[str, Any] = json.loads(path.read_text())
            return dict(found.get(kind, found))
    return {}


def _uri(pixels: NDArray[np.uint8]) -> str:
    from PIL import Image

    image, memory = Image.fromarray(pixels), io.BytesIO()
    scale = SIDE / min(image.size)
    if scale < 1:
        image = image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))))
    image.save(memory, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(memory.getvalue()).decode()}"


def _sound(data: bytes) -> str:
    return f"data:{SOUNDS.get(data[:4], 'audio/mpeg')};base64,{base64.b64encode(data).decode()}"
