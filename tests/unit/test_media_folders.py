"""Folders as models with media come in: several files of weights, a processor. They train, and what is exported loads."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from huggingface_hub import save_torch_state_dict
from PIL import Image
from safetensors.torch import load_file

from relax_hpc.algorithms import make_algorithm
from relax_hpc.engines import Sampling
from relax_hpc.engines.torch import TorchEngine
from relax_hpc.files.errors import RunError
from relax_hpc.media.families import family_of
from relax_hpc.media.process import Cell, Processor
from relax_hpc.media.values import MediaError
from relax_hpc.recipe.tables.model import PathModel, TinyModel
from relax_hpc.recipe.tables.source import Media as Limits
from relax_hpc.trainers import fit, make_scoring, make_trainer
from relax_hpc.trainers.build import materialise
from tests import omni, tiny

KINDS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"vision": {}},
    "qwen3_vl_moe": {"vision": {}, "experts": 4},
    "qwen2_5_vl": {"vision": {}, "family": "qwen2_5_vl"},
    "qwen3_omni": {"audio": {}, "experts": 4},
    "gemma4_unified": {"audio": {}, "family": "gemma4_unified"},
}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "alphabet": "abc :?"}
LIMITS = Limits(video_frame_tokens=(1, 70), video_frames=(2, 2), image_tokens=(1, 70))


def real_shaped(kind: str, where: Path) -> Path:
    """A tiny model with its processor as folders of models are: weights in several files, with an index."""
    made = where / "made"
    materialise(TinyModel.model_validate({**SMALL, **KINDS[kind]}), made, 0)
    folder = where / "folder"
    folder.mkdir()
    save_torch_state_dict(load_file(made / "model.safetensors"), folder, max_shard_size="200KB")
    for file in made.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, folder / file.name)
    assert len([*folder.glob("model-0*.safetensors")]) > 2
    return folder


def cells() -> dict[str, Any]:
    picture, sound = io.BytesIO(), io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 40, 3), np.uint8)).save(picture, "PNG")
    soundfile.write(sound, np.sin(np.arange(9000) / 9).astype(np.float32), 16000, format="WAV")
    film = {"frames": [picture.getvalue()] * 3, "fps": 2.0}
    return {"image": picture.getvalue(), "video": film, "audio": sound.getvalue()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_with_several_files_trains(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder, model = real_shaped(kind, tmp_path), tmp_path / "model"
    materialise(PathModel(path=folder), model, 0)
    recipe = omni.recipe(
        folder, algorithm={"name": "grpo", "group_size": 2, "kl_coef": 0.1}, scorer={"scores": ["reference"]}
    )
    fit.check(recipe, model)
    processor = Processor(model, LIMITS)
    shown = [Cell(modality, value) for modality, value in cells().items() if modality in processor.family.modalities]
    text = "a" + "b".join(processor.family.marks[cell.modality] for cell in shown) + "?"
    tokens, media = processor.tokens(text, shown, tmp_path, special=True)
    trainer, engine, scoring = (
        make_trainer(recipe, model, 0, 1),
        TorchEngine(recipe, model),
        make_scoring(recipe, model, 0, 1),
    )
    before = dict(trainer.export())
    trainer.begin_training()
    for step in range(2):
        weights = dict(trainer.export())
        engine.load(step, weights.items())
        scoring.load("reference", weights, tmp_path)
        done = engine.generate([tokens], 2, Sampling(max_new_tokens=6), step, media=[media])
        made = tiny.rollouts([tokens] * 2, [c.tokens for c in done], 2)
        made = replace(made, media=(media,) * 2, logprobs=np.concatenate([c.logprobs for c in done]))
        np.testing.assert_allclose(scoring.logprobs("reference", made), made.logprobs, atol=1e-5)
        said = trainer.step(replace(made, columns={"reference": made.logprobs}), make_algorithm(recipe.algorithm), step)
        assert said["skipped"] == 0
    moved = {name for name, tensor in trainer.export() if not torch.equal(tensor, before[name])}
    part_of = family_of(trainer.model.config).part  # type: ignore[attr-defined]
    own = dict(trainer.model.named_parameters())  # type: ignore[attr-defined]
    assert {part_of(name) for name in own} == {"language", *(part for _, part in processor.family.parts)}
    assert len(moved) > 0.9 * len(own)


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    config = omni.config("gemma4_unified")
    config.text_config.use_bidirectional_attention = "vision"
    config.save_pretrained(tmp_path)
    with pytest.raises(RunError, match=r"use_bidirectional_attention = 'vision'.*set it to null"):
        fit.check(omni.recipe(tmp_path), tmp_path)


def test_gemma_takes_as_many_tokens_as_the_limit_allows(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    materialise(TinyModel.model_validate({**SMALL, **KINDS["gemma4_unified"]}), folder, 0)
    with pytest.raises(RunError, match=r"media.image_tokens allows 69 tokens, .* makes one of \[70, 140"):
        Processor(folder, Limits(image_tokens=(1, 69))).tokens(
            "<|image|>", [Cell("image", cells()["image"])], tmp_path, special=True
        )


def test_a_video_too_flat_for_the_processor_is_an_error_of_its_row(tmp_path: Path) -> None:
    folder, frame = tmp_path / "model", io.BytesIO()
    materialise(TinyModel.model_validate({**SMALL, **KINDS["qwen3_vl"]}), folder, 0)
    Image.new("RGB", (3000, 2)).save(frame, "PNG")
    processor, film = Processor(folder, LIMITS), Cell("video", [frame.getvalue()] * 2)
    with pytest.raises(
        MediaError, match="video 1 of 1: frames of 3000 × 2 pixels cannot be shown: absolute aspect ratio"
    ):
        processor.tokens(processor.family.marks["video"], [film], tmp_path, special=True)
