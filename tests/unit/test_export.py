"""A run's checkpoint as a Hugging Face model: config.json says what its files hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3OmniMoeConfig

from relax_hpc import checkpoint
from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe import dump_recipe
from relax_hpc.trainers import make_trainer
from relax_hpc.trainers.build import materialise
from relax_hpc.trainers.export import export_checkpoint
from relax_hpc.trainers.torch import load_model, tensors_of
from tests import omni, tiny


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """One whose model is in bfloat16, as its config.json says; the checkpoint has float32 master weights."""
    run = RunDir(tmp_path / "run")
    run.create()
    run.identity.write_text("{}")
    materialise(tiny.recipe().model, run.model, 0)
    say(run, dtype="bfloat16")
    commit_dir = run.lease / "000001" / "i000001"
    commit_dir.mkdir(parents=True)
    folder = checkpoint.begin(commit_dir, 0)
    (run.model / "model.safetensors").rename(folder / "model.safetensors")
    checkpoint.commit(run, folder, 0, {})
    return run


def say(run: RunDir, **dtype: str) -> None:
    config = json.loads((run.model / "config.json").read_text())
    config.pop("dtype", None)
    (run.model / "config.json").write_text(json.dumps({**config, **dtype}))


def held(folder: Path) -> tuple[dict[str, Any], set[torch.dtype], torch.dtype]:
    """config.json, the types in the file, and the type that a user gets who asks for none."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype
    tensors = load_file(folder / "model.safetensors")
    return json.loads((folder / "config.json").read_text()), {t.dtype for t in tensors.values()}, loaded


def test_a_checkpoint_is_exported_in_the_models_own_type(run: RunDir, tmp_path: Path) -> None:
    assert "in bfloat16" in export_checkpoint(run.root, tmp_path / "own")
    config, types, loaded = held(tmp_path / "own")
    assert (config["dtype"], types, loaded) == ("bfloat16", {torch.bfloat16}, torch.bfloat16)
    master = load_file(run.checkpoint(0) / "model.safetensors")
    written = load_file(tmp_path / "own" / "model.safetensors")
    assert all(torch.equal(written[name], tensor.bfloat16()) for name, tensor in master.items())


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_another_type_is_asked_for_and_said(run: RunDir, tmp_path: Path, key: str) -> None:
    say(run, **{key: "bfloat16"})
    export_checkpoint(run.root, tmp_path / "wide", dtype="float32")
    config, types, loaded = held(tmp_path / "wide")
    assert (config[key], types, loaded) == ("float32", {torch.float32}, torch.float32)
    with pytest.raises(RunError, match="--dtype 'int8': expected one of bfloat16"):
        export_checkpoint(run.root, tmp_path / "no", dtype="int8")


def test_a_model_that_says_no_type_keeps_that_of_the_checkpoint(run: RunDir, tmp_path: Path) -> None:
    say(run)
    export_checkpoint(run.root, tmp_path / "own")
    config, types, _ = held(tmp_path / "own")
    assert (config["dtype"], types) == ("float32", {torch.float32})


@pytest.mark.parametrize("backend", ["torch", "megatron"])
def test_a_thinker_is_exported_within_the_whole_model(backend: str, tmp_path: Path) -> None:
    """Its talker, which is not trained, comes along from the folder that the run began with; its frozen parts too."""
    thinker = omni.config("qwen3_omni").to_dict()
    whole = tmp_path / "whole"
    Qwen3OmniMoeConfig(thinker_config=thinker, enable_audio_output=False).save_pretrained(whole)
    began = omni.folder("qwen3_omni", tmp_path / "thinker")
    model = load_model(began, torch.device("cpu"))
    trained = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
    talker = torch.arange(6.0)
    save_file({**{n: t * 0 for n, t in trained.items()}, "talker.weight": talker}, whole / "model.safetensors")
    run = RunDir(tmp_path / "run")
    run.create()
    run.identity.write_text("{}")
    run.recipe.write_text(dump_recipe(omni.recipe(whole)))
    run.model.mkdir()
    (run.model / "config.json").write_bytes((whole / "config.json").read_bytes())
    (commit_dir := run.lease / "000001" / "i000001").mkdir(parents=True)
    folder = checkpoint.begin(commit_dir, 0)
    recipe = omni.recipe(began, trainer={"backend": backend, "freeze": ["vision"]})
    make_trainer(recipe, began, 0, 1).save(folder)
    checkpoint.commit(run, folder, 0, {})

    said = export_checkpoint(run.root, tmp_path / "out", dtype="float32")

    assert "Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained" in said
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(written.pop("talker.weight"), talker)
    assert written.keys() == trained.keys() and all(name.startswith("thinker.") for name in written)
    again = load_model(tmp_path / "out", torch.device("cpu"))
    assert all(torch.equal(tensor, trained[name]) for name, tensor in tensors_of(again).items())
