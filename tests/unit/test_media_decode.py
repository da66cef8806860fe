"""Pictures, videos and sounds from real files: what is decoded, and which files are refused with which words."""

from __future__ import annotations

import base64
import errno
import io
import tempfile
import tracemalloc
import zlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from PIL import Image, ImageFile
from PIL.PngImagePlugin import PngInfo

from relax_hpc.media.pictures import check_picture, picture
from relax_hpc.media.sounds import check_sound, sound
from relax_hpc.media.values import WHOLE_BYTES, MediaError, digest
from relax_hpc.media.videos import check_video, video
from relax_hpc.recipe.tables.source import Media as Limits

PIXELS = 1 << 20
LIMITS = Limits(largest_image_pixels=PIXELS, longest_video_s=10, video_frames=(2, 8))
HERE = Path("/nowhere")


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def wave(samples: np.ndarray, rate: int = 16000, kind: str = "WAV", subtype: str = "FLOAT") -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def film(
    frames: int,
    fps: int = 8,
    side: int = 32,
    sounds: bool = False,
    codec: str = "mpeg4",
    kind: str = "mp4",
    **options: str,
) -> bytes:
    """A video whose frame i has the gray level 8 · i, for 32 frames; then they begin anew."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"film.{kind}"
        with av.open(str(path), "w", format=kind, options=options) as container:
            _film(container, frames, fps, side, sounds, codec)
        return path.read_bytes()


def _film(container: Any, frames: int, fps: int, side: int, sounds: bool, codec: str) -> None:
    stream = container.add_stream(codec, rate=fps)
    stream.width = stream.height = side
    stream.pix_fmt, stream.bit_rate = "yuv420p", 4_000_000
    heard = container.add_stream("aac", rate=16000, layout="mono") if sounds else None
    container.start_encoding()  # so that a video of no frames is a file too
    for i in range(frames):
        gray = np.full((side, side, 3), 8 * i % 256, np.uint8)
        container.mux(stream.encode(av.VideoFrame.from_ndarray(gray, format="rgb24")))
    container.mux(stream.encode(None))
    if heard is not None:
        tone = (0.5 * np.sin(np.arange(16000) / 8)).astype(np.float32)[None]
        frame = av.AudioFrame.from_ndarray(tone, "fltp", "mono")
        frame.sample_rate, frame.time_base = 16000, Fraction(1, 16000)
        container.mux(heard.encode(frame))
        container.mux(heard.encode(None))


def as_is(height: int, width: int) -> tuple[int, int]:
    return height, width


RED = Image.new("RGB", (4, 3), (255, 0, 0))


def test_a_picture_is_the_same_however_it_is_stored(tmp_path: Path) -> None:
    data = saved(RED)
    (tmp_path / "a.png").write_bytes(data)
    text = base64.b64encode(data).decode()
    values: list[Any] = [
        "a.png", data, {"bytes": data, "path": "gone.png"}, {"bytes": None, "path": "a.png"}, {"base64": text},
        f"data:image/png;base64,{text}", {"image_url": {"url": f"data:image/png;base64,{text}"}}, f"file://{tmp_path}/a.png",
    ]  # fmt: skip
    for value in values:
        assert np.array_equal(np.asarray(picture(value, tmp_path, PIXELS)), np.asarray(RED)), value
    assert len({digest(value, tmp_path) for value in values}) == 1
    assert digest(saved(Image.new("RGB", (4, 3), (254, 0, 0))), tmp_path) != digest(data, tmp_path)


def test_long_files_differ_by_their_ends_and_lengths(tmp_path: Path) -> None:
    data = bytes(WHOLE_BYTES + 100)
    found = {digest(d, tmp_path) for d in (data, data + b"\0", data[:-1] + b"\1", b"\1" + data[1:])}
    assert len(found) == 4


def test_alpha_goes_over_white_and_depth_is_kept() -> None:
    half = Image.new("RGBA", (1, 1), (255, 0, 0, 128))
    assert picture(saved(half), HERE, PIXELS).getpixel((0, 0)) == (255, 127, 127)
    gray = Image.new("LA", (1, 1), (0, 0))
    assert picture(saved(gray), HERE, PIXELS).getpixel((0, 0)) == (255, 255, 255)
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([0, 0, 255])
    assert picture(saved(palette, transparency=0), HERE, PIXELS).getpixel((0, 0)) == (255, 255, 255)
    deep = Image.fromarray(np.array([[0, 32768, 65535]], np.uint16))
    assert [picture(saved(deep), HERE, PIXELS).getpixel((x, 0))[0] for x in range(3)] == [0, 127, 255]
    ink = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert np.allclose(picture(saved(ink, "JPEG"), HERE, PIXELS).getpixel((4, 4)), (255, 0, 0), atol=3)
    assert picture(saved(Image.new("1", (2, 2), 1)), HERE, PIXELS).getpixel((0, 0)) == (255, 255, 255)


def test_a_picture_stands_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert picture(saved(RED, "JPEG", exif=exif), HERE, PIXELS).size == (3, 4)


def bomb() -> bytes:
    """A PNG of a few bytes whose header says 100,000 × 100,000."""
    data = saved(Image.new("L", (1, 1)))
    header = b"IHDR" + (100_000).to_bytes(4, "big") * 2 + data[24:29]
    return data[:12] + header + zlib.crc32(header).to_bytes(4, "big") + data[33:]


def swollen() -> bytes:
    """A PNG of some kilobytes with a text of 16 MiB in it."""
    about = PngInfo()
    about.add_text("a", " " * (1 << 24), zip=True)
    return saved(RED, pnginfo=about)


ANIMATED = saved(RED, "GIF", save_all=True, append_images=[Image.new("RGB", (4, 3), "blue")])
NOISE = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
PICTURE = saved(Image.fromarray(NOISE))


@pytest.mark.parametrize(
    ("make", "said", "in_header"),
    [
        (lambda: PICTURE[: len(PICTURE) // 2], "is damaged", False),
        (lambda: saved(Image.fromarray(NOISE), "JPEG")[:900], "is damaged", False),
        (lambda: b"", "no picture", True),
        (lambda: b"<svg/>", "no picture of the formats", True),
        (lambda: ANIMATED, "is animated, with 2 frames", True),
        (lambda: saved(Image.new("L", (1025, 1024))), "1025 × 1024 = 1049600 pixels, more than media.largest_image_pixels", True),
        (bomb, "media.largest_image_pixels", True),
        (swollen, "Decompressed data too large", True),
        (lambda: "gone.png", "No such file", True),
        (lambda: "https://x.org/a.png", "nothing is fetched from a network", True),
        (lambda: {"base64": "!"}, "no base64", True),
        (lambda: {"text": "x"}, r"a table with \['text'\] has none of", True),
        (lambda: 3, "expected a path, bytes, base64 or a data URI, found int", True),
    ],
)  # fmt: skip
def test_a_picture_that_cannot_be_shown(make: Callable[[], Any], said: str, in_header: bool) -> None:
    with pytest.raises(MediaError, match=said):
        picture(make(), HERE, PIXELS)
    if in_header:
        with pytest.raises(MediaError, match=said):
            check_picture(make(), HERE, PIXELS)
    else:
        check_picture(make(), HERE, PIXELS)


def test_sounds_are_mono_at_the_rate_asked_for() -> None:
    tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(8000) / 16000)).astype(np.float32)
    assert np.array_equal(sound(wave(tone), HERE, 16000, 9), tone), "nothing is lost where nothing has to change"
    both = np.stack([tone, np.zeros_like(tone)], 1)
    assert np.allclose(sound(wave(both), HERE, 16000, 9), tone / 2)
    slow = sound(wave(tone, rate=8000), HERE, 16000, 9)
    assert len(slow) == 16000
    middle = slow[4000:12000]
    crossings = int((np.diff(np.signbit(middle)) != 0).sum())
    assert abs(crossings - 220) <= 2 and 0.48 < middle.max() < 0.52, "440 Hz played at half the rate: 220 Hz"
    silent = sound(wave(np.zeros(1600, np.float32), subtype="PCM_16"), HERE, 16000, 9)
    assert not silent.any() and len(silent) == 1600
    array = {"array": tone.tolist(), "sampling_rate": 16000}
    assert np.array_equal(sound(array, HERE, 16000, 9), tone)
    turned = {"array": [tone.tolist(), tone.tolist()], "sampling_rate": 16000}
    assert np.allclose(sound(turned, HERE, 16000, 9), tone), "[channels, samples] too"


@pytest.mark.parametrize(("kind", "subtype"), [("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")])
def test_compressed_sounds(kind: str, subtype: str) -> None:
    tone = (0.5 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)).astype(np.float32)
    found = sound(wave(tone, kind=kind, subtype=subtype), HERE, 16000, 9)
    assert abs(len(found) - 16000) < 1200 and 0.4 < np.abs(found).max() < 0.6


def test_a_sound_of_variable_bit_rate_is_as_long_as_it_was() -> None:
    parts = [np.sin(np.arange(16000) / 8).astype(np.float32) / 2, SECOND, np.zeros(16000, np.float32)]
    buffer = io.BytesIO()
    soundfile.write(buffer, np.concatenate(parts), 16000, "MPEG_LAYER_III", format="MP3", bitrate_mode="VARIABLE")
    found = sound(buffer.getvalue(), HERE, 16000, 9)
    assert len(found) == 48000
    loud = [float(np.abs(found[i : i + 14000]).mean()) for i in (1000, 17000, 33000)]
    assert np.allclose(loud, [0.32, 0.08, 0], atol=0.02), loud


def streamed(rate: int, samples: int) -> bytes:
    """A sound whose file has no header, so that it may change on the way."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="adts") as container:
        stream = container.add_stream("aac", rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, samples), np.float32), "fltp", "mono")
        frame.sample_rate = rate
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()


def test_an_hour_of_sound_is_not_decoded() -> None:
    quiet = wave(np.zeros(3600 * 8000, np.int16), 8000, "FLAC", "PCM_16")
    assert len(quiet) < 100_000
    tracemalloc.start()
    try:
        for refuse in (lambda: sound(quiet, HERE, 16000, 600), lambda: check_sound(quiet, HERE, 600)):
            with pytest.raises(MediaError, match=r"lasts 3600.0 s, longer than media.longest_audio_s = 600"):
                refuse()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_sound_of_a_video() -> None:
    found = sound(film(8, sounds=True), HERE, 16000, 9)
    assert abs(len(found) - 16000) < 2100 and 0.4 < np.abs(found).max() < 0.6


def named(value: Any) -> str | None:
    """Name a case by its kind where it holds bytes: some have the time in them, and a test's name must not change."""
    return type(value).__name__ if isinstance(value, (bytes, list, dict)) else None


SECOND = np.random.default_rng(0).normal(0, 0.1, 16000).astype(np.float32)


@pytest.mark.parametrize(
    ("value", "said", "in_header"),
    [
        (wave(SECOND)[:20000], "is truncated", True),
        (wave(SECOND, kind="MP3", subtype="MPEG_LAYER_III")[:2000], "is truncated", False),
        (wave(SECOND, kind="FLAC", subtype="PCM_16")[:9000], "is no sound, or is damaged", False),
        (wave(np.zeros(0, np.float32)), "has no samples", True),
        (wave(np.full(10, np.nan, np.float32)), "not finite", False),
        (wave(np.zeros(160_001, np.float32), subtype="PCM_16"), "lasts 10.0 s, longer than media.longest_audio_s = 10", True),
        ({"array": [0.0] * 99, "sampling_rate": 9}, "lasts 11.0 s", True),
        ({"array": [0.0]}, "needs its 'sampling_rate'", True),
        (wave(np.ones(2, np.float32), 4_000_000), "too short to be heard", False),
        (streamed(8000, 96000), r"lasts 1\d\.\d s, longer than media.longest_audio_s = 10", True),
        (streamed(16000, 9000) + streamed(8000, 9000), r"changes from 16000 Hz \(mono\) to 8000 Hz \(mono\)", False),
        (b"RIFF", "is no sound, or is damaged", True),
        (film(4), "has no sound", True),
    ],
    ids=named,
)  # fmt: skip
def test_a_sound_that_cannot_be_played(value: Any, said: str, in_header: bool) -> None:
    with pytest.raises(MediaError, match=said):
        sound(value, HERE, 16000, 10)
    if in_header:
        with pytest.raises(MediaError, match=said):
            check_sound(value, HERE, 10)


def grays(frames: np.ndarray) -> list[int]:
    return [round(float(frame.mean()) / 8) for frame in frames]


def test_frames_are_taken_at_a_steady_rate() -> None:
    found = video(film(24), HERE, LIMITS, as_is)  # three seconds
    assert found.frames.shape == (6, 32, 32, 3) and found.fps == pytest.approx(2)
    assert grays(found.frames) == [0, 4, 8, 12, 16, 20]
    longer = video(film(28, fps=4), HERE, LIMITS, as_is)  # seven seconds would be fourteen frames
    assert len(longer.frames) == 8 and longer.fps == pytest.approx(8 / 7)
    shorter = video(film(1), HERE, LIMITS, as_is)
    assert len(shorter.frames) == 2 and grays(shorter.frames) == [0, 0], "a single frame is seen as often as must be"


def test_frames_are_made_small_while_they_are_decoded() -> None:
    asked: list[tuple[int, int]] = []

    def small(height: int, width: int) -> tuple[int, int]:
        asked.append((height, width))
        return 16, 8

    assert video(film(8, side=64), HERE, LIMITS, small).frames.shape[1:] == (16, 8, 3)
    assert asked == [(64, 64)]


def test_frames_given_one_by_one() -> None:
    frames = [saved(Image.new("RGB", (8, 8), (8 * i,) * 3)) for i in range(6)]
    found = video(frames, HERE, LIMITS, as_is)
    assert grays(found.frames) == [0, 1, 2, 3, 4, 5] and found.fps == 2
    quicker = video({"frames": frames, "fps": 4}, HERE, LIMITS, as_is)
    assert grays(quicker.frames) == [0, 2, 4] and quicker.fps == 2
    assert digest(frames, HERE) != digest(frames[:5], HERE) and digest({"frames": frames, "fps": 4}, HERE) != digest(
        frames, HERE
    )


MOVIE = film(16, movflags="faststart")


@pytest.mark.parametrize(
    ("value", "said", "in_header"),
    [
        (film(16)[:600], "a part of it is missing|is damaged", True),
        (MOVIE[: len(MOVIE) * 3 // 4], "is truncated|is damaged", False),
        (MOVIE[:-500] + bytes(500), "is damaged", False),
        (wave(SECOND), "has no pictures", True),
        (MOVIE[:-1000] + bytes(1000), "pictures of an unknown kind", True),
        ([], "a video without frames", True),
        ({"frames": [], "fps": 2}, "a video without frames", True),
        ({"frames": [saved(RED)], "fps": 0}, "0 frames a second", True),
        ([saved(RED), PICTURE[:500]], "is damaged", False),
        (film(90), "lasts 11.2 s, longer than media.longest_video_s = 10", True),
        (film(0), "has no pictures: it is a sound, or a part of it is missing", True),
        (film(0, kind="matroska"), "is no video, or is damaged", False),
        (b"", "is no video, or is damaged", True),
        ("gone.mp4", "No such file", True),
    ],
    ids=named,
)
def test_a_video_that_cannot_be_shown(value: Any, said: str, in_header: bool) -> None:
    with pytest.raises(MediaError, match=said):
        video(value, HERE, LIMITS, as_is)
    if in_header:
        with pytest.raises(MediaError, match=said):
            check_video(value, HERE, LIMITS)


@pytest.mark.parametrize(("kind", "codec"), [("matroska", "mpeg4"), ("webm", "libvpx")])
def test_matroska_and_webm_whole_and_cut_off(kind: str, codec: str) -> None:
    data = film(24, fps=4, kind=kind, codec=codec)  # six seconds
    found = video(data, HERE, LIMITS, as_is)
    assert grays(found.frames) == [*range(0, 24, 3)] and found.fps == pytest.approx(8 / 6)
    with pytest.raises(MediaError, match=r"is truncated: \d\.\d of 6\.0 s are there"):
        video(data[: len(data) // 2], HERE, LIMITS, as_is)


def test_frames_beyond_the_largest_picture_are_refused() -> None:
    with pytest.raises(MediaError, match="frames of 64 × 64 pixels"):
        check_video(film(2, side=64), HERE, Limits(largest_image_pixels=1000))


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """A file that is cut off, or of which some bytes were overwritten."""
    if rng.random() < 0.3:
        return data[: rng.integers(len(data))]
    changed = bytearray(data)
    for _ in range(rng.integers(1, 8)):
        changed[rng.integers(len(data))] = rng.integers(256)
    return bytes(changed)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "WAV", "FLAC", "MP3", "OGG", "MP4"])
def test_a_damaged_file_never_raises_anything_else(kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    subtypes = {"WAV": "PCM_16", "FLAC": "PCM_16", "MP3": "MPEG_LAYER_III", "OGG": "VORBIS"}
    if kind == "MP4":
        data = film(8, sounds=True)
    else:
        data = (
            wave(SECOND[:4000], 16000, kind, subtypes[kind])
            if kind in subtypes
            else saved(Image.fromarray(NOISE), kind)
        )
    refused = 0
    for _ in range(60):
        broken = damaged(data, rng)
        for read in (
            (lambda b: video(b, HERE, LIMITS, as_is)) if kind == "MP4" else None,
            (lambda b: sound(b, HERE, 16000, 10)) if kind in subtypes or kind == "MP4" else None,
            (lambda b: picture(b, HERE, PIXELS)) if kind not in subtypes and kind != "MP4" else None,
        ):
            if read is not None:
                try:
                    read(broken)
                except MediaError:
                    refused += 1
    assert refused


def test_a_file_system_that_fails_is_not_the_pictures_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(PICTURE)

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    with pytest.raises(OSError, match="Input/output error"):
        picture("a.png", tmp_path, PIXELS)
