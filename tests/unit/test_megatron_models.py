"""Models that the megatron backend knows: the logprobs and the weights of transformers, there and back to the bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from relax_hpc.algorithms import LossInputs
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Rollouts
from relax_hpc.trainers import make_trainer
from relax_hpc.trainers.export import convert
from relax_hpc.trainers.megatron.export import convert as megatron_convert
from relax_hpc.trainers.tiny_model import character_tokenizer
from tests import tiny

SHAPE = {
    "vocab_size": 51,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": tiny.SPREAD,
}
ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "qwen3, own head": lambda: Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False),
    "experts": lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=8, tie_word_embeddings=False),
    "experts in some layers": lambda: Qwen3MoeConfig(**SHAPE, **(EXPERTS | {"norm_topk_prob": False}), mlp_only_layers=[0]),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE, head_dim=12, sliding_window=None),
    "llama": lambda: LlamaConfig(
        **SHAPE, rope_parameters={**ROPE, "original_max_position_embeddings": 8192}, rms_norm_eps=1e-5
    ),
}  # fmt: skip


def folder_of(config: PretrainedConfig, where: Path, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:  # as they begin, a wrong one would go unseen
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(where)
    character_tokenizer("0123456789").save_pretrained(where)
    return where


def trainer_of(where: Path, backend: str) -> Any:
    made = Recipe.model_validate(
        {"model": {"path": where}, "source": [{"task": "chain_sum"}], "trainer": {"backend": backend, "device": "cpu"}}
    )
    return make_trainer(made, where, 0, 1)


class Listen:
    """An algorithm that writes down logprobs by token."""

    needs: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.heard: list[tuple[float, float]] = []

    def advantages(self, rollouts: Rollouts) -> Tensor:
        return torch.from_numpy(np.arange(len(rollouts.tokens), dtype=np.float32))

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        self.heard += zip(inputs.advantages.tolist(), inputs.logprobs.tolist(), strict=True)
        return inputs.logprobs * 0, {}


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_and_names_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    where = folder_of(MODELS[name](), tmp_path / "hub")
    heard, exported = [], []
    for backend in ("torch", "megatron"):
        trainer, listen = trainer_of(where, backend), Listen()
        trainer.step(tiny.random_rollouts(6), listen, 0)
        heard.append(torch.tensor([logprob for _, logprob in sorted(listen.heard)]))
        exported.append(dict(trainer.export()))
    torch.testing.assert_close(heard[1], heard[0], rtol=0, atol=1e-5)
    assert exported[0].keys() == exported[1].keys() == load_file(where / "model.safetensors").keys()
    assert all(torch.equal(tensor, exported[0][n]) for n, tensor in exported[1].items())


def test_recorded_experts_are_replayed_to_the_bit_and_others_make_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relax_hpc.trainers.megatron.replay import Replay

    where = folder_of(MODELS["experts"](), tmp_path / "hub")
    rollouts = tiny.random_rollouts(1, group_size=1)
    seen: dict[int, NDArray[np.int64]] = {}
    chosen = Replay.get_replay_topk

    def listen(self: Replay, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        scores, experts = chosen(self, *args, **kwargs)
        assert self.layer not in seen or np.array_equal(seen[self.layer], experts.numpy())
        seen[self.layer] = experts.numpy().copy()
        return scores, experts

    monkeypatch.setattr(Replay, "get_replay_topk", listen)
    said = []
    for routes in ("own", "recorded", "others"):
        trainer, algorithm = trainer_of(where, "megatron"), Listen()
        if routes == "recorded":
            rollouts = dataclasses.replace(rollouts, routed_experts=np.stack([seen[0], seen[1]], 1).astype(np.uint8))
        if routes == "others":
            rollouts = tiny.routed(rollouts, 2, 4, 2)
            seen = {layer: rollouts.routed_experts[:, layer].astype(np.int64) for layer in range(2)}
        trainer.step(rollouts, algorithm, 0)
        said.append(algorithm.heard)
    assert said[0] == said[1] != said[2]


@pytest.mark.parametrize("name", ["qwen3", "experts in some layers", "qwen2"])
def test_there_and_back_to_the_bit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16 if name == "qwen2" else torch.float32
    where = folder_of(MODELS[name](), tmp_path / "hub", dtype)
    monkeypatch.setattr(megatron_convert, "FILE_BYTES", 20000)  # several files and their index
    assert "Megatron-core checkpoint" in convert(where, tmp_path / "megatron")
    assert "Hugging Face model" in convert(tmp_path / "megatron", tmp_path / "back")
    first, last = (
        AutoModelForCausalLM.from_pretrained(f, dtype=dtype).state_dict() for f in (where, tmp_path / "back")
    )
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    assert first.keys() == last.keys() and all(torch.equal(first[n], last[n]) for n in first)
    assert (where / "tokenizer.json").read_bytes() == (tmp_path / "back" / "tokenizer.json").read_bytes()
    with pytest.raises(RunError, match="exists"):
        convert(where, tmp_path / "back")


def test_what_a_run_saved_is_converted_with_its_master_weights(tmp_path: Path) -> None:
    where = folder_of(MODELS["qwen3"](), tmp_path / "hub")
    trainer = trainer_of(where, "megatron")
    trainer.supervised_step(tiny.prompts([3, 4]), tiny.prompts([5, 2]), 1e-3)
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    trainer.save(saved)
    config = where / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    convert(saved, tmp_path / "model", where)
    assert '"dtype": "float32"' in (tmp_path / "model" / "config.json").read_text()
    written = load_file(tmp_path / "model" / "model.safetensors")
    exported = dict(trainer.export())
    assert written.keys() == exported.keys() and all(torch.equal(written[n], exported[n]) for n in written)
    (tmp_path / "narrow").mkdir()
    megatron_convert.to_hugging(saved, where, tmp_path / "narrow", "bfloat16")
    narrow = load_file(tmp_path / "narrow" / "model.safetensors")
    assert all(torch.equal(narrow[n], written[n].bfloat16()) for n in written)
    with pytest.raises(RunError, match=r"of another model.*is missing"):
        convert(saved, tmp_path / "other", folder_of(MODELS["qwen2"](), tmp_path / "other-hub"))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}}, "rope_parameters"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "biases"),
        ({"sliding_window": 32}, "sliding_window 32"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "full attention"),
    ],
)
def test_a_model_that_would_be_computed_differently_is_refused(change: dict[str, Any], said: str) -> None:
    from relax_hpc.trainers.fit import refuse_foreign

    config = MODELS["mistral" if "sliding_window" in change else "qwen3"]()
    for key, value in change.items():
        setattr(type(config) if key == "model_type" else config, key, value)
    try:
        with pytest.raises(RunError, match=f"{said}.*torch backend"):
            refuse_foreign(config)
    finally:
        Qwen3Config.model_type = "qwen3"
