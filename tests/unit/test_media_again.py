"""Media that a shard keeps as files: the real processor makes the same tensors of them again, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from media_shards import equal, group, write
from PIL import Image

from relax_hpc.files.errors import Damaged, RunError
from relax_hpc.media.process import Cell, Processor
from relax_hpc.recipe.tables.model import TinyModel
from relax_hpc.recipe.tables.source import Media as Limits
from relax_hpc.records import Media
from relax_hpc.spool.shard import Shard
from relax_hpc.trainers.build import materialise

LIMITS = Limits(video_frame_tokens=(1, 4), video_frames=(2, 4))
TONE = {"array": np.sin(np.arange(8000) / 9).tolist(), "sampling_rate": 16000}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that sees and hears, with its real processor."""
    folder = tmp_path_factory.mktemp("model")
    materialise(TinyModel(audio={}, experts=4, alphabet="abc \n"), folder, 0)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JPEG, a film of twelve frames, and a sound."""
    folder = tmp_path_factory.mktemp("files")
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    Image.fromarray(noise).save(folder / "a.jpg")
    with av.open(folder / "a.mp4", "w") as film:
        stream = film.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for k in range(12):
            film.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(noise, 5 * k, 1))))
        film.mux(stream.encode())
    return folder


def media(model: Path, files: Path, *cells: Cell) -> Media:
    processor = Processor(model, LIMITS, keeps_files=True)
    text = "".join(processor.family.marks[cell.modality] for cell in cells)
    found: Media = processor.tokens(text, cells, files, special=False)[1]
    return found


def test_files_of_each_modality_become_the_same_tensors_again(tmp_path: Path, model: Path, files: Path) -> None:
    both = media(model, files, Cell("video", "a.mp4"), Cell("image", {"path": "a.jpg"}))
    assert both.source is not None and [len(data) for _, data in both.source.files] == [
        (files / name).stat().st_size for name in ("a.mp4", "a.jpg")
    ]
    tone = media(model, files, Cell("audio", TONE), Cell("image", "a.jpg"))
    assert tone.source is None, "an array is no file"
    path = write(tmp_path / "a.h5", [group(0, both), group(1, tone), group(2, both)], kept="source")
    with Shard(path, Processor(model, LIMITS, keeps_files=True).remake) as shard:
        assert [item.kept for item in shard.media_index.items] == ["source", "tensors"]
        files_bytes = (files / "a.mp4").stat().st_size + (files / "a.jpg").stat().st_size
        assert shard.media_index.bytes == files_bytes + shard.media_index.items[1].bytes
        read = shard.rollouts().media
    assert equal(read[0], both) and equal(read[4], tone) and read[8] is read[0]


def test_another_limit_than_the_shards_is_refused_by_the_names_of_both(
    tmp_path: Path, model: Path, files: Path
) -> None:
    path = write(tmp_path / "a.h5", [group(0, media(model, files, Cell("image", "a.jpg")))], kept="source")
    others = LIMITS.model_copy(update={"image_tokens": (64, 128)})
    with (
        Shard(path, Processor(model, others, keeps_files=True).remake) as shard,
        pytest.raises(RunError, match="made again") as error,
    ):
        shard.rollouts()
    assert not isinstance(error.value, Damaged), "the file is whole: nothing is generated again"
    assert "'image_tokens': [64, 128]" in str(error.value) and "'image_tokens': [4, 16384]" in str(error.value)


def test_a_file_that_the_processor_refuses_is_no_damage(tmp_path: Path, model: Path, files: Path) -> None:
    path = write(tmp_path / "a.h5", [group(0, media(model, files, Cell("image", "a.jpg")))], kept="source")
    small = LIMITS.model_copy(update={"largest_image_pixels": 100})
    with (
        Shard(path, Processor(model, small, keeps_files=True).remake) as shard,
        pytest.raises(RunError, match="cannot be made again"),
    ):
        shard.rollouts()


def test_the_files_that_are_kept_are_those_that_were_decoded(
    model: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody writes the file anew while its prompt is made."""
    path = tmp_path / "b.jpg"
    path.write_bytes((files / "a.jpg").read_bytes())
    decode = Processor._decode

    def overtaken(self: Processor, cell: Cell, folder: Path) -> Any:
        Image.new("RGB", (64, 64), "red").save(path)
        return decode(self, cell, folder)

    monkeypatch.setattr(Processor, "_decode", overtaken)
    found = media(model, tmp_path, Cell("image", "b.jpg"))
    monkeypatch.undo()
    assert found.source is not None and found.source.files[0][1] == (files / "a.jpg").read_bytes()
    assert Processor(model, LIMITS, keeps_files=True).remake(found.source).digest == found.digest
