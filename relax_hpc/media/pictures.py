"""Pictures, by Pillow: eight bits a color, upright, transparent parts over white."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from relax_hpc.media.values import MediaError, Stored, stored

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")
"""Formats of Pillow that are read; others run programs of their own, or are no pictures."""
DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N")
"""Modes with sixteen bits a pixel, which Pillow cuts off above 255 instead of scaling them."""
BROKEN = (OSError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, EOFError, struct.error)
"""Errors that Pillow's readers raise over damaged files."""
_DEEP_STEPS = 257
"""Sixteen-bit steps in one of eight bits: 65535 / 255."""


def picture(value: Any, folder: Path, most_pixels: int) -> Image.Image:
    """Decode a cell with a picture. Raises MediaError."""
    file = stored(value, folder)
    with _opened(file, most_pixels) as image:
        try:
            image.load()
            return _plain(ImageOps.exif_transpose(image))
        except BROKEN as error:
            raise _damaged(file, error) from error


def check_picture(value: Any, folder: Path, most_pixels: int) -> None:
    """Look at a picture's header alone. Raises MediaError for what it shows to be unusable."""
    with _opened(stored(value, folder), most_pixels):
        pass


@contextmanager
def _opened(file: Stored, most_pixels: int) -> Iterator[ImageFile.ImageFile]:
    with file.open() as opened, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            image = Image.open(opened, formats=FORMATS)
            (width, height), frames = image.size, getattr(image, "n_frames", 1)
        except UnidentifiedImageError:
            raise MediaError(f"{file.name} is no picture of the formats {list(FORMATS)}, or is damaged") from None
        except Image.DecompressionBombError as error:
            raise MediaError(f"{file.name}: {error}; media.largest_image_pixels = {most_pixels}") from None
        except BROKEN as error:
            raise _damaged(file, error) from error
        if width * height > most_pixels:
            raise MediaError(
                f"{file.name} has {width} × {height} = {width * height} pixels, more than "
                f"media.largest_image_pixels = {most_pixels}"
            )
        if frames > 1:
            raise MediaError(f"{file.name} is animated, with {frames} frames: give it as a video, or one of its frames")
        yield image


def _damaged(file: Stored, error: Exception) -> Exception:
    """The error to raise: a file system that fails is no fault of the picture's."""
    failed = isinstance(error, OSError) and error.errno is not None
    return error if failed else MediaError(f"{file.name} is damaged: {error}")


def _plain(image: Image.Image) -> Image.Image:
    """Make a picture of eight bits a color, without transparency."""
    if image.mode in DEEP:
        return Image.fromarray((np.asarray(image, np.int64) // _DEEP_STEPS).clip(0, 255).astype(np.uint8)).convert(
            "RGB"
        )
    if image.mode == "F":
        raise MediaError("a picture of floating-point values has no white and no black: store it with 8 or 16 bits")
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")
