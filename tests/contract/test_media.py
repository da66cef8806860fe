"""The torch engine and the trainers see media as transformers' own forward does, one sequence at a time.

What every engine promises of media stands in test_media_engines.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from relax_hpc.algorithms import make_algorithm
from relax_hpc.engines import Completion, Sampling
from relax_hpc.engines.torch import TorchEngine
from relax_hpc.files.errors import Damaged, RunError
from relax_hpc.media.families import family_of
from relax_hpc.records import Finish, Media, Rollouts
from relax_hpc.trainers import fit, make_critic, make_scoring, make_trainer
from relax_hpc.trainers.forward import Head, predicting_states
from relax_hpc.trainers.packing import Rows, pack, plan
from relax_hpc.trainers.torch import load_model, tensors_of
from relax_hpc.trainers.work import position_costs
from tests import omni, tiny
from tests.omni import Shown

EACH = 3
"""Samples of each prompt."""
CPU = torch.device("cpu")
SAMPLING = Sampling(max_new_tokens=8)
PARTS = {"freeze": ["vision"], "learning_rates": {"projector": 1e-4}}


@dataclass(frozen=True)
class Setup:
    """A model of one kind in a folder, as transformers and the engine hold it, with prompts of every mixture."""

    kind: str
    folder: Path
    model: Any
    engine: TorchEngine
    prompts: list[Shown]

    @property
    def backends(self) -> tuple[str, ...]:
        """Those that train it."""
        return ("torch",) if self.kind == "gemma4_unified" else ("torch", "megatron")

    def generate(self, each: int = EACH, **how: Any) -> list[Completion]:
        prompts, media = [p.tokens for p in self.prompts], [p.media for p in self.prompts]
        return self.engine.generate(prompts, each, SAMPLING, 3, media=media, **how)

    def expected(self, sample: int, answer: NDArray[np.int32], each: int = EACH) -> NDArray[np.float32]:
        """Logprobs of an answer as transformers computes them."""
        logits = omni.plain_logits(self.model, self.prompts[sample // each], answer).detach().log_softmax(-1)
        found: NDArray[np.float32] = logits.numpy()[np.arange(len(answer)), answer]
        return found


@pytest.fixture(scope="module", params=omni.KINDS)
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    torch.set_num_threads(1)
    folder = omni.folder(request.param, tmp_path_factory.mktemp(request.param))
    model, engine = load_model(folder, CPU), TorchEngine(omni.recipe(folder), folder)
    engine.load(0, {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}.items())
    yield Setup(request.param, folder, model, engine, omni.prompts(request.param))


def rollouts_of(prompts: list[Shown], answers: list[NDArray[np.int32]], each: int = EACH) -> Rollouts:
    """Samples of every prompt, prompt-major; those of a prompt share its media."""
    made = tiny.rollouts([p.tokens for p in prompts for _ in range(each)], answers, each, masked=0.2)
    made.loss_mask[made.offsets[:-1]] = 1
    return replace(made, media=tuple(p.media for p in prompts for _ in range(each)))


def answers_to(prompts: list[Shown], each: int = EACH) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, 60, rng.integers(1, 9)).astype(np.int32) for _ in range(each * len(prompts))]


def test_equal_tokens_with_other_media_are_other_prompts_and_equal_media_are_encoded_once(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = setup.prompts[0], setup.prompts[-1]
    assert first.tokens.tolist() == other.tokens.tolist()
    name, rows = omni.EYES.get(setup.kind, ("model.visual", 16))
    visual = setup.engine.model.get_submodule(name)
    patches: list[int] = []
    hook = visual.register_forward_pre_hook(lambda module, given: patches.append(len(given[0])))
    shown = [first, other, first, first]
    done = setup.engine.generate([s.tokens for s in shown], 2, Sampling(0.0), 0, media=[s.media for s in shown])
    hook.remove()
    assert sum(patches) == 2 * rows
    logprobs = [c.logprobs.tolist() for c in done]
    assert logprobs[0] == logprobs[1] == logprobs[4] == logprobs[6] != logprobs[2]


@pytest.mark.parametrize(("token", "finish"), [(omni.IMAGE, Finish.STOP), (omni.VISION, Finish.LENGTH)])
def test_a_placeholder_that_is_drawn_ends_its_answer(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, token: int, finish: Finish
) -> None:
    """A token that begins an image, where none follows, is one like others, also where an answer goes on behind it."""
    drawn = lambda logits, *how: (torch.full(logits.shape[:1], token), torch.zeros(len(logits)))
    with monkeypatch.context() as patched:
        patched.setattr("relax_hpc.engines.torch.draw", drawn)
        done = setup.generate(each=1)
    assert {c.finish for c in done} == {finish}
    assert {tuple(c.tokens.tolist()) for c in done} == {(token,) * (1 if finish is Finish.STOP else 8)}
    if finish is Finish.LENGTH:
        begun = [c.tokens[:4] for c in done]
        rest = setup.generate(each=1, begun=begun)
        for i, (before, after) in enumerate(zip(begun, rest, strict=True)):
            found = setup.expected(i, np.concatenate([before, after.tokens]), each=1)[4:]
            np.testing.assert_allclose(after.logprobs, found, atol=1e-5)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
    model.zero_grad()
    return found


def logprobs_in(model: Any, made: Rollouts, rows: Rows) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """Logprobs of a micro-batch's targets, in the model's own precision."""
    batch = pack(made, rows, family=family_of(model.config), config=model.config)
    hidden = predicting_states(model.base_model, batch, CPU)
    distribution = Head.of(model).logits(hidden).log_softmax(-1)
    return distribution[torch.arange(len(batch.targets)), made.tokens[batch.targets]], batch.targets


def test_gradients_of_packed_rows_are_those_of_one_sequence_after_the_other(setup: Setup) -> None:
    """In float64, the encoders' gradients included; whether a prompt is shared by its answers, or comes with each."""
    model = load_model(setup.folder, CPU).double()
    model.set_experts_implementation("eager")  # the others know no float64
    with omni.InFloat64():
        compare_gradients(setup, model)


def compare_gradients(setup: Setup, model: Any) -> None:
    made = rollouts_of(setup.prompts, answers_to(setup.prompts))
    weight = torch.from_numpy(np.random.default_rng(1).normal(size=len(made.tokens)))
    mask = torch.from_numpy(made.loss_mask).double()
    for i in range(len(made)):
        where = slice(made.offsets[i], made.offsets[i + 1])
        answer = made.tokens[where]
        distribution = omni.plain_logits(model, setup.prompts[i // EACH], answer).log_softmax(-1)
        (distribution[torch.arange(len(answer)), answer] * weight[where] * mask[where]).sum().backward()
    expected = gradients(model)
    encoders = [n for n in expected if family_of(model.config).part(n) != "language"]
    assert len(encoders) >= (10 if setup.kind == "gemma4_unified" else 20)
    assert all(expected[n].abs().max() > 0 for n in encoders)
    alone = [[[[(i,)]] for i in range(len(made))]]
    for name, shares in {
        "packed": plan(made, 1, 16384), "several": plan(made, 1, 60), "alone": alone,
        "ranks": plan(made, 2, 16384, family_of(model.config), position_costs(model)),
    }.items():  # fmt: skip
        assert name == "alone" or any(len(tree) > 1 for rows in shares[0] for row in rows for tree in row)
        for rows in (rows for share in shares for rows in share):
            logprobs, targets = logprobs_in(model, made, rows)
            (logprobs * weight[targets]).sum().backward()
        for parameter, found in gradients(model).items():
            np.testing.assert_allclose(found, expected[parameter], atol=1e-9, rtol=1e-9, err_msg=f"{name} {parameter}")


def test_frozen_parts_stay_and_parts_have_learning_rates_of_their_own(setup: Setup) -> None:
    frozen, slow = ("vision", "projector")
    recipe = omni.recipe(
        setup.folder,
        trainer={"freeze": [frozen], "learning_rates": {slow: 1e-5}, "learning_rate": 1e-2},
        algorithm={"name": "grpo", "group_size": EACH},
    )
    trainer = make_trainer(recipe, setup.folder, 0, 1)
    own = dict(trainer.model.named_parameters())  # type: ignore[attr-defined]
    before = {name: parameter.detach().clone() for name, parameter in own.items()}
    trainer.step(rollouts_of(setup.prompts, answers_to(setup.prompts)), make_algorithm(recipe.algorithm), 0)
    part_of = family_of(setup.model.config).part
    moved: dict[str, float] = {}
    for name, after in own.items():
        part = part_of(name)
        moved[part] = max(moved.get(part, 0.0), float((after.detach() - before[name]).abs().max()))
    assert moved[frozen] == 0
    assert moved[slow] == pytest.approx(1e-5, rel=0.01)
    assert moved["language"] == pytest.approx(1e-2, rel=0.01)
    assert not any(part_of(name) == frozen for name in trainer.learning["policy"].parameters)  # type: ignore[attr-defined]


def test_text_teaches_nothing_where_the_language_model_is_frozen(setup: Setup) -> None:
    text = [prompt for prompt in setup.prompts if prompt.media is None]
    for backend in setup.backends:
        recipe = omni.recipe(
            setup.folder,
            trainer={"backend": backend, "freeze": ["language"]},
            algorithm={"name": "grpo", "group_size": EACH},
        )
        trainer, made = make_trainer(recipe, setup.folder, 0, 1), rollouts_of(text, answers_to(text))
        before = dict(trainer.export())
        said = trainer.step(made, make_algorithm(recipe.algorithm), 0)
        assert said["grad_norm"] == said["skipped"] == 0 < said["tokens"]
        assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.export())


def test_megatron_makes_the_steps_of_the_torch_trainer(setup: Setup) -> None:
    """With frozen and slow parts, and with every activation computed again; scorers take its weights by the same names."""
    if "megatron" not in setup.backends:
        with pytest.raises(RunError, match="'gemma4_unified_text': .* are known; use the torch backend"):
            fit.check(omni.recipe(setup.folder, trainer={"backend": "megatron"}), setup.folder)
        return
    made = rollouts_of(setup.prompts, answers_to(setup.prompts))
    steps: list[tuple[list[dict[str, float]], dict[str, torch.Tensor]]] = []
    for backend, parallel in (("torch", {}), ("megatron", {}), ("megatron", {"recompute": "full"})):
        recipe = omni.recipe(
            setup.folder,
            trainer={"backend": backend, "parallel": parallel, "tokens_per_micro_batch": 60, "weight_decay": 0.1, **PARTS},
            algorithm={"name": "grpo", "group_size": EACH, "kl_coef": 0.2},
        )  # fmt: skip
        trainer, algorithm = make_trainer(recipe, setup.folder, 0, 1), make_algorithm(recipe.algorithm)
        steps.append(([trainer.step(made, algorithm, step) for step in range(2)], dict(trainer.export())))
    (expected, weights), *others = steps
    for said, exported in others:
        for mine, one in zip(said, expected, strict=True):
            most = {"importance_max"}  # the exponential of the one greatest difference, after a step of AdamW
            assert {k: v for k, v in mine.items() if k not in most} == pytest.approx(
                {k: v for k, v in one.items() if k not in most}, rel=1e-5, abs=1e-5
            )
            assert all(mine[key] == pytest.approx(one[key], rel=1e-3) for key in most & one.keys())
        assert exported.keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(exported[name], tensor, rtol=0, atol=1e-4, msg=name)
    logprobs = []
    for backend in ("torch", "megatron"):
        recipe = omni.recipe(
            setup.folder, trainer={"backend": backend}, algorithm={"kl_coef": 0.1}, scorer={"scores": ["reference"]}
        )
        scoring = make_scoring(recipe, setup.folder, 0, 1)
        scoring.load("recomputed", weights, setup.folder)
        logprobs.append(scoring.logprobs("recomputed", made))
    np.testing.assert_allclose(logprobs[1], logprobs[0], atol=1e-5)


def test_changed_media_are_refused_before_they_are_encoded(setup: Setup) -> None:
    media = setup.prompts[0].media
    assert media is not None
    pixels = media.tensors["pixel_values"].copy()
    pixels.view(np.uint8).reshape(-1)[77] ^= 1
    shown = Shown(setup.prompts[0].tokens, Media({**media.tensors, "pixel_values": pixels}, media.digest))
    made = rollouts_of([shown], answers_to([shown]))
    for backend in setup.backends:
        recipe = omni.recipe(setup.folder, trainer={"backend": backend}, algorithm={"name": "grpo", "group_size": EACH})
        with pytest.raises(Damaged, match="the trainer's encoders: a prompt's media"):
            make_trainer(recipe, setup.folder, 0, 1).step(made, make_algorithm(recipe.algorithm), 0)
    with pytest.raises(Damaged, match="the engine's encoders: a prompt's media"):
        setup.engine.generate([shown.tokens], 1, SAMPLING, 0, media=[shown.media])


def test_a_checkpoint_is_a_model_that_transformers_loads(setup: Setup, tmp_path: Path) -> None:
    recipe = omni.recipe(setup.folder, algorithm={"name": "grpo", "group_size": EACH})
    trainer = make_trainer(recipe, setup.folder, 0, 1)
    trainer.step(rollouts_of(setup.prompts, answers_to(setup.prompts)), make_algorithm(recipe.algorithm), 0)
    trainer.save(tmp_path)
    (tmp_path / "config.json").write_bytes((setup.folder / "config.json").read_bytes())
    loaded = load_model(tmp_path, CPU)
    assert all(torch.equal(tensor, dict(trainer.export())[name]) for name, tensor in tensors_of(loaded).items())
    files = load_file(setup.folder / "model.safetensors")
    prefix = family_of(setup.model.config).prefix
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        expected = files.pop(name.removeprefix(prefix)).shape
        if setup.kind == "qwen3_vl_moe" and ".experts." in name:  # as the files of the real ones have them
            expected = torch.Size([expected[0], expected[2], expected[1]])
        assert tensor.shape == expected, name
    assert not files


def test_a_critic_sees_media_too(setup: Setup) -> None:
    recipe = omni.recipe(setup.folder, algorithm={"name": "ppo", "group_size": EACH}, critic={"processes": 1})
    critic = make_critic(recipe, setup.folder, 0, 1)
    made = rollouts_of(setup.prompts, answers_to(setup.prompts))
    made = replace(made, columns={"values": critic.values(made)})
    assert not made.columns["values"].any(), "its head begins at zero"
    for step in range(2):
        critic.learn(made, make_algorithm(recipe.algorithm), step)  # type: ignore[arg-type]
    blank = replace(made, media=tuple(m and Media.of({**m.tensors, **_dark(m)}) for m in made.media))
    assert np.abs(critic.values(made) - critic.values(blank)).max() > 1e-4


def test_a_policy_in_bfloat16_learns_with_a_critic_beside_it(setup: Setup) -> None:
    recipe = omni.recipe(setup.folder, trainer={"dtype": "bfloat16"}, algorithm={"name": "ppo", "group_size": EACH})
    trainer, engine = make_trainer(recipe, setup.folder, 0, 1), TorchEngine(recipe, setup.folder)
    trainer.begin_training()
    engine.load(0, trainer.export())
    done = replace(setup, engine=engine).generate()
    made = rollouts_of(setup.prompts, [c.tokens for c in done])
    made = replace(made, logprobs=np.concatenate([c.logprobs for c in done]))
    first, second = (trainer.step(made, make_algorithm(recipe.algorithm), step) for step in range(2))
    assert first["logprob_diff"] < 0.05
    assert second["value_loss"] < first["value_loss"] and second["kl"] > 0 == first["skipped"]


def _dark(media: Media) -> dict[str, NDArray[Any]]:
    return {n: np.zeros_like(a) for n, a in media.tensors.items() if n.startswith("pixel") or n == "input_features"}
