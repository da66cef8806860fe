"""Pages with what prompts show: pictures and frames as the model saw them, sounds to be played."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import numpy as np
import soundfile
from media_shards import group, write
from PIL import Image
from small_run import build
from transformers import AutoProcessor
from typer.testing import CliRunner

import relax_hpc
from relax_hpc.cli.shards import app
from relax_hpc.media.process import Cell, Processor
from relax_hpc.monitor.analysis.pictures import MOST_SOUND_BYTES, SIDE, Page
from relax_hpc.recipe.tables.model import TinyModel
from relax_hpc.recipe.tables.source import Media as Limits
from relax_hpc.trainers.build import materialise

REQUEST = "r000002-001"
COLORS = ("red", "lime", "blue", "white")


def wav(seconds: float) -> bytes:
    memory = io.BytesIO()
    soundfile.write(memory, np.sin(np.arange(int(16000 * seconds)) / 9).astype(np.float32), 16000, format="WAV")
    return memory.getvalue()


def png(color: str) -> bytes:
    memory = io.BytesIO()
    Image.new("RGB", (64, 32), color).save(memory, "PNG")
    return memory.getvalue()


def embedded(page: str) -> list[bytes]:
    return [base64.b64decode(data) for data in re.findall(r'src="data:[a-z]+/[a-z]+;base64,([^"]+)"', page)]


def test_a_page_shows_pictures_and_frames_and_plays_sounds(tmp_path: Path) -> None:
    run = build(tmp_path / "small")
    materialise(TinyModel(audio={}, experts=4, alphabet="ab"), tmp_path / "model", 0)
    AutoProcessor.from_pretrained(tmp_path / "model").save_pretrained(run.model)
    (run.model / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())
    processor = Processor(run.model, Limits(), keeps_files=True)
    marks, short, long = processor.family.marks, wav(0.3), wav(9)
    assert len(short) < MOST_SOUND_BYTES / 10 and len(wav(20)) > MOST_SOUND_BYTES
    cells = [Cell("image", png("red")), Cell("audio", short), Cell("audio", long)]
    _, mixed = processor.tokens("".join(marks[c.modality] for c in cells), cells, tmp_path, special=False)
    film = Cell("video", {"frames": [png(color) for color in COLORS], "fps": 2})
    _, moving = processor.tokens(marks["video"], [film], tmp_path, special=False)
    write(run.shard(REQUEST), [group(0, mixed), group(1, moving), group(2, None)], REQUEST, kept="source")

    view = relax_hpc.open_run(run.root)
    assert view.media_files(REQUEST, 0) == [(c.modality, c.value) for c in cells] and not view.media_files(REQUEST, 1)
    page = view.show(REQUEST, [0, 1, 2])
    assert isinstance(page, Page) and page._repr_html_() == page and page.count("<audio controls") == 2
    picture, *spectra, first, second, frames = embedded(page)
    assert (first, second) == (short, long) and len(spectra) == 2
    seen = Image.open(io.BytesIO(picture))
    assert np.allclose(np.asarray(seen).mean((0, 1)), (254, 0, 0), atol=4) and min(seen.size) <= SIDE
    strip = np.array_split(np.asarray(Image.open(io.BytesIO(frames))), len(COLORS), axis=1)
    expected = [np.asarray(Image.new("RGB", (1, 1), color))[0, 0] for color in COLORS]
    assert np.allclose([part[:, 8:-8].mean((0, 1)) for part in strip], expected, atol=8)
    assert "nothing to show" in page and len(page) < 2 * MOST_SOUND_BYTES

    shown = CliRunner().invoke(app, ["show", str(run.root), REQUEST, "-g", "1", "--media", str(tmp_path / "p.html")])
    assert shown.exit_code == 0 and "shows groups [1]" in shown.stdout.replace("\n", "")
    assert embedded((tmp_path / "p.html").read_text()) == [frames]
