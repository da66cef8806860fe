"""Prompts with media: from a row's columns and places through the model's own processor to tokens and tensors."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import soundfile
import torch
import transformers
from PIL import Image
from transformers import AutoConfig, AutoModelForMultimodalLM, AutoTokenizer

from relax_hpc.data import PromptSources
from relax_hpc.data.examples import ExampleLoader
from relax_hpc.data.media_rows import UnusablePrompt
from relax_hpc.files.errors import RunError
from relax_hpc.media.families import family_of
from relax_hpc.media.process import Processor
from relax_hpc.recipe.tables.model import PathModel, TinyModel
from relax_hpc.recipe.tables.source import EvaluationFile, FileSource, left_out
from relax_hpc.recipe.tables.source import Media as Limits
from relax_hpc.trainers.build import materialise
from relax_hpc.trainers.tiny_model import character_tokenizer

LIMITS = Limits(video_frame_tokens=(1, 4), video_frames=(2, 4))
ALPHABET = "abcdefghijklmnopqrstuvwxyz ?.:\n"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    materialise(TinyModel(vision={}, alphabet=ALPHABET), folder, 0)
    return folder


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hearing")
    materialise(TinyModel(audio={}, experts=4, alphabet=ALPHABET), folder, 0)
    return folder


def png(color: str, side: int = 32) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), color).save(buffer, "PNG")
    return buffer.getvalue()


def wav(seconds: float) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.sin(np.arange(int(16000 * seconds)) / 9).astype(np.float32), 16000, format="WAV")
    return buffer.getvalue()


def write(folder: Path, rows: list[dict[str, Any]], name: str = "p.jsonl") -> Path:
    for color in ("red", "green", "blue"):
        (folder / f"{color}.png").write_bytes(png(color))
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def sources(model: Path, path: Path, *, evaluation: Any = (), holdout: float = 0.0, **keys: Any) -> PromptSources:
    source = FileSource(prompts=path, **{"media": {"image": "images"}, **keys})
    tokenizer = AutoTokenizer.from_pretrained(model)
    return PromptSources([source], tokenizer, 512, holdout, evaluation, processor=Processor(model, LIMITS))


def ids(model: Path) -> dict[str, int]:
    config = AutoConfig.from_pretrained(model)
    return family_of(config).placeholders(config)


TWO = {"prompt": "<image>a<image>?", "images": ["red.png", "blue.png"], "answer": "x", "note": 3}


def test_a_row_becomes_expanded_tokens_and_tensors(seeing: Path, tmp_path: Path) -> None:
    found = sources(seeing, write(tmp_path, [TWO]))
    assert found.check() == {}
    prompt = found.prompt(0, 0)
    assert prompt.media is not None and prompt.metadata == {"note": 3}
    assert prompt.text == "<|vision_start|><|image_pad|><|vision_end|>a<|vision_start|><|image_pad|><|vision_end|>?"
    grid = prompt.media.tensors["image_grid_thw"]
    assert grid.tolist() == [[1, 4, 4]] * 2 and prompt.media.tensors["pixel_values"].shape == (32, 3 * 2 * 8 * 8)
    assert int((prompt.tokens == ids(seeing)["image"]).sum()) == 8
    first, second = np.split(prompt.media.tensors["pixel_values"], 2)
    colors = [np.unique(one.reshape(16, 3, -1).mean((0, 2)).round(3)).tolist() for one in (first, second)]
    assert colors == [[-1, 1], [-1, 1]] and first[0, 0] == 1 and second[0, 0] == -1, "red before blue"
    assert found.prompt(0, 0).media.digest == prompt.media.digest, "the same again"  # type: ignore[union-attr]


def test_the_model_takes_what_the_processor_made(seeing: Path, hearing: Path, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(wav(0.3))
    frames = [{"path": f"{color}.png"} for color in ("red", "green", "blue")]
    row = {"prompt": "<image>a<video>b", "images": "red.png", "film": {"frames": frames, "fps": 3}, "answer": "x"}
    media = {"image": "images", "video": "film"}
    for folder in (seeing, hearing):
        if folder == hearing:
            row, media = {**row, "prompt": "<audio>a<image><video>", "sound": ["a.wav"]}, {**media, "audio": "sound"}
        prompt = sources(folder, write(tmp_path, [row]), media=media).prompt(0, 0)
        assert prompt.media is not None
        config = AutoConfig.from_pretrained(folder)
        family = family_of(config)
        assert {int((prompt.tokens == number).sum()) > 0 for number in family.placeholders(config).values()} == {True}
        whole = AutoModelForMultimodalLM.from_pretrained(folder).eval()
        model = getattr(whole, "thinker", whole)
        tensors = {name: torch.from_numpy(array) for name, array in prompt.media.tensors.items()}
        tokens = torch.from_numpy(prompt.tokens.astype(np.int64))[None]
        positions = torch.from_numpy(family.positions(config, prompt.tokens, prompt.media))[:, None]
        with torch.no_grad():
            logits = model(input_ids=tokens, position_ids=positions, **tensors).logits
            other = {name: torch.zeros_like(t) if t.is_floating_point() else t for name, t in tensors.items()}
            blind = model(input_ids=tokens, position_ids=positions, **other).logits
        assert logits.isfinite().all() and not torch.allclose(logits[0, -1], blind[0, -1]), "what is shown counts"


def test_messages_with_structured_parts(seeing: Path, tmp_path: Path) -> None:
    parts = [
        {"type": "text", "text": "see <image>"},
        {"type": "image", "image": "green.png"},
        {"type": "image_url", "image_url": {"url": "blue.png"}},
        {"type": "image"},
    ]
    row = {"prompt": [{"role": "user", "content": parts}], "images": ["red.png", "red.png"], "answer": "x"}
    prompt = sources(seeing, write(tmp_path, [row])).prompt(0, 0)
    assert prompt.text.count("<|image_pad|>") == 4 and "see <|vision_start|>" in prompt.text
    assert prompt.media is not None
    shown = prompt.media.tensors["pixel_values"].reshape(4, 16, 3, -1).mean((1, 3))
    assert shown.argmax(1).tolist() == [0, 1, 2, 0], "red, green, blue, red"


def test_text_without_the_key_stays_text(seeing: Path, tmp_path: Path) -> None:
    prompt = sources(seeing, write(tmp_path, [{"prompt": "an <image> tag", "answer": "x"}]), media={}).prompt(0, 0)
    assert prompt.media is None and prompt.text == "an <image> tag"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "<image><image>", "images": ["red.png"]}, "has 2 <image> and its column 'images' .* 1 values"),
        ({"prompt": "<image>", "images": ["red.png", "blue.png"]}, "has 1 <image> and its column 'images' .* 2 values"),
        ({"prompt": "none", "images": ["red.png"]}, "has 0 <image> and its column 'images' .* 1 values"),
        ({"prompt": "<image>", "images": None}, "has 1 <image> and its column 'images' .* 0 values"),
        ({"prompt": "<image>"}, "no column 'images'"),
        ({"prompt": "<image>", "images": ["gone.png"]}, "image 1 of 1: '.*gone.png' cannot be opened"),
        ({"prompt": "<image>", "images": ["p.jsonl"]}, "image 1 of 1: '.*p.jsonl' is no picture"),
        ({"prompt": "<|image_pad|><image>", "images": ["red.png"]}, r"has 2 of the model's own <\|image_pad\|> for 1"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "audio"}]}], "images": []},
            r"knows only \['image', 'video'\]",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "video"}]}], "images": []}, "without saying what"),
    ],
)
def test_a_wrong_row_is_found_before_the_run(seeing: Path, tmp_path: Path, row: dict[str, Any], said: str) -> None:
    good = {"prompt": "<image>", "images": ["red.png"], "answer": "x"}
    path = write(tmp_path, [good, {**row, "answer": "x"}, good])
    with pytest.raises(
        RunError, match=f"source 0, prompt 1 .{path}:2.: .*{said}" if "column 'i" not in said[:20] else said
    ):
        sources(seeing, path).check()
    if "shows" in said or "knows" in said:
        return  # not of the row's media
    dropping = sources(seeing, path, broken_media="drop")
    counts = dropping.check()
    assert counts["source.0"] == {"rows": 3, "too_long": 0, "no_answer": 0, "broken_media": 1, "cut": 0}
    assert left_out(counts) == ["source.0: of 3 rows 1 left out for their media"]
    assert [dropping.is_dropped(0, i) for i in range(3)] == [False, True, False]


def test_what_is_found_when_decoded_costs_that_prompt_alone(seeing: Path, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "cut.png")
    whole = (tmp_path / "cut.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    rows = [{**TWO, "prompt": "<image>", "images": [name]} for name in ("red.png", "cut.png")]
    found = sources(seeing, write(tmp_path, rows))
    assert found.check() == {}, "headers alone are looked at"
    with pytest.raises(UnusablePrompt, match=r"p.jsonl:2.*image 1 of 1: '.*cut.png' is damaged") as caught:
        found.prompt(0, 1)
    assert caught.value.failure.reason == "the prompt's media cannot be used"
    assert caught.value.prompt.index == 1 and caught.value.prompt.media is None
    loader = ExampleLoader(found, 0)
    assert [e.ref.index for e in loader.draw(4)] == [0] * 4, "to be learned: it is left out"


def test_a_prompt_beyond_the_context_with_its_media(seeing: Path, tmp_path: Path) -> None:
    (tmp_path / "wide.png").write_bytes(png("red", 512))
    found = sources(seeing, write(tmp_path, [{**TWO, "prompt": "<image>", "images": ["wide.png"]}]))
    assert found.check() == {}
    with pytest.raises(UnusablePrompt, match="the prompt has 1026 tokens; it needs at least 1 and at most 511"):
        found.prompt(0, 0)


def parquet(path: Path, cells: list[Any], kind: Any, **columns: Any) -> Path:
    table = pyarrow.table({"images": pyarrow.array(cells, kind), **columns})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    return path


PICTURE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])


def test_parquet_columns_of_bytes(seeing: Path, tmp_path: Path) -> None:
    cells = [[{"bytes": png(color), "path": None}] for color in ("red", "green", "blue")]
    path = parquet(
        tmp_path / "p.parquet", cells, pyarrow.list_(PICTURE), prompt=["<image>?"] * 3, answer=["x"] * 3, level=[1, 2, 3],
        thumbnail=pyarrow.array([b"\0"] * 3), preview=pyarrow.array([c[0] for c in cells], PICTURE),
    )  # fmt: skip
    found = sources(seeing, path)
    assert found.check() == {}
    prompts = [found.prompt(0, i) for i in range(3)]
    reds = [p.media.tensors["pixel_values"].reshape(16, 3, -1).mean((0, 2)).argmax() for p in prompts if p.media]
    assert reds == [0, 1, 2]
    assert prompts[1].metadata == {"level": 2}, "bytes are no metadata, in a struct neither"
    lone = parquet(tmp_path / "one.parquet", [png("green")], pyarrow.binary(), prompt=["<image>"], answer=["x"])
    assert sources(seeing, lone).prompt(0, 0).media is not None


def saved(folder: Path, table: pyarrow.Table, files: int = 2) -> Path:
    """A folder as `Dataset.save_to_disk` writes it: streams of Arrow batches, and the list of them."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{files:05d}.arrow" for i in range(files)]
    each = -(-len(table) // files)
    for i, name in enumerate(names):
        part = table.slice(i * each, each)
        with pyarrow.OSFile(str(folder / name), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(part, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_the_bytes_of_media_are_known_before_a_shard_is_written(seeing: Path, tmp_path: Path) -> None:
    (tmp_path / "gone.png").write_bytes(png("red")[:40])
    rows = [
        TWO,
        {**TWO, "prompt": "<image>", "images": ["red.png"]},
        {**TWO, "prompt": "<image>", "images": ["gone.png"]},
    ]
    path, pixels = write(tmp_path, rows), 32 * 3 * 2 * 8 * 8 * 4
    assert sources(seeing, path).media_bytes(8) == pixels + 2 * 3 * 8, "two pictures and their grids"
    assert sources(seeing, write(tmp_path, [{"prompt": "?", "answer": "x"}]), media={}).media_bytes(8) == 0


def test_a_folder_of_a_hugging_face_data_set(seeing: Path, hearing: Path, tmp_path: Path) -> None:
    colors = ["red", "green", "blue"]
    write(tmp_path, [])
    cells = [{"bytes": png("red"), "path": "x.png"}, {"bytes": None, "path": str(tmp_path / "green.png")}]
    columns = {
        "images": pyarrow.array([*cells, {"bytes": png("blue"), "path": None}], PICTURE), "prompt": ["<image>?"] * 3,
        "answer": colors,
    }  # fmt: skip
    table = pyarrow.table(columns)
    saved(tmp_path / "set" / "train", table)
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    hub = tmp_path / "hub" / "data"
    hub.mkdir(parents=True)
    for i in range(2):
        pyarrow.parquet.write_table(table.slice(2 * i, 2), hub / f"train-{i:05d}-of-00002.parquet")
    for path in (tmp_path / "set" / "train", tmp_path / "hub", hub, hub / "train"):
        found = sources(seeing, path)
        assert found.sizes == [3] and found.check() == {}, path
        prompts = [found.prompt(0, i) for i in range(3)]
        assert [p.answer for p in prompts] == colors and all(p.metadata == {} for p in prompts)
        shown = [p.media.tensors["pixel_values"].reshape(16, 3, -1).mean((0, 2)).argmax() for p in prompts if p.media]
        assert shown == [0, 1, 2]
    with pytest.raises(RunError, match=r"has the splits \['train', 'test'\]: name one, such as '.*set/train'"):
        sources(seeing, tmp_path / "set")
    pyarrow.parquet.write_table(table, hub / "test-00000-of-00001.parquet")
    with pytest.raises(RunError, match=r"has the splits \['test', 'train'\]"):
        sources(seeing, tmp_path / "hub")
    assert sources(seeing, hub / "train").sizes == [3]
    with pytest.raises(RunError, match="no folder that Dataset.save_to_disk wrote"):
        sources(seeing, tmp_path)
    (tmp_path / "set" / "train" / "data-00001-of-00002.arrow").write_bytes(b"x" * 99)
    with pytest.raises(RunError, match="data-00001-of-00002.arrow: not an Arrow stream"):
        sources(seeing, tmp_path / "set" / "train")
    sounds = pyarrow.table({
        "audio": pyarrow.array([{"bytes": wav(0.2), "path": None}], PICTURE), "prompt": ["<audio>?"], "answer": ["x"],
    })  # fmt: skip
    heard = sources(hearing, saved(tmp_path / "sounds", sounds, 1), media={"audio": "audio"}).prompt(0, 0)
    assert int((heard.tokens == ids(hearing)["audio"]).sum()) == 3


def test_the_same_picture_is_the_same_prompt_wherever_it_is_stored(seeing: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "<image>?", "images": [f"{c}.png"], "answer": "x"} for c in ("red", "green", "blue", "red")]
    path = write(tmp_path, rows)
    asked = parquet(
        tmp_path / "e.parquet", [[{"bytes": png(c), "path": "?"}] for c in ("green", "green")], pyarrow.list_(PICTURE),
        prompt=["<image>?"] * 2, answer=["x"] * 2,
    )  # fmt: skip
    evaluation = [EvaluationFile(prompts=asked, media={"image": "images"})]
    found = sources(seeing, path, evaluation=evaluation)
    assert [found.is_held_out(0, i) for i in range(4)] == [False, True, False, False], "green is evaluated"
    assert found.evaluated(9) == [(1, found.evaluated(9)[0][1])], "one of two equal prompts"


def test_equal_pictures_are_on_one_side_of_the_holdout(seeing: Path, tmp_path: Path) -> None:
    for i in range(40):
        Image.new("RGB", (32, 32), (6 * i, 0, 0)).save(tmp_path / f"{i}.png")
    rows = [{"prompt": "<image>?", "images": [f"{i % 40}.png"], "answer": "x"} for i in range(80)]
    found = sources(seeing, write(tmp_path, rows), holdout=0.4)
    sides = [found.is_held_out(0, i) for i in range(80)]
    assert sides[:40] == sides[40:] and 5 < sum(sides[:40]) < 30, "one text, but pictures on both sides"
    held = found.held_out(100)
    assert len(held) == sum(sides[:40]), "each distinct one once"


def test_a_modality_that_the_model_does_not_know_is_refused(seeing: Path, tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": "<audio>", "sound": "a.wav", "answer": "x"}])
    with pytest.raises(
        RunError, match=r"source.0.media.audio: the model, a 'qwen3_vl', knows only \['image', 'video'\]"
    ):
        sources(seeing, path, media={"audio": "sound"}).check()


def test_a_folder_without_its_processor_is_refused(seeing: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in seeing.iterdir():
        if file.name != "processor_config.json":
            (bare / file.name).write_bytes(file.read_bytes())
    with pytest.raises(RunError, match="processor"):
        sources(bare, write(tmp_path, [TWO])).check()


def test_sounds_and_limits(hearing: Path, tmp_path: Path) -> None:
    (tmp_path / "short.wav").write_bytes(wav(0.2))
    (tmp_path / "long.wav").write_bytes(wav(1.2))
    rows = [{"prompt": "<audio>?", "sound": name, "answer": "x"} for name in ("short.wav", "long.wav")]
    path = write(tmp_path, rows)
    source = FileSource(prompts=path, media={"audio": "sound"})
    tokenizer = AutoTokenizer.from_pretrained(hearing)
    found = PromptSources([source], tokenizer, 512, processor=Processor(hearing, LIMITS))
    prompts = [found.prompt(0, i) for i in range(2)]
    counts = [int((p.tokens == ids(hearing)["audio"]).sum()) for p in prompts]
    assert counts == [3, 16], "13 a second"
    short = PromptSources(
        [source], tokenizer, 512, processor=Processor(hearing, LIMITS.model_copy(update={"longest_audio_s": 1.0}))
    )
    with pytest.raises(RunError, match=r"prompt 1 .*long.wav' lasts 1.2 s, longer than media.longest_audio_s = 1"):
        short.check()


def test_media_are_made_again_from_their_files(hearing: Path, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(wav(0.3))
    row = {"prompt": "<audio>a<image>", "images": "red.png", "sound": "a.wav", "answer": "x"}
    source = FileSource(prompts=write(tmp_path, [row]), media={"image": "images", "audio": "sound"})
    keeping = Processor(hearing, LIMITS, keeps_files=True)
    media = PromptSources([source], AutoTokenizer.from_pretrained(hearing), 512, processor=keeping).prompt(0, 0).media
    assert media is not None and media.source is not None
    assert [modality for modality, _ in media.source.files] == ["audio", "image"]
    again = keeping.remake(media.source)
    assert again.digest == media.digest and again.source == media.source
    assert "transformers" in media.source.processor["versions"]
    cut = dataclasses.replace(media.source, files=(("image", png("red")[:40]),))
    with pytest.raises(RunError, match="cannot be made again"):
        keeping.remake(cut)


def test_each_video_has_its_own_rate(hearing: Path, tmp_path: Path) -> None:
    films = [{"frames": [{"path": "red.png"}] * 4, "fps": fps} for fps in (2, 4)]
    row = {"prompt": "<video><video>", "films": films, "answer": "x"}
    prompt = sources(hearing, write(tmp_path, [row]), media={"video": "films"}).prompt(0, 0)
    assert prompt.media is not None
    # two frames a patch: of four in 2 s, and of two in 1 s
    assert prompt.media.tensors["video_second_per_grid"].tolist() == [1.0, 1.0]
    still = {**row, "films": [{"frames": [{"path": "red.png"}], "fps": 8}, films[0]]}
    prompt = sources(hearing, write(tmp_path, [still]), media={"video": "films"}).prompt(0, 0)
    assert prompt.media is not None
    assert prompt.media.tensors["video_second_per_grid"].tolist() == [0.125, 1.0], "one frame of 1/8 s, seen twice"


def test_a_model_folder_is_taken_over_with_its_processor(seeing: Path, tmp_path: Path) -> None:
    materialise(PathModel(path=seeing), tmp_path / "model", 0)
    path = write(tmp_path, [TWO])
    own, taken = sources(seeing, path).prompt(0, 0), sources(tmp_path / "model", path).prompt(0, 0)
    assert own.media is not None and taken.media is not None and own.media.digest == taken.media.digest


def test_a_folder_of_qwen2_5_vl(tmp_path: Path) -> None:
    tokenizer = character_tokenizer(ALPHABET, "qwen2_5_vl")
    token = tokenizer.convert_tokens_to_ids
    patches: dict[str, Any] = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    processor = transformers.Qwen2_5_VLProcessor(
        transformers.Qwen2VLImageProcessor(**patches), tokenizer, transformers.Qwen2VLVideoProcessor(**patches)
    )
    processor.save_pretrained(tmp_path)
    transformers.Qwen2_5_VLConfig(
        vision_config={"patch_size": 8, "tokens_per_second": 2}, image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"), vision_start_token_id=token("<|vision_start|>"),
    ).save_pretrained(tmp_path)  # fmt: skip
    film = {"frames": [{"path": "red.png"}] * 4, "fps": 2}
    row = {"prompt": "<image>a<video>", "images": "red.png", "film": film, "answer": "x"}
    media = {"image": "images", "video": "film"}
    prompt = sources(tmp_path, write(tmp_path, [row]), media=media).prompt(0, 0)
    assert prompt.media is not None
    assert prompt.media.tensors["second_per_grid_ts"].tolist() == [1.0], "two frames a patch, two a second"
    config = AutoConfig.from_pretrained(tmp_path)
    positions = family_of(config).positions(config, prompt.tokens, prompt.media)
    times = positions[0, prompt.tokens == ids(tmp_path)["video"]]
    assert np.unique(times - times[0]).tolist() == [0, 2], "tokens_per_second = 2"
