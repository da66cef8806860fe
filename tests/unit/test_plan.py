"""`relax-hpc plan`: its numbers are those of the models, tensors and shards that a run really has."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from typer.testing import CliRunner

from relax_hpc.algorithms import make_algorithm
from relax_hpc.cli import app
from relax_hpc.files.errors import RunError
from relax_hpc.huggingface import from_config as build
from relax_hpc.planning.doctor import room
from relax_hpc.planning.simulation.setup import Prompts
from relax_hpc.planning.sizing import trainer as sizing
from relax_hpc.planning.sizing.estimate import Asked, estimate, gib
from relax_hpc.planning.sizing.model import from_config, parameters, shape_of
from relax_hpc.planning.sizing.traffic import step_of
from relax_hpc.planning.sizing.trainer import trainer_memory
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Finish, Group, Media, Prompt, Rollouts, Sample
from relax_hpc.spool.planner import RequestPlanner
from relax_hpc.spool.shard_writer import encode
from relax_hpc.trainers import make_trainer
from tests import omni, tiny
from tests.runs import SMALL

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
SHAPE = {"vocab_size": 51, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS = {
    "qwen3": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "qwen3, own head": Qwen3Config(**SHAPE, tie_word_embeddings=False),
    "experts": Qwen3MoeConfig(**SHAPE, **EXPERTS),
    "experts in some layers": Qwen3MoeConfig(**SHAPE, **EXPERTS, mlp_only_layers=[0], decoder_sparse_step=2),
    "qwen2": Qwen2Config(**SHAPE),
    "llama": LlamaConfig(**SHAPE, head_dim=8),
    "mistral": MistralConfig(**SHAPE, head_dim=12),
    **{kind: omni.config(kind) for kind in omni.KINDS if kind != "gemma4_unified"},  # whose size no plan can tell
}


def of_transformers(folder: Path) -> int:
    with torch.device("meta"):
        model = build(AutoConfig.from_pretrained(folder))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    CONFIGS[name].save_pretrained(tmp_path)
    shape = from_config(json.loads((tmp_path / "config.json").read_text()), name)
    assert parameters(shape).all == of_transformers(tmp_path)


@pytest.mark.parametrize(
    ("folder", "count"),
    [
        ("Qwen3-0.6B", 596_049_920),
        ("Qwen3-4B", 4_022_468_096),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("Qwen3-VL-4B-Instruct", 4_437_815_808),
        ("Qwen3-Omni-30B-A3B-Instruct", 31_719_205_488),
    ],
)
def test_shipped_configs_are_those_models(folder: str, count: int) -> None:
    where = RECIPES / "models" / folder
    assert parameters(from_config(json.loads((where / "config.json").read_text()), folder)).all == count
    assert of_transformers(where) == count


@pytest.mark.parametrize("experts", [0, 4])
def test_a_tiny_model_has_the_parameters_that_are_built(experts: int, tmp_path: Path) -> None:
    made = tiny.recipe(model={"experts": experts})
    tiny.folder(made, tmp_path)
    assert parameters(shape_of(made.model, tmp_path)[0]).all == of_transformers(tmp_path)


@pytest.mark.parametrize(
    "sees", [{"vision": {}}, {"audio": {"bands": 16}, "vision": {"hidden_size": 64}, "experts": 4}]
)
def test_a_tiny_model_that_sees_has_the_parameters_that_are_built(sees: dict[str, Any], tmp_path: Path) -> None:
    made = tiny.recipe(model={"heads": 2, "kv_heads": 1, "hidden_size": 64, **sees})
    tiny.folder(made, tmp_path)
    assert parameters(shape_of(made.model, tmp_path)[0]).all == of_transformers(tmp_path)


def test_encoders_that_do_not_learn_have_no_gradients_and_keep_nothing() -> None:
    sees = {"heads": 2, "kv_heads": 1, "hidden_size": 64, "vision": {}}
    pictures = [{"prompts": __file__, "media": {"image": "pictures"}}]
    shape, _ = shape_of(tiny.recipe(model=sees).model, Path())

    def memory(freeze: list[str], **tables: Any) -> sizing.TrainerMemory:
        made = tiny.recipe(model=sees, trainer={"freeze": freeze}, **tables)
        return trainer_memory(made, shape, sizing.Step(8, 30, 240, shown=0.5))[0]

    learns, still = memory([], source=pictures), memory(["vision"], source=pictures)
    assert learns.gradients - still.gradients == 4 * shape.encoders.parameters["vision"] > 0
    assert learns.optimizer - still.optimizer == 8 * shape.encoders.parameters["vision"]
    assert learns.weights == still.weights and learns.activations > still.activations == memory([]).activations
    assert memory(["language"], source=pictures).gradients == 4 * shape.encoders.all


@pytest.mark.parametrize("backend", ["torch", "megatron"])
@pytest.mark.parametrize(("dtype", "experts"), [("float32", 0), ("bfloat16", 4)])
def test_activations_are_what_autograd_keeps(backend: str, dtype: str, experts: int, tmp_path: Path) -> None:
    model = {"hidden_size": 64, "intermediate_size": 160, "layers": 4, "experts": experts, "context": 256}
    made = tiny.recipe(
        model=model, trainer={"backend": backend, "dtype": dtype, "tokens_per_micro_batch": 4096},
        rollout={"max_new_tokens": 150},
    )  # fmt: skip
    trainer: Any = make_trainer(made, tiny.folder(made, tmp_path), 0, 1)
    # one answer for each prompt: those that share a prompt are trained on behind one copy of it
    measured = kept_bytes(made, trainer, tiny.rollouts(tiny.prompts([40] * 8), tiny.prompts([150] * 8, 1), 1))
    shape, _ = shape_of(made.model, tmp_path)
    memory = trainer_memory(made, shape, sizing.Step(8, 190, 8 * 190))[0]
    assert memory.activations + memory.head == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("part", ["vision", "audio"])
def test_activations_of_encoders_are_what_autograd_keeps(part: str, dtype: str, tmp_path: Path) -> None:
    """What a step keeps with media, less what it keeps where equally many tokens are text."""
    made = tiny.recipe(
        model={
            "hidden_size": 64, "heads": 2, "kv_heads": 2, "layers": 2, "experts": 4, "context": 512,
            part: {"hidden_size": 64, "intermediate_size": 128, "layers": 6},
        },
        trainer={"dtype": dtype, "tokens_per_micro_batch": 4096},
        source=[{"prompts": __file__, "media": {"audio" if part == "audio" else "image": "shown"}}],
    )  # fmt: skip
    trainer: Any = make_trainer(made, tiny.folder(made, tmp_path), 0, 1)
    prompt, media = long_prompt(part, trainer.model.config)
    answers = [np.arange(20, 30, dtype=np.int32)] * 4
    blind = tiny.rollouts([np.full_like(prompt, 29)] * 4, answers, 1)
    shown = replace(tiny.rollouts([prompt] * 4, answers, 1), media=(media,) * 4)
    kept = kept_bytes(made, trainer, shown) - kept_bytes(made, trainer, blind)
    shape, _ = shape_of(made.model, tmp_path)
    tokens = 4 * (len(prompt) + 10)
    share = 4 * len(prompt) / tokens
    with_media, without = (
        trainer_memory(made, shape, sizing.Step(4, len(prompt) + 10, tokens, shown=part))[0] for part in (share, 0.0)
    )
    assert with_media.activations - without.activations == pytest.approx(kept, rel=0.15)


def long_prompt(part: str, config: Any) -> tuple[np.ndarray[Any, np.dtype[np.int32]], Media]:
    """A prompt of nothing but a picture or a sound."""
    rng = np.random.default_rng(0)
    if part == "vision":
        side = 16
        pixels = rng.normal(size=(side * side, 3 * 2 * 8 * 8)).astype(np.float32)
        media = Media.of({"pixel_values": pixels, "image_grid_thw": np.array([[1, side, side]])})
        return np.full(side * side // 4, config.image_token_id, np.int32), media
    seconds = 5
    features = rng.normal(size=(1, 32, 100 * seconds)).astype(np.float32)
    media = Media.of({"input_features": features, "feature_attention_mask": np.ones((1, 100 * seconds), np.int64)})
    return np.full(13 * seconds, config.audio_token_id, np.int32), media


def kept_bytes(made: Recipe, trainer: Any, rollouts: Rollouts) -> int:
    """Bytes that autograd keeps in a step."""
    chunks = trainer.chunks if made.trainer.backend == "megatron" else [trainer.model]
    own = {p.untyped_storage()._cdata for chunk in chunks for p in chunk.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.step(rollouts, make_algorithm(made.algorithm), 0)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("own_critic", [False, True])
def test_what_a_trainer_holds_and_saves_with_critic_reference_and_teacher(own_critic: bool, tmp_path: Path) -> None:
    large = tiny.recipe(model={"layers": 5})
    teacher = tiny.folder(large, tmp_path / "teacher")
    table = {"name": "ppo", "kl_coef": 0.1, "teacher": teacher, "critic": {"model": teacher} if own_critic else {}}
    made = tiny.recipe(algorithm=table)
    trainer: Any = make_trainer(made, tiny.folder(made, tmp_path / "model"), 0, 1)
    trainer.step(tiny.random_rollouts(8), make_algorithm(made.algorithm), 0)
    shape, _ = shape_of(made.model, tmp_path)
    memory = trainer_memory(made, shape, sizing.Step(8, 30, 240))[0]
    size = lambda tensors: sum(tensor.nbytes for tensor in tensors)
    learning = list(trainer.learning.values())
    assert memory.weights == size(p for one in learning for p in one.parameters.values())
    assert memory.gradients == size(b for one in learning for b in one.gradients.buffers)
    states = [state for one in learning for state in one.optimizer.state.values()]
    assert memory.optimizer == size(state[key] for state in states for key in ("exp_avg", "exp_avg_sq"))
    assert memory.frozen == size(p for model in (trainer.reference, trainer.teacher) for p in model.parameters())
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    trainer.save(saved)
    on_disk = sum(file.stat().st_size for file in saved.iterdir() if file.name != "rng.safetensors")
    assert sizing.checkpoint_bytes(made, shape) == pytest.approx(on_disk, rel=0.1)  # headers, of tensors this small
    away = tiny.recipe(algorithm=table | {"teacher": tmp_path / "away"})
    assert any("algorithm.teacher is as large as the policy" in word for word in estimate(away, shape, Asked()).assumed)


def test_recomputing_all_keeps_the_inputs_of_layers() -> None:
    def activations(**parallel: Any) -> float:
        made = tiny.recipe(model={"layers": 8}, trainer={"backend": "megatron", "processes": 2, "parallel": parallel})
        shape, _ = shape_of(made.model, Path())
        return trainer_memory(made, shape, step_of(made, shape, 40, 16))[0].activations

    assert activations(recompute="full") < activations() / 3
    assert activations(pipeline=2) == pytest.approx(activations(), rel=0.1), "two in flight of half the layers each"


@pytest.mark.parametrize("routed", [False, True])
def test_bytes_of_a_step_are_those_of_its_shards(routed: bool) -> None:
    rollout = {"max_new_tokens": 90, "groups_per_request": 8, "engine": "sglang", "routed_experts": routed}
    made = tiny.recipe(
        model={"experts": 8, "layers": 3, "context": 256},
        rollout=rollout,
        trainer={"prompts_per_step": 16},
        algorithm={"group_size": 4},
    )
    shape, _ = shape_of(made.model, Path())
    experts = np.zeros((120 + 90 - 1, 3, 2), np.uint8) if routed else None
    sample = Sample(
        tokens=np.zeros(90, np.int32), logprobs=np.zeros(90, np.float32), loss_mask=np.ones(90, np.uint8), spans=[(0, 1)],
        reward=1.0, raw_reward=1.0, finish=0, turns=1, routed_experts=experts,
    )  # fmt: skip
    groups = [Group(Prompt(0, i, "", np.zeros(120, np.int32), "42", {"of": "a task"}), [sample] * 4) for i in range(8)]
    meta = {
        "version": 1,
        "lineage": 0,
        "attempt": 0,
        "worker": "rollout-0",
        "seed": 1,
        "samples_per_prompt": 4,
        "created": 1.5,
    }
    request = sum(len(piece) for piece in encode("r000000-000", groups, meta))
    said = estimate(made, shape, Asked(prompt_tokens=120)).traffic
    assert said.spool_bytes == pytest.approx(2 * request, rel=0.03)
    assert said.routed_bytes == (2 * 8 * 4 * experts.size if experts is not None else 0)


def test_bytes_of_a_step_know_what_prompts_show() -> None:
    """Once a prompt, not once a sample; prompts that are nothing but a picture of Qwen3-VL's patches."""
    pictures = [{"prompts": __file__, "media": {"image": "pictures"}}]
    rollout = {"groups_per_request": 8, "max_new_tokens": 9}
    same = {
        "model": {"context": 256},
        "rollout": rollout,
        "trainer": {"prompts_per_step": 16},
        "algorithm": {"group_size": 4},
    }
    made, text = tiny.recipe(source=pictures, **same), tiny.recipe(**same)
    shown = Media.of(
        {"pixel_values": np.zeros((4 * 120, 1536), np.float32), "image_grid_thw": np.zeros((1, 3), np.int64)}
    )
    sample = Sample(np.zeros(9, np.int32), np.ones(9, np.uint8), np.zeros(9, np.float32), [(0, 1)], Finish.STOP)
    groups = []
    for i in range(8):
        shown = Media.of({**shown.tensors, "pixel_values": shown.tensors["pixel_values"] + 1})
        groups.append(Group(Prompt(0, i, "", np.zeros(120, np.int32), "42", media=shown), [sample] * 4))
    request = sum(map(len, encode("r000000-000", groups, {"version": 1})))
    said = estimate(made, shape_of(made.model, Path())[0], Asked(prompt_tokens=120)).traffic
    assert said.spool_bytes == pytest.approx(2 * request, rel=0.01) and said.media_bytes / said.spool_bytes > 0.99
    needs = [room.need(recipe) for recipe in (made, text)]
    assert needs[0] and needs[1]
    assert needs[0].shards - needs[1].shards == made.run.steps * 16 * 256 * 6144 * 4, "prompts as long as the context"


@pytest.mark.parametrize(("extra", "oversample", "staleness"), [(0, 1.0, 1), (3, 1.0, 0), (0, 1.5, 2), (2, 1.25, 1)])
def test_dynamic_sampling_is_budgeted_for_as_far_as_the_planner_goes(
    extra: int, oversample: float, staleness: int
) -> None:
    made = tiny.recipe(
        algorithm={"group_size": 4, "dynamic_sampling": {"max_extra_batches": extra, "oversample": oversample}},
        trainer={"prompts_per_step": 16}, rollout={"groups_per_request": 4}, **{"async": {"max_staleness": staleness}},
    )  # fmt: skip
    n = made.requests_per_step
    planner = RequestPlanner(n, 4, 4, staleness, "wait", 0, Prompts(), staleness, 100, 16, extra * n, oversample)
    planner.release(upto=planner.last_batch(0))
    released = n
    while new := planner.extend(0, dict.fromkeys(planner.outstanding, 0)):
        released += len(new)
    assert made.most_requests_per_step == released
    moved = estimate(made, shape_of(made.model, Path())[0], Asked()).traffic
    assert (moved.samples, moved.most_samples) == (64, released * 16)
    assert moved.most_spool_bytes / moved.spool_bytes == released / n
    assert moved.run_spool_bytes == moved.most_spool_bytes * made.run.steps
    wanted = room.need(made)
    assert wanted is not None and wanted.shards == released * 16 * made.run.steps * 64 * room.TOKEN_BYTES


def test_what_nothing_generates_needs_neither_engine_nor_shards(tmp_path: Path) -> None:
    made = tiny.recipe(algorithm={"name": "sft"}, trainer={"prompts_per_step": 30})
    said = estimate(made, shape_of(made.model, Path())[0], Asked(prompt_tokens=14))
    assert [group.role for group in said.groups] == ["trainer"] and said.engine is None
    assert (said.traffic.spool_bytes, said.traffic.trained_tokens) == (0, 30 * 50)
    assert json.loads(json.dumps(said.to_json()))["engine"] is None
    wanted = room.need(made)
    assert wanted is not None and (wanted.shards, wanted.weights) == (0, 0)


def run(*words: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["plan", *map(str, words)])
    return done.exit_code, done.stdout, done.stderr


def test_what_scorers_hold_is_not_the_trainers_and_their_columns_take_room() -> None:
    inside: dict[str, Any] = {"algorithm": {"kl_coef": 0.1}}
    shape, _ = shape_of(tiny.recipe().model, Path())
    recipes = [tiny.recipe(**inside, **more) for more in ({}, {"scorer": {"scores": ["reference"]}})]
    both = [estimate(recipe, shape, Asked()) for recipe in recipes]
    held = parameters(shape).all * 4
    assert [made.trainer[0].frozen for made in both] == [held, 0]
    assert both[0].checkpoint_bytes - both[1].checkpoint_bytes == held
    tokens = both[0].traffic.samples * both[0].traffic.answer_tokens
    assert both[1].traffic.spool_bytes - both[0].traffic.spool_bytes >= 4 * tokens
    assert any("1 scorer processes hold 0.1 MiB of weights each" in said for said in both[1].assumed)


def test_what_a_critic_of_its_own_holds_is_not_the_trainers() -> None:
    shape, _ = shape_of(tiny.recipe().model, Path())
    recipes = [tiny.recipe(algorithm={"name": "ppo"}, **more) for more in ({}, {"critic": {}})]
    both = [estimate(recipe, shape, Asked()) for recipe in recipes]
    learning = parameters(shape, critic=True).all * 4
    assert both[0].checkpoint_bytes - both[1].checkpoint_bytes == 3 * learning
    assert both[0].trainer[0].optimizer - both[1].trainer[0].optimizer == 2 * learning
    words = f"1 critic processes hold {gib(4 * learning)} of weights, gradients and moments"
    assert any(words in said for said in both[1].assumed)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda p: p.name)
def test_every_shipped_recipe_fits(path: Path) -> None:
    code, out, _ = run(path, "--json")
    about = json.loads(out)
    assert (code, about["problems"]) == (0, [])
    for group in about["groups"]:
        assert group["given"] in (0, group["devices"]), "GPUs that nobody uses, or too few"


def test_what_does_not_fit_is_said_with_what_would() -> None:
    path = RECIPES / "qwen3-30b-a3b-grpo-r3.toml"
    code, out, _ = run(path, "--device-memory", 40)
    assert code == 1 and "does not fit: a trainer process of stage 0 needs" in out and "a device has 40.0 GiB" in out
    remedies = re.findall(r"would fit: (.*)", out)
    assert len(remedies) == 3
    for remedy in remedies:
        assert "a trainer process of stage" not in run(path, "--device-memory", 40, *shlex.split(remedy))[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("rollout.sglang.tensor_parallel=8", "4 workers of 8 GPUs each"),
        ("rollout.sglang.mem_fraction=0.1", "room for 0 tokens, one sequence may have 8448"),
    ],
)
def test_engines_that_do_not_fit(change: str, said: str) -> None:
    code, out, _ = run(RECIPES / "qwen3-30b-a3b-grpo-r3.toml", "--set", change)
    assert code == 1 and said in out


def test_a_model_that_is_elsewhere_needs_its_config(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('[model]\npath = "/nowhere/Mine-7B"\n[[source]]\ntask = "chain_sum"\n')
    code, _, said = run(recipe)
    assert code == 2 and "/nowhere/Mine-7B" in said and "--config FILE" in said
    config = RECIPES / "models" / "Qwen3-4B" / "config.json"
    assert "4.02 B" in run(recipe, "--config", config, "--set", "rollout.max_new_tokens=64")[1]
    (tmp_path / "models" / "Mine-7B").mkdir(parents=True)
    (tmp_path / "models" / "Mine-7B" / "config.json").write_text('{"model_type": "mamba"}')
    assert "model_type 'mamba'" in run(recipe)[2]


def test_a_split_that_does_not_divide_the_model_is_refused() -> None:
    code, _, said = run(
        RECIPES / "qwen3-4b-grpo.toml",
        "--set",
        "trainer.parallel.pipeline=8",
        "--set",
        "trainer.parallel.tensor=1",
        "--set",
        "trainer.parallel.sequence=false",
    )
    assert code == 2 and "pipeline x virtual_pipeline = 8 must divide the model's 36 layers" in said


def test_lengths_beyond_the_context_are_refused() -> None:
    made = Recipe.model_validate(
        {"model": {"name": "tiny"}, "source": [{"task": "chain_sum"}], "rollout": {"max_new_tokens": 64}}
    )
    with pytest.raises(RunError, match="context of 512"):
        estimate(made, shape_of(made.model, Path())[0], Asked(prompt_tokens=500))


def test_it_imports_no_torch() -> None:
    code = (
        f"import sys; sys.argv = ['relax-hpc', 'plan', {str(RECIPES / 'qwen3-4b-grpo.toml')!r}]\nfrom relax_hpc.cli import app\n"
        "try: app()\nexcept SystemExit as e: assert not e.code\n"
        "assert not {'torch', 'transformers', 'h5py', 'pandas'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_rows_that_are_left_out_are_counted_and_told(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{i}+1=", "answer": {i or "null"}}}\n' for i in range(5)))
    recipe = (
        SMALL[: SMALL.index("[[source]]")].format(root=tmp_path)
        + f'[[source]]\nprompts = "{tmp_path}/p.jsonl"\nmissing_answer = "drop"\n'
    )
    (tmp_path / "recipe.toml").write_text(recipe)
    told = CliRunner().invoke(app, ["plan", str(tmp_path / "recipe.toml")])
    assert told.exit_code == 0 and "source.0: of 5 rows 1 left out without an answer" in told.stdout
    gone = ["plan", str(tmp_path / "recipe.toml"), "--json", "--set", f"source.0.prompts={tmp_path}/elsewhere.jsonl"]
    said = json.loads(CliRunner().invoke(app, gone).stdout)
    assert said["rows"] == {} and "there is no such file" in said["rows_not_counted"]
