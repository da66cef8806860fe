"""Low-rank adapters of the torch trainer and engine; the oracle is PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from relax_hpc.algorithms import make_algorithm
from relax_hpc.engines import Sampling, TakesAdapters, make_engine
from relax_hpc.files.errors import RunError
from relax_hpc.huggingface.lora import merged
from relax_hpc.planning.sizing.model import shape_in
from relax_hpc.planning.sizing.trainer import adapter_parameters
from relax_hpc.recipe.schema import Recipe
from relax_hpc.trainers.build import tensors_in
from relax_hpc.trainers.torch import TorchTrainer
from tests import tiny
from tests.contract.test_trainers import identical, oracle_steps, weights


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def made(folder: Path, lora: dict[str, Any], **tables: Any) -> tuple[Recipe, TorchTrainer]:
    """A recipe with an adapter, and its trainer; the model is made in `folder` where it is not there."""
    tables["trainer"] = {"lora": {"rank": 4, **lora}} | tables.get("trainer", {})
    recipe = tiny.recipe(**tables)
    if not (folder / "config.json").exists():
        tiny.folder(recipe, folder)
    return recipe, TorchTrainer(recipe, folder, 0, 1)


def saved(trainer: TorchTrainer, folder: Path) -> Path:
    folder.mkdir()
    trainer.save(folder)
    return folder


def peft_of(folder: Path, adapter: Path, **how: Any) -> Any:
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter, **how).eval()


@pytest.mark.quick
def test_steps_are_those_of_peft_and_the_reference_is_the_base(tmp_path: Path) -> None:
    recipe, trainer = made(
        tmp_path / "model", {"alpha": 6.0, "targets": ["q_proj", "down_proj"]}, algorithm={"kl_coef": 0.5, "dual_clip": 0}
    )  # fmt: skip
    algorithm = make_algorithm(recipe.algorithm)
    batches = [tiny.random_rollouts(12, seed=s) for s in range(3)]
    policy = peft_of(tmp_path / "model", saved(trainer, tmp_path / "first"), is_trainable=True)
    frozen = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    expected, final = oracle_steps(recipe, policy, frozen, batches, 0.5, 0.0)
    for step, (rollouts, said) in enumerate(zip(batches, expected, strict=True)):
        metrics = trainer.step(rollouts, algorithm, step)
        for name, value in said.items():
            assert metrics[name] == pytest.approx(value, rel=2e-4, abs=1e-6), (step, name)
    for name, tensor in weights(trainer).items():
        own = final[name.replace("lora_A.", "lora_A.default.").replace("lora_B.", "lora_B.default.")]
        torch.testing.assert_close(tensor, own, rtol=0, atol=2e-4)
        assert "q_proj" in name or "down_proj" in name
    base = dict(trainer.export_base())
    assert identical(base, {name: tensor for name, tensor in tensors_in(tmp_path / "model") if name in base})


def learned(tmp_path: Path, lora: dict[str, Any], **tables: Any) -> tuple[Recipe, TorchTrainer]:
    """A trainer after two steps that move its adapter far."""
    recipe, trainer = made(
        tmp_path / "model", lora, **{"trainer": {"learning_rate": 0.05, "lora": {"rank": 4, **lora}}, **tables}
    )
    for step in range(2):
        trainer.step(tiny.random_rollouts(8, seed=step), make_algorithm(recipe.algorithm), step)
    return recipe, trainer


def test_what_is_merged_does_what_base_and_adapter_do(tmp_path: Path) -> None:
    recipe, trainer = learned(tmp_path, {"sync": "merge"})
    adapter = {key: t for key, t in tensors_of_adapter(trainer).items()}
    config = AutoConfig.from_pretrained(tmp_path / "model")
    whole = weights(trainer)
    assert identical(whole, dict(merged(dict(trainer.export_base()), adapter, 32.0 / 4, config)))
    oracle = peft_of(tmp_path / "model", saved(trainer, tmp_path / "now"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    plain.load_state_dict(whole, strict=False)
    asked = torch.arange(3, 20)[None]
    with torch.no_grad():
        said = [model(asked).logits.log_softmax(-1) for model in (oracle, plain)]
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()(asked).logits.log_softmax(-1)
    assert float((said[0] - said[1]).abs().max()) < 1e-5
    assert float((said[0] - base).abs().max()) > 1e-2


def tensors_of_adapter(trainer: TorchTrainer) -> dict[str, Tensor]:
    from relax_hpc.huggingface.lora import adapter_of

    return {name: tensor.clone() for name, tensor in adapter_of(trainer.model).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_with_base_and_adapter_says_the_trainers_logprobs(tmp_path: Path, dtype: str) -> None:
    recipe, trainer = learned(tmp_path, {}, trainer={"learning_rate": 0.05, "dtype": dtype, "lora": {"rank": 4}})
    engine = make_engine(recipe, tmp_path / "model")
    assert isinstance(engine, TakesAdapters)
    prompts = tiny.prompts([4, 7])
    found: list[Any] = []
    for _ in range(2):
        engine.load_base(trainer.export_base())
        engine.load(2, trainer.export())
        found.append(engine.generate(prompts, 2, Sampling(max_new_tokens=8), seed=1))
        engine.offload()
        engine.onload()
    for one, other in zip(*found, strict=True):
        assert (one.logprobs == other.logprobs).all() and (one.tokens == other.tokens).all()
    asked = [prompt for prompt in prompts for _ in range(2)]
    rollouts = tiny.rollouts(asked, [one.tokens for one in found[0]], 2)
    said = trainer._column("recomputed", rollouts, 1.0, lambda: None)
    worst = abs(said - [value for one in found[0] for value in one.logprobs]).max()
    assert worst < (1e-5 if dtype == "float32" else 0.1)
    assert abs(said - trainer._column("reference", rollouts, 1.0, lambda: None)).max() > 0.01


@pytest.mark.quick
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_resumed_adapter_goes_on_to_the_bit_on_its_base(tmp_path: Path, dropout: float) -> None:
    tables: dict[str, Any] = {"sft_warm_start": {"steps": 3, "batch_size": 2}, "algorithm": {"kl_coef": 0.1}}
    lora = {"dropout": dropout}
    recipe, straight = made(tmp_path / "model", lora, **tables)
    for _ in range(3):
        straight.supervised_step(tiny.prompts([3, 4]), tiny.prompts([3, 4]), 1e-2)
    straight.begin_training()
    base, algorithm = dict(straight.export_base()), make_algorithm(recipe.algorithm)
    batches = [tiny.random_rollouts(8, seed=s) for s in range(3)]
    straight.step(batches[0], algorithm, 0)
    folder = saved(straight, tmp_path / "checkpoint")
    assert not (folder / "model.safetensors").exists()
    expected = [straight.step(batches[step], algorithm, step) for step in (1, 2)]
    resumed = TorchTrainer(recipe, tmp_path / "model", 0, 1)
    resumed.load_base(base, tmp_path)
    resumed.load(folder)
    assert [resumed.step(batches[step], algorithm, step) for step in (1, 2)] == expected
    assert identical(weights(straight), weights(resumed))
    assert identical(base, dict(resumed.export_base()))
    assert not identical(base, dict(TorchTrainer(recipe, tmp_path / "model", 0, 1).export_base()))


def test_only_the_adapter_has_gradients_and_moments_and_the_plan_knows_its_size(tmp_path: Path) -> None:
    recipe, trainer = learned(tmp_path, {})
    shape = shape_in(tmp_path / "model")
    assert shape is not None and recipe.trainer.lora is not None
    assert sum(t.numel() for _, t in trainer.export()) == adapter_parameters(recipe.trainer.lora, shape)
    learning = trainer.learning["policy"]
    assert all(name.endswith(("lora_A", "lora_B")) for name in learning.parameters)
    assert sum(b.numel() for b in learning.gradients.buffers) == sum(t.numel() for _, t in trainer.export())
    assert all(p.grad is None for name, p in trainer.model.named_parameters() if "lora" not in name)
    assert json.loads((saved(trainer, tmp_path / "c") / "adapter_config.json").read_text())["r"] == 4


def test_a_critic_begins_as_the_base_and_learns_whole(tmp_path: Path) -> None:
    recipe, trainer = made(tmp_path / "model", {}, algorithm={"name": "ppo"}, run={"steps": 4})
    names = {name for name, _ in trainer._critic.named_parameters()}
    assert names and not any("lora" in name for name in names)
    trainer.begin_training()
    metrics = trainer.step(tiny.random_rollouts(8), make_algorithm(recipe.algorithm), 1)
    assert metrics["critic_grad_norm"] > 0 and metrics["grad_norm"] > 0


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"targets names \['query'\], .* k_proj, o_proj, q_proj"):
        made(tmp_path / "model", {"targets": ["q_proj", "query"]})
    _, other = made(tmp_path / "wide", {}, model={"hidden_size": 64})
    config = AutoConfig.from_pretrained(tmp_path / "model")
    with pytest.raises(
        RunError, match=r"for a layer .* of \[64, 64\], and the base has one of \[32, 32\]: .*another model"
    ):
        dict(merged(dict(tensors_in(tmp_path / "model")), tensors_of_adapter(other), 1.0, config))
    for wrong, message in (
        ({"trainer": {"lora": {"rank": 0}}}, "greater than 0"),
        ({"trainer": {"lora": {}}, "rollout": {"engine": "sglang", "sglang": {"address": "http://a:1"}}}, 'trainer.lora.sync = "merge"'),
        ({"trainer": {"lora": {}}, "rollout": {"engine": "sglang", "sglang": {"data_parallel": 2}}}, 'trainer.lora.sync = "merge"'),
        ({"trainer": {"lora": {}}, "rollout": {"engine": "sglang"}, "async": {"on_stale": "mask", "max_staleness": 1}}, "trainer.lora.sync = 'merge'"),
        ({"trainer": {"lora": {}, "backend": "megatron"}}, 'is for trainer.backend = "torch"'),
        ({"trainer": {"lora": {}}, "algorithm": {"kl_coef": 0.1, "reference_refresh_steps": 3}}, "the reference is the base"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            tiny.recipe(**cast(dict[str, Any], wrong))
