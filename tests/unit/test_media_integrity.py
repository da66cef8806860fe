"""Integrity of media from the worker to the trainer: a bit that changes anywhere is refused, with the station and the reason."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from media_shards import MIXED, SAMPLES, equal, group, media, write
from PIL import Image
from transformers import Qwen2VLImageProcessor

from relax_hpc.files.errors import Damaged, RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.records import Media, MediaSource, PartialRollout
from relax_hpc.roles.common.load_batch import load_batch
from relax_hpc.spool import checked, partial_rollouts
from relax_hpc.spool.ledger import Entry, Taken
from relax_hpc.spool.partial_rollouts import publish_part
from relax_hpc.spool.queue import RequestFile
from relax_hpc.spool.reading import Shards
from relax_hpc.spool.request import Request
from relax_hpc.spool.shard import DamagedShard, Shard
from relax_hpc.spool.shard_writer import encode
from tests.flips import flip


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


def processor_of(patch: int) -> tuple[MediaSource, Callable[[MediaSource], Media]]:
    """The files of two pictures, and a real processor that makes media of such files."""
    processor = Qwen2VLImageProcessor(
        patch_size=patch, merge_size=2, size={"shortest_edge": 256, "longest_edge": 16384}
    )
    random, files = np.random.default_rng(0), []
    for height, width in ((64, 48), (32, 80)):
        memory = io.BytesIO()
        Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).save(memory, "PNG")
        files.append(("image", memory.getvalue()))
    about = {"class": type(processor).__name__, "patch": patch}

    def remake(source: MediaSource) -> Media:
        made = processor(images=[Image.open(io.BytesIO(data)) for _, data in source.files], return_tensors="np")
        return replace(Media.of(dict(made)), source=replace(source, processor=about))

    return MediaSource(tuple(files), about), remake


def test_a_shard_that_keeps_the_files_gives_the_same_tensors_again(tmp_path: Path) -> None:
    source, remake = processor_of(8)
    shown = [remake(source), None, remake(replace(source, files=source.files[:1])), media(0)]
    groups = [group(i, m) for i, m in enumerate(shown)]
    path = write(tmp_path / "a.h5", groups, kept="source")
    assert path.stat().st_size < write(tmp_path / "b.h5", groups).stat().st_size / 2
    with Shard(path, remake) as shard:
        shard.validate()
        assert all(equal(shard.media(g), expected) for g, expected in enumerate(shown))
        assert shard.media_index.items[2].kept == "tensors", "media that are not made of files"
        assert shard.meta["media"]["processor"] == {"class": "Qwen2VLImageProcessor", "patch": 8}
    with h5py.File(path, "r") as file:
        first = file["media/source"][: len(source.files[0][1])].tobytes()
    assert np.asarray(Image.open(io.BytesIO(first))).shape == (64, 48, 3)


def test_another_processor_than_the_shards_is_refused_and_is_no_damage(tmp_path: Path) -> None:
    source, remake = processor_of(8)
    path = write(tmp_path / "a.h5", [group(0, remake(source))], kept="source")
    with Shard(path, processor_of(16)[1]) as shard, pytest.raises(RunError) as error:
        shard.rollouts()
    assert not isinstance(error.value, Damaged)
    said = str(error.value)
    assert "a.h5', group 0" in said and "'patch': 16" in said and "'patch': 8" in said and "pixel_values" in said
    with Shard(path) as shard, pytest.raises(RunError, match="here is no processor"):
        shard.rollouts()
    flip(path, "media/source", 100)
    with Shard(path, remake) as shard, pytest.raises(DamagedShard, match="column 'media/source'.*checksum"):
        shard.rollouts()


def test_a_partial_rollout_refers_to_the_prompts_media_and_is_refused_when_they_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The station before the shard: another worker makes the prompt again, of a file whose bit has flipped."""
    run = RunDir(tmp_path)
    run.create()
    run.identity.write_text('{"id": "mine"}')
    request, begun = Request("r000001-000", ((0, 0), (0, 1)), SAMPLES, 1, 0), [group(0, media(0, 4000)), group(1, None)]
    partial = PartialRollout(begun, [[0]] * 2 * SAMPLES, [1])
    assert publish_part(run, request.id, 1, 0, partial)
    assert run.partial_rollout(request.id, 1).stat().st_size < 20_000, "the media are not stored once more"
    request_file, prompts = RequestFile(request.id, 0, 0, 1), [g.prompt for g in begun]
    found = partial_rollouts.read(run, request, request_file, prompts)
    assert (
        found is not None and found.cut == [1] and [g.prompt.media for g in found.groups] == [p.media for p in prompts]
    )
    pixels = media(0, 4000).tensors["pixel_values"]
    pixels.view(np.uint32)[0, 0] ^= 1
    changed = [replace(prompts[0], media=Media.of({**media(0, 4000).tensors, "pixel_values": pixels})), prompts[1]]
    for other in (
        changed,
        [prompts[0], replace(prompts[1], media=media(0))],
        [replace(p, media=None) for p in prompts],
    ):
        caplog.clear()
        assert partial_rollouts.read(run, request, request_file, other) is None
        assert "generated from its beginning" in caplog.text and "its media had the digest" in caplog.text


def test_a_step_loads_the_media_of_the_groups_that_it_trains_on_and_of_those_that_it_reuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked, "BLOCK_ROWS", 96)
    run = RunDir(tmp_path)
    run.create()
    run.identity.write_text('{"id": "mine"}')
    requests = ["r000001-000", "r000001-001", "r000000-000"]
    shown = {request: [media(3 * n + g) for g in range(3)] for n, request in enumerate(requests)}
    for request in requests:
        run.shard(request).parent.mkdir(exist_ok=True)
        write(run.shard(request), [group(i, m) for i, m in enumerate(shown[request])], request)
    take = tuple(Taken(request, 3) for request in requests[:2])
    entry = Entry(1, 1, 0, take, filtered={"r000001-000/1": "zero_std"}, reused={"r000000-000/2": 0})
    batch = load_batch(entry, run, Shards(run, None), (), oldest=3)
    wanted = [shown["r000001-000"][0], shown["r000001-000"][2], *shown["r000001-001"], shown["r000000-000"][2]]
    assert [m and m.digest for m in batch.rollouts.media] == [m.digest for m in wanted for _ in range(SAMPLES)]
    flip(run.shard("r000001-000"), "media/pixel_values", 300)
    load_batch(entry, run, Shards(run, None), ())  # the filtered group's: nobody trains on it
    flip(run.shard("r000001-000"), "media/pixel_values", 700)
    with pytest.raises(Damaged, match="step 1 trains on a shard that is damaged.*column 'media/pixel_values'"):
        load_batch(entry, run, Shards(run, None), ())
