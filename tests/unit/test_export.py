"""A run's checkpoint as a Hugging Face model: config.json says what its files hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3OmniMoeForConditionalGeneration

from relax_hpc import checkpoint
from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch.export import export_checkpoint
from relax_hpc.recipe import dump_recipe
from relax_hpc.trainers import make_trainer
from relax_hpc.trainers.build import copy_small_files, materialise, tensors_in
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
    """Its talker, which is not trained, comes along from the folder that the run began with, and speaks; its frozen parts
    too."""
    whole = tmp_path / "whole"
    torch.manual_seed(0)
    first = Qwen3OmniMoeForConditionalGeneration(omni.whole())
    for parameter in first.parameters():  # transformers leaves some of them as the memory was
        torch.nn.init.normal_(parameter, 0, 0.1)
    first.save_pretrained(whole, max_shard_size="300KB")
    assert len([*whole.glob("*.safetensors")]) > 2
    began = omni.folder("qwen3_omni", tmp_path / "thinker")
    model = load_model(began, torch.device("cpu"))
    trained = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
    run = RunDir(tmp_path / "run")
    run.create()
    run.identity.write_text("{}")
    run.recipe.write_text(dump_recipe(omni.recipe(whole)))
    run.model.mkdir()
    copy_small_files(whole, run.model)
    (commit_dir := run.lease / "000001" / "i000001").mkdir(parents=True)
    folder = checkpoint.begin(commit_dir, 0)
    recipe = omni.recipe(began, trainer={"backend": backend, "freeze": ["vision"]})
    make_trainer(recipe, began, 0, 1).save(folder)
    checkpoint.commit(run, folder, 0, {})

    said = export_checkpoint(run.root, tmp_path / "out", dtype="float32")

    assert "Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained" in said
    written, given = dict(tensors_in(tmp_path / "out")), dict(tensors_in(whole))
    assert written.keys() == given.keys()
    assert {name.split(".")[0] for name in given.keys() - trained.keys()} == {"talker", "code2wav"}
    assert all(torch.equal(tensor, trained.get(name, given[name])) for name, tensor in written.items())
    load = Qwen3OmniMoeForConditionalGeneration.from_pretrained
    again, about = load(tmp_path / "out", output_loading_info=True)
    assert not about["missing_keys"] and not about["unexpected_keys"] and not about["mismatched_keys"]
    shown = omni.prompt("qwen3_omni", ("image",), 0)
    assert shown.media is not None
    asked = torch.tensor([[61, 62, 3, *shown.tokens.tolist(), 61, 63, 4]])
    tokens, sound = again.generate(
        asked, attention_mask=torch.ones_like(asked), thinker_max_new_tokens=6, thinker_eos_token_id=1,
        thinker_do_sample=False, talker_max_new_tokens=5, talker_do_sample=False,
        **{name: torch.from_numpy(array) for name, array in shown.media.tensors.items()},
    )  # fmt: skip
    answer = np.array(tokens[0, asked.shape[1] :], np.int32)
    expected = omni.plain_logits(model, omni.Shown(np.array(asked[0], np.int32), shown.media), answer).argmax(-1)
    assert answer.tolist() == expected.tolist() and sound.shape[-1] > 0
