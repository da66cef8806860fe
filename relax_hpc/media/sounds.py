"""Sounds, by soundfile; what that does not read, such as M4A and the sound of a video, by PyAV. Always mono."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import av
import numpy as np
import soundfile
from numpy.typing import NDArray

from relax_hpc.media.values import MediaError, Stored, stored

_CUT = re.compile(r"data : (\d+) \(should be (\d+)\)")
"""Matches what libsndfile logs of a file that is shorter than its header says."""
_UNKNOWN_LENGTHS = {0, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF}
"""Lengths in headers of files that were written to a pipe."""


def sound(value: Any, folder: Path, rate_hz: int, longest_s: float) -> NDArray[np.float32]:
    """Decode a cell with a sound to [samples] at `rate_hz`. Raises MediaError."""
    if isinstance(value, Mapping) and value.get("array") is not None:
        name, (samples, rate) = "an array", _array(value)
        _check_length(name, len(samples) / rate, longest_s)
    else:
        file = stored(value, folder)
        name, (samples, rate) = file.name, _read(file, longest_s)
    if not samples.size:
        raise MediaError(f"{name} has no samples")
    if not np.isfinite(samples).all():
        raise MediaError(f"{name} has samples that are not finite")
    mono = samples if samples.ndim == 1 else samples.mean(1, dtype=np.float32)
    return mono if rate == rate_hz else _resampled(mono, rate, rate_hz)


def check_sound(value: Any, folder: Path, longest_s: float) -> None:
    """Look at a sound's header alone. Raises MediaError for what it shows to be unusable."""
    if isinstance(value, Mapping) and value.get("array") is not None:
        samples, rate = _array(value)
        return _check_length("an array", len(samples) / rate, longest_s)
    file = stored(value, folder)
    with file.open() as opened:
        try:
            with soundfile.SoundFile(opened) as header:
                _check_header(file, header, longest_s)
        except soundfile.LibsndfileError:
            _by_av(file, opened, longest_s, decode=False)


def _array(value: Mapping[str, Any]) -> tuple[NDArray[np.float32], int]:
    rate = value.get("sampling_rate") or value.get("rate")
    if not isinstance(rate, int) or rate < 1:
        raise MediaError("an array of samples needs its 'sampling_rate'")
    try:
        samples = np.asarray(value["array"], np.float32)
    except (TypeError, ValueError) as error:
        raise MediaError(f"no array of samples: {error}") from None
    if samples.ndim == 2 and samples.shape[0] < samples.shape[1]:
        samples = samples.T  # [channels, samples], as torchaudio and torchcodec have them
    if samples.ndim not in (1, 2):
        raise MediaError(f"an array of samples has one or two axes, found {samples.ndim}")
    return samples, rate


def _read(file: Stored, longest_s: float) -> tuple[NDArray[np.float32], int]:
    with file.open() as opened:
        try:
            with soundfile.SoundFile(opened) as header:
                _check_header(file, header, longest_s)
                samples: NDArray[np.float32] = header.read(dtype="float32")
                if len(samples) < header.frames:
                    raise MediaError(f"{file.name} is truncated: {len(samples)} of {header.frames} samples are there")
                return samples, header.samplerate
        except soundfile.LibsndfileError:
            return _by_av(file, opened, longest_s, decode=True)


def _check_header(file: Stored, header: soundfile.SoundFile, longest_s: float) -> None:
    cut = _CUT.search(header.extra_info)
    if cut and int(cut[1]) not in _UNKNOWN_LENGTHS and int(cut[1]) > int(cut[2]):
        raise MediaError(f"{file.name} is truncated: {cut[2]} of {cut[1]} bytes are there")
    if not header.frames:
        raise MediaError(f"{file.name} has no samples")
    _check_length(file.name, header.frames / header.samplerate, longest_s)


def _check_length(name: str, seconds: float, longest_s: float) -> None:
    if seconds > longest_s:
        raise MediaError(f"{name} lasts {seconds:.1f} s, longer than media.longest_audio_s = {longest_s:g}")


def _by_av(file: Stored, opened: BinaryIO, longest_s: float, *, decode: bool) -> tuple[NDArray[np.float32], int]:
    opened.seek(0)
    container: Any
    try:
        with av.open(opened) as container:
            if not container.streams.audio:
                raise MediaError(f"{file.name} has no sound")
            stream = container.streams.audio[0]
            if stream.codec_context is None or not stream.rate:
                raise MediaError(f"{file.name} has sound of an unknown kind, or is damaged")
            if container.duration:
                _check_length(file.name, container.duration / av.time_base, longest_s)
            if not decode:
                return np.empty(0, np.float32), stream.rate
            return _mono(file, container.decode(stream), longest_s)
    except (av.FFmpegError, UnicodeError) as error:
        raise MediaError(f"{file.name} is no sound, or is damaged: {error}") from None


def _mono(file: Stored, frames: Iterable[Any], longest_s: float) -> tuple[NDArray[np.float32], int]:
    """Join decoded frames. Raises MediaError for a sound that is too long, or changes its rate or channels on the way."""
    resampler, parts, count, kind = av.AudioResampler("fltp", "mono"), list[NDArray[np.float32]](), 0, (0, "")
    for frame in frames:
        found = frame.sample_rate, frame.layout.name
        if parts and found != kind:
            (old, before), (new, after) = kind, found
            raise MediaError(
                f"{file.name} changes from {old} Hz ({before}) to {new} Hz ({after}) on the way: store it at one rate"
            )
        kind = found
        for plain in resampler.resample(frame):
            parts.append(plain.to_ndarray()[0])
            count += len(parts[-1])
        _check_length(file.name, count / frame.sample_rate, longest_s)
    return np.concatenate(parts) if parts else np.empty(0, np.float32), kind[0]


def _resampled(samples: NDArray[np.float32], rate: int, rate_hz: int) -> NDArray[np.float32]:
    resampler = av.AudioResampler("fltp", "mono", rate_hz)
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[None]), "fltp", "mono")
    frame.sample_rate = rate
    parts = [plain.to_ndarray()[0] for given in (frame, None) for plain in resampler.resample(given)]
    if not parts:
        raise MediaError(f"a sound of {len(samples)} samples at {rate} Hz is too short to be heard")
    joined: NDArray[np.float32] = np.concatenate(parts)
    return joined
