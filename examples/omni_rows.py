"""Make the data of recipes/quickstart-omni.toml: `python examples/omni_rows.py data/omni`. Real files; nothing is downloaded.

scikit-learn's 1,797 scans of written digits ──► PNG      espeak-ng's voices ──► WAV      a square that moves ──► MP4
For each kind of question: KIND-train.jsonl; KIND-test.jsonl with other sums, scans, voices and squares; and, where it
shows anything, KIND-shuffled.jsonl, a control: the rows of the test with the media of other rows.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import espeakng_loader
import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

Row = dict[str, Any]
KINDS = ("text", "image", "audio", "video", "mixed")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
QUESTIONS = {"which digit is it": 0, "which one is next": 1, "which was before": -1}
"""Spoken questions about a picture's digit, and how far the answer is from it; zero follows nine."""
WAYS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
SIDE, SQUARE, FRAMES, FPS, PIXELS_A_FRAME = 32, 8, 4, 2, 5
"""A video: pixels of its side and of the square's, frames, frames a second, how far the square moves in one."""
VIDEOS = 1000
MIXED_OF_EACH_PICTURE = 2
TEST_ONE_IN = 5
ACCENTS = ("en", "en-us", "en-gb-scotland")
NO_VOICES = {"whisper", "whisperf", "croak", "Demonic", "UniRobot", "RicishayMax2", "RicishayMax3", "kaukovalta"}
"""Variants that hardly speak."""


class Espeak:
    """The library espeak-ng of the wheel espeakng-loader: text ──► samples."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        synchronous = 2  # samples go to a callback, before espeak_Synth returns
        self.rate_hz = self._library.espeak_Initialize(synchronous, 0, espeakng_loader.get_data_path().encode(), 0)
        if self.rate_hz < 1:
            raise SystemExit(f"espeak-ng does not start with {espeakng_loader.get_data_path()}")
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        self._parts: list[NDArray[np.int16]] = []
        self._callback = kind(self._take)
        self._library.espeak_SetSynthCallback(self._callback)
        variants = Path(espeakng_loader.get_data_path(), "voices", "!v")
        self.variants = sorted(path.name for path in variants.iterdir() if path.name not in NO_VOICES)

    def _take(self, samples: Any, count: int, events: Any) -> int:
        if samples and count:
            self._parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, text: str, voice: str, words_a_minute: int, pitch: int) -> NDArray[np.int16]:
        """Speak a text; voice: a language and a variant, such as `en-us+f1`; pitch: 0–100."""
        if self._library.espeak_SetVoiceByName(voice.encode()):
            raise SystemExit(f"espeak-ng has no voice '{voice}'")
        for number, value in ((1, words_a_minute), (3, pitch)):
            self._library.espeak_SetParameter(number, value, 0)
        self._parts.clear()
        said = text.encode() + b"\0"
        utf8 = 1
        self._library.espeak_Synth(said, len(said), 0, 0, 0, utf8, None, None)
        return np.concatenate(self._parts)


class Maker:
    """Makes the rows of each kind, split into those to learn from and those of the test, with their files in a folder."""

    def __init__(self, folder: Path, seed: int, fewer: int) -> None:
        """fewer: 1 for all, n for about one row in n."""
        self._folder, self._fewer, self._rng = folder, fewer, random.Random(seed)
        self._espeak = Espeak()
        scans = load_digits()
        for name in ("image", "audio", "video"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        order = self._drawn(range(len(scans.images)))
        self._scans = [(self._scan(scans.images[i], i), int(scans.target[i])) for i in order]
        self._voices = self._drawn(self._espeak.variants)

    def text(self) -> tuple[list[Row], list[Row]]:
        """Sums of a number of two digits and one of one digit."""
        sums = self._drawn([(a, b) for a in range(10, 100) for b in range(1, 10)])
        return _split([{"prompt": f"{a}+{b}=", "answer": f"{a + b}"} for a, b in sums])

    def image(self) -> tuple[list[Row], list[Row]]:
        """Which digit is written?"""
        rows = [{"prompt": "<image>digit:", "image": file, "answer": f"{digit}"} for file, digit in self._scans]
        return _split(rows)

    def audio(self) -> tuple[list[Row], list[Row]]:
        """Which digit is spoken? The test's voices are others."""

        def rows(voices: Sequence[str]) -> list[Row]:
            spoken = [(voice, digit) for voice in voices for digit in range(len(DIGITS)) for _ in range(3)]
            return [
                {"prompt": "<audio>heard:", "audio": self._speech(DIGITS[digit], voice), "answer": f"{digit}"}
                for voice, digit in spoken
            ]

        learned, asked = _split(self._voices)
        return rows(learned), rows(asked)

    def video(self) -> tuple[list[Row], list[Row]]:
        """Which way does the square move?"""
        rows = []
        for number in range(VIDEOS // self._fewer):
            way = self._rng.choice([*WAYS])
            rows.append({"prompt": "<video>moves:", "video": self._film(way, number), "answer": way})
        return _split(rows)

    def mixed(self) -> tuple[list[Row], list[Row]]:
        """A spoken question about a picture; scans and voices of the test are others."""

        def rows(scans: Sequence[tuple[str, int]], voices: Sequence[str]) -> list[Row]:
            said = {(q, v, n): self._speech(q, v) for q in QUESTIONS for v in voices for n in range(2)}
            found = []
            for file, digit in [scan for scan in scans for _ in range(MIXED_OF_EACH_PICTURE)]:
                question = self._rng.choice([*QUESTIONS])
                sound = said[question, self._rng.choice(voices), self._rng.randrange(2)]
                answer = f"{(digit + QUESTIONS[question]) % 10}"
                found.append({"prompt": "<image><audio>so:", "image": file, "audio": sound, "answer": answer})
            return found

        (seen, other), (learned, asked) = _split(self._scans), _split(self._voices)
        return rows(seen, learned), rows(other, asked)

    def shuffled(self, rows: Sequence[Row]) -> list[Row]:
        """Give each row the media of another one, all that it shows from the same."""
        turn = self._rng.randrange(1, len(rows))
        order = self._rng.sample(range(len(rows)), len(rows))
        media = [{key: rows[i][key] for key in ("image", "audio", "video") if key in rows[i]} for i in order]
        given = dict(zip(order, media[turn:] + media[:turn], strict=True))
        return [row | given[i] for i, row in enumerate(rows)]

    def _drawn(self, things: Sequence[Any]) -> list[Any]:
        """About one in `fewer` of these, in random order."""
        return self._rng.sample(list(things), max(TEST_ONE_IN, len(things) // self._fewer))

    def _scan(self, scan: NDArray[np.float64], number: int) -> str:
        """Save a scan of 8 × 8 pixels and 17 shades of gray as it is; the model's processor makes it larger."""
        name = f"image/{number}.png"
        Image.fromarray((scan * 255 / 16).astype(np.uint8)).save(self._folder / name)
        return name

    def _speech(self, text: str, variant: str) -> str:
        voice, pace, pitch = (
            f"{self._rng.choice(ACCENTS)}+{variant}",
            self._rng.randint(160, 260),
            self._rng.randint(30, 70),
        )
        name = f"audio/{text}-{voice}-{pace}-{pitch}.wav".replace(" ", "_")
        soundfile.write(self._folder / name, self._espeak.say(text, voice, pace, pitch), self._espeak.rate_hz)
        return name

    def _film(self, way: str, number: int) -> str:
        """Film a light square that moves over a dark ground, from wherever it has room."""
        step, name = np.array(WAYS[way]) * PIXELS_A_FRAME, f"video/{number}.mp4"
        far = step * (FRAMES - 1)
        top, left = (self._rng.randint(max(0, -int(d)), SIDE - SQUARE - max(0, int(d))) for d in far)
        ground, color = ([self._rng.randrange(*shades) for _ in range(3)] for shades in ((0, 90), (150, 256)))
        with av.open(self._folder / name, "w") as film:
            stream: Any = film.add_stream("mpeg4", rate=Fraction(FPS))
            stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
            for at in range(FRAMES):
                y, x = np.array((top, left)) + step * at
                frame = np.full((SIDE, SIDE, 3), ground, np.uint8)
                frame[y : y + SQUARE, x : x + SQUARE] = color
                film.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
            film.mux(stream.encode())
        return name


def _split(things: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(those to learn from, those of the test)."""
    return [t for i, t in enumerate(things) if i % TEST_ONE_IN], list(things[::TEST_ONE_IN])


def make(folder: Path, seed: int = 0, fewer: int = 1) -> None:
    """Write all files."""
    maker = Maker(folder, seed, fewer)
    for kind in KINDS:
        learned, asked = getattr(maker, kind)()
        files = {"train": learned, "test": asked}
        if kind != "text":
            files["shuffled"] = maker.shuffled(asked)
        for name, rows in files.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{kind}-{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{kind}: {len(learned)} rows to learn from, {len(asked)} of the test")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--seed", type=int, default=0)
    given = arguments.parse_args()
    make(given.folder, given.seed)
