"""Media in shards: once however many samples show them, each reader gets its groups' alone, and a changed bit is refused."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from media_shards import MIXED, ROOT, SAMPLES, equal, group, media, write
from numpy.typing import NDArray
from PIL import Image
from small_run import build
from transformers import Qwen2VLImageProcessor, Qwen3VLVideoProcessor
from typer.testing import CliRunner

import relax_hpc
from relax_hpc.cli.shards import app
from relax_hpc.files.errors import RunError
from relax_hpc.monitor.analysis.examples import best_and_worst, shortened
from relax_hpc.monitor.analysis.export import export_parquet
from relax_hpc.monitor.analysis.report import render
from relax_hpc.records import Group, Media, concatenate
from relax_hpc.spool.shard import Shard
from tests.flips import flip


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_media_come_out_as_they_went_in(tmp_path: Path, compression: str) -> None:
    path = write(tmp_path / "a.h5", [group(i, m) for i, m in enumerate(MIXED)], compression=compression)
    with Shard(path) as shard:
        shard.validate()
        assert all(equal(shard.group(g).prompt.media, expected) for g, expected in enumerate(MIXED))
        assert shard.group(2).samples[0].extra == {"format": 0.5}, "media are no extra numbers"
        everyone = shard.rollouts()
    shown = [m for m in MIXED for _ in range(SAMPLES)]
    assert len(everyone.media) == len(everyone) and all(map(equal, everyone.media, shown))
    assert len({id(m) for m in everyone.media if m is not None}) == 4, (
        "samples and groups with the same media share them"
    )


def test_a_text_shard_is_as_it_was(tmp_path: Path) -> None:
    with Shard(write(tmp_path / "a.h5", [group(0, None)])) as shard:
        assert shard.rollouts().media == () and shard.group(0).prompt.media is None
        assert "media" not in shard.meta and not any(name.startswith("media") for name in shard.column_names())


def test_distinct_media_are_stored_once_and_nothing_else_is(tmp_path: Path) -> None:
    """16 samples a prompt, and each picture in two groups: what the file has beyond the pictures is small."""
    shown = [media(seed, 4000) for seed in range(3)]
    path = write(tmp_path / "a.h5", [group(i, shown[i % 3], 16) for i in range(6)])
    distinct = sum(a.nbytes for m in shown for a in m.tensors.values())
    assert distinct < path.stat().st_size < 1.05 * distinct


def test_who_reads_some_groups_reads_only_their_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.h5", [group(i, m) for i, m in enumerate(MIXED)])
    with Shard(path) as shard:
        seen: list[tuple[str, int, int]] = []
        read = Shard.read

        def watched(self: Shard, column: str, begin: int = 0, end: int | None = None) -> NDArray[Any]:
            if column.startswith("media/"):
                seen.append((column, begin, end or 0))
            return read(self, column, begin, end)

        monkeypatch.setattr(Shard, "read", watched)
        of_group = shard.samples["group"]
        part = shard.rollouts(np.flatnonzero((of_group == 2) | (of_group == 1)))
        assert [m is None for m in part.media] == [True] * SAMPLES + [False] * SAMPLES
        assert ("media/pixel_values", 24 * 12, 32 * 12) in seen and len(seen) == len(MIXED[2].tensors)  # type: ignore[union-attr]
        seen.clear()
        assert shard.rollouts(media=False).media == () and shard.group(2, media=False).prompt.media is not None
        assert not seen


def test_shards_with_and_without_media_go_together(tmp_path: Path) -> None:
    with (
        Shard(write(tmp_path / "a.h5", [group(0, None)])) as text,
        Shard(write(tmp_path / "b.h5", [group(1, MIXED[0])])) as shown,
    ):
        both = concatenate([text.rollouts(), shown.rollouts(np.array([1]))])
    assert both.media[:SAMPLES] == (None,) * SAMPLES and equal(both.media[SAMPLES], MIXED[0])


def test_the_documented_example_gets_a_picture_back_with_h5py_and_pillow_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real processor sees three pictures; the page's code, run as it stands, finds the second group's again."""
    page = (ROOT / "docs" / "shard-format.md").read_text()
    _, code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    imports = set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))
    assert imports == {"json", "pathlib", "h5py", "numpy", "PIL"} and len(code.splitlines()) <= 25
    processor = Qwen2VLImageProcessor(
        patch_size=8, merge_size=2, size={"shortest_edge": 16**2, "longest_edge": 64 * 16**2}
    )
    processor.save_pretrained(tmp_path / "model")
    random, groups, pictures = np.random.default_rng(0), list[Group](), []
    for index, (height, width) in enumerate([(32, 48), (64, 32), (48, 48)]):
        pictures.append(random.integers(0, 256, (height, width, 3), np.uint8))
        made = processor(images=[Image.fromarray(pictures[-1])], return_tensors="np")
        groups.append(group(index, Media.of(dict(made))))
    path = write(tmp_path / "a.h5", groups)
    monkeypatch.chdir(tmp_path)
    exec(code, {"PATH": str(path), "MODEL": str(tmp_path / "model"), "GROUP": 1})
    assert np.array_equal(np.asarray(Image.open("picture.png")), pictures[1])


def test_tables_and_commands_say_what_a_row_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run, shown = build(tmp_path / "small"), media(0)
    before = CliRunner().invoke(app, ["ls", str(run.root)]).stdout
    write(run.shard("r000002-001"), [group(0, shown), group(1, None)], "r000002-001")
    view = relax_hpc.open_run(run.root)
    table = view.trajectories(text=False)
    rows = table[table.request == "r000002-001"]
    wanted = {"digest": shown.digest, "pixel_values": [24, 12], "image_grid_thw": [1, 3]}
    assert [json.loads(said) for said in rows.media.dropna()] == [wanted] * SAMPLES and len(rows) == 2 * SAMPLES
    assert table[table.request != "r000002-001"].media.isna().all()
    assert equal(Media(view.media("r000002-001", 0), shown.digest), shown) and view.media("r000002-001", 1) == {}
    with pytest.raises(RunError, match="no group 2"):
        view.media("r000002-001", 2)
    export_parquet(view, tmp_path / "all.parquet", text=False)
    exported = pq.read_table(tmp_path / "all.parquet").to_pandas()
    assert json.loads(exported[exported.request == "r000002-001"].media.iloc[0]) == wanted
    listed = CliRunner().invoke(app, ["ls", str(run.root)]).stdout
    assert "media" not in before and "media" in listed and "1.2 kB" in listed
    show = CliRunner().invoke(app, ["show", str(run.root), "r000002-001"]).stdout
    assert "pixel_values 24×12, image_grid_thw 1×3" in show and shown.digest in show
    flip(run.shard("r000002-001"), "media/pixel_values", 7)
    assert "column 'media/pixel_values'" in CliRunner().invoke(app, ["validate", str(run.root)]).stdout.replace(
        "\n", ""
    )


def test_an_evaluation_keeps_the_digest_alone(tmp_path: Path) -> None:
    shown = media(0, 4000)
    path = write(tmp_path / "e.h5", [group(0, shown), group(1, None)], kept="digest")
    assert path.stat().st_size < 20_000
    with Shard(path) as shard:
        shard.validate()
        assert shard.group(0, media=False).prompt.media == Media({}, shown.digest)
        assert shard.media_index.bytes == 0
        with pytest.raises(RunError, match="keeps only the digest"):
            shard.rollouts()


def test_the_report_shows_the_pictures_that_the_model_saw(tmp_path: Path) -> None:
    """A picture and a video of four frames through the real processors; the page has both, small and embedded."""
    run, sizes = build(tmp_path / "small"), {"shortest_edge": 256, "longest_edge": 65536}
    images = Qwen2VLImageProcessor(patch_size=8, merge_size=2, size=sizes)
    videos = Qwen3VLVideoProcessor(patch_size=8, merge_size=2, size=sizes)
    images.save_pretrained(run.model)
    videos.save_pretrained(run.model)
    red, frames = np.zeros((64, 48, 3), np.uint8), np.zeros((4, 64, 32, 3), np.uint8)
    red[..., 0], frames[2:, ..., 2] = 255, 255
    seen = images(images=[Image.fromarray(red)], return_tensors="np")
    film = videos(videos=[torch.from_numpy(frames).permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="np")
    shown = Media.of({name: np.asarray(value) for name, value in {**seen, **film}.items() if name != "video_metadata"})
    write(run.shard("r000001-000"), [group(0, shown)], "r000001-000")
    view = relax_hpc.open_run(run.root)
    [row] = [r for r in best_and_worst(view, view.shard_paths(), 9)["best"] if r["request"] == "r000001-000"]
    found = {}
    for label, uri in row["media"]:
        assert uri in render(view) and len(uri) < 20_000
        found[label] = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))).astype(int)
    assert abs(found["image"] - red).max() < 8
    assert abs(found["video"] - np.concatenate([*frames], axis=1)).mean() < 8, "black, black, blue, blue"


def test_a_row_of_placeholders_is_said_in_short() -> None:
    text = "see <|vision_start|>" + 64 * "<|image_pad|>" + "<|vision_end|> and <b><b>"
    assert shortened(text) == "see <|vision_start|><|image_pad|>×64<|vision_end|> and <b><b>"
