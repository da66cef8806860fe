"""Media in shards: once however many samples show them, each reader gets its groups' alone, and a changed bit is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image
from small_run import build
from transformers import Qwen2VLImageProcessor
from typer.testing import CliRunner

import relax_hpc
from relax_hpc.cli.shards import app
from relax_hpc.files.errors import Damaged, RunError
from relax_hpc.monitor.analysis.export import export_parquet
from relax_hpc.records import Finish, Group, Media, Prompt, Sample, concatenate
from relax_hpc.spool.shard import DamagedShard, Shard
from relax_hpc.spool.shard_writer import encode

ROOT = Path(__file__).parents[2]
SAMPLES = 4


def media(seed: int, patches: int = 24, seconds: float = 0.0) -> Media:
    """A picture of so many patches, and a sound where `seconds` says so."""
    random = np.random.default_rng(seed)
    tensors: dict[str, NDArray[Any]] = {
        "pixel_values": random.normal(size=(patches, 12)).astype(np.float32),
        "image_grid_thw": np.array([[1, 4, patches // 4]], np.int64),
    }
    if seconds:
        mask = np.arange(30)[None] < seconds * 10
        tensors |= {"input_features": random.normal(size=(1, 8, 30)).astype(np.float32), "feature_attention_mask": mask}
    return Media.of(tensors)


def group(index: int, shown: Media | None, samples: int = SAMPLES) -> Group:
    tokens = np.arange(index + 3, dtype=np.int32)
    mask = np.ones(len(tokens), np.uint8)
    sample = Sample(tokens, mask, -tokens.astype(np.float32), [(0, 3)], Finish.STOP, extra={"format": 0.5})
    prompt = Prompt(0, index, "", np.arange(5, dtype=np.int32), "1", media=shown)
    return Group(prompt, [replace(sample, reward=float(i)) for i in range(samples)])


def write(path: Path, groups: list[Group], request: str = "r000001-000", **options: Any) -> Path:
    path.write_bytes(b"".join(encode(request, groups, {"version": 3, "run": "mine"}, **options)))
    return path


def equal(found: Media | None, expected: Media | None) -> bool:
    if found is None or expected is None:
        return found is expected
    same: Mapping[str, bool] = {
        n: a.dtype == expected.tensors[n].dtype and a.shape == expected.tensors[n].shape and bool((a == expected.tensors[n]).all())
        for n, a in found.tensors.items()
    }  # fmt: skip
    return found.digest == expected.digest and same.keys() == expected.tensors.keys() and all(same.values())


MIXED = [
    media(0),
    None,
    media(1, 8, 1.5),
    media(0),
    media(2, 40, 3.0),
    Media.of({"input_ids": np.zeros((0, 3), np.int32)}),
]
"""Two groups show the same; one shows nothing; shapes differ; one tensor is empty."""


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


def flip(path: Path, column: str, row: int) -> None:
    """Change the lowest bit of a row's last byte, where the file has it."""
    with h5py.File(path, "r", locking=False) as file:
        dataset = file[column]
        place = dataset.id.get_offset() + (row + 1) * dataset.dtype.itemsize - 1
    with path.open("r+b") as raw:
        raw.seek(place)
        byte = raw.read(1)[0]
        raw.seek(place)
        raw.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("column", ["pixel_values", "image_grid_thw", "input_features", "feature_attention_mask"])
def test_a_bit_flipped_in_the_shard_is_found_by_whoever_reads_it(tmp_path: Path, column: str) -> None:
    path = write(tmp_path / "a.h5", [group(i, m) for i, m in enumerate(MIXED)])
    flip(path, f"media/{column}", row=0)
    for read in (Shard.rollouts, Shard.validate, lambda shard: [shard.media(g) for g in range(len(MIXED))]):
        with pytest.raises(DamagedShard, match=f"a.h5.*column 'media/{column}'.*checksum"), Shard(path) as shard:
            read(shard)  # type: ignore[operator]


def test_a_bit_flipped_in_the_worker_is_found_before_the_shard_is_published(tmp_path: Path) -> None:
    shown = media(0)
    shown.tensors["pixel_values"].view(np.uint32)[3, 5] ^= 1
    with pytest.raises(Damaged, match="the worker, when it publishes.*checksum.*changed in between"):
        encode("r000001-000", [group(0, shown)], {})


def test_a_bit_flipped_after_the_reading_is_found_by_the_trainer(tmp_path: Path) -> None:
    with Shard(write(tmp_path / "a.h5", [group(0, media(0))])) as shard:
        read = shard.rollouts().media[0]
    assert read is not None
    read.check("the trainer")
    read.tensors["pixel_values"].view(np.uint32)[3, 5] ^= 1
    with pytest.raises(Damaged, match="the trainer.*checksum"):
        read.check("the trainer")


def test_media_under_another_ones_place_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file has the checksums of its bytes, but the group was shown something else: only the digest tells."""
    one, other = media(0), media(1)
    monkeypatch.setattr(Media, "check", lambda self, station: None)
    path = write(tmp_path / "a.h5", [group(0, Media(other.tensors, one.digest))])
    monkeypatch.undo()
    with Shard(path) as shard:
        shard.validate()
        with pytest.raises(DamagedShard, match="a.h5.*group 0.*the reader of the shard.*checksum"):
            shard.rollouts()


@pytest.mark.parametrize(
    "claim",
    [
        {"groups": [1]},
        {"groups": [0, 0]},
        {"groups": ["x"]},
        {"items": [{"digest": "x", "kept": "tensors", "tensors": {"pixel_values": ["<f4", [2**40, 2**20]]}}]},
        {"items": [{"digest": "x", "kept": "tensors", "tensors": {"pixel_values": ["<f4", [-1, 12]]}}]},
        {"items": [{"digest": "x", "kept": "tensors", "tensors": {"pixel_values": ["O", [24, 12]]}}]},
        {"items": [{"digest": "x", "kept": "tensors", "tensors": {"pixel_values": ["<i4", [24, 12]]}}]},
        {"items": [{"digest": "x", "kept": "tensors", "tensors": []}]},
        {"items": [{}]},
    ],
)
def test_what_a_file_claims_of_its_media_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claim: Any
) -> None:
    from relax_hpc.spool import media as writer

    columns = writer.columns

    def lying(*args: Any) -> Any:
        flat, about = columns(*args)
        return flat, {**(about or {}), **claim}

    monkeypatch.setattr(writer, "columns", lying)
    path = write(tmp_path / "a.h5", [group(0, media(0))])
    with pytest.raises(DamagedShard, match=r"a\.h5"), Shard(path) as shard:
        shard.rollouts()


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
