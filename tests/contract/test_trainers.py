"""What every trainer promises; the oracle trains on one unpacked sequence at a time with torch's own optimizer."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from relax_hpc.algorithms import ActorCritic, LossInputs, make_algorithm
from relax_hpc.engines import Sampling, make_engine
from relax_hpc.files import folder_checksums
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.algorithm import Sft
from relax_hpc.recipe.tables.model import PathModel
from relax_hpc.recipe.tables.trainer import ADAM_EPS
from relax_hpc.records import Rollouts
from relax_hpc.trainers import BACKENDS, Trainer, make_critic, make_trainer
from relax_hpc.trainers.build import materialise
from relax_hpc.trainers.forward import token_logprobs
from relax_hpc.trainers.optim import learning_rate
from relax_hpc.trainers.token_loss import as_rollouts
from tests import tiny


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    torch.set_num_threads(1)
    return str(request.param)


def trainer_of(recipe: Recipe, folder: Path) -> Trainer:
    if not (folder / "config.json").exists():
        tiny.folder(recipe, folder)
    return make_trainer(recipe, folder, 0, 1)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return dict(trainer.export())


def identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def resident(trainer: Trainer) -> int:
    """Bytes on the device of all that `rest` takes away; weights that are mapped from their file are no memory of ours."""
    models, optimizers = trainer._held()  # type: ignore[attr-defined]
    held = [t for model in models for p in model.parameters() for t in (p, p.grad, getattr(p, "main_grad", None))]
    held += [s for optimizer in optimizers for state in optimizer.state.values() for s in state.values()]
    storages = [tensor.untyped_storage() for tensor in held if isinstance(tensor, Tensor)]
    return sum(storage.nbytes() for storage in storages if storage.resizable())


def pickles(folder: Path) -> list[str]:
    """Files that could run code when they are read: all but tensors, and what reads as data alone."""
    from relax_hpc.trainers.megatron.checkpoint import index

    data = {".safetensors", ".json"}
    if (folder / ".metadata").exists():
        index.read(folder)
        torch.load(folder / "common.pt", weights_only=True)
        data |= {".distcp", ".pt", ""}
        for name in folder.glob("*.distcp"):
            assert b"_extra_state" not in name.read_bytes()
    return [f.name for f in folder.iterdir() if f.suffix not in data]


def sequences(rollouts: Rollouts) -> list[tuple[Tensor, Tensor, slice]]:
    """(prompt, answer, where the answer is in the flat arrays) of every sample."""
    return [
        (
            torch.tensor(rollouts.prompt_tokens[rollouts.prompt_offsets[i] : rollouts.prompt_offsets[i + 1]]).long(),
            torch.tensor(rollouts.tokens[rollouts.offsets[i] : rollouts.offsets[i + 1]]).long(),
            slice(rollouts.offsets[i], rollouts.offsets[i + 1]),
        )
        for i in range(len(rollouts))
    ]


def oracle_steps(
    recipe: Recipe, model: Any, frozen: Any, batches: list[Rollouts], kl_coef: float, entropy_coef: float
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """GRPO written out sample by sample; what does not want gradients does not learn."""
    config, learning = recipe.trainer, [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=config.learning_rate, betas=config.betas, eps=ADAM_EPS, weight_decay=0.0)
    said = []
    for rollouts in batches:
        optimizer.zero_grad()
        total, loss = int(rollouts.loss_mask.sum()), torch.zeros(())
        for i, (prompt, answer, where) in enumerate(sequences(rollouts)):
            rewards = torch.tensor(rollouts.rewards[rollouts.group == rollouts.group[i]])
            advantage = (rollouts.rewards[i] - rewards.mean()) / (rewards.std() + 1e-6)
            inputs = torch.cat([prompt, answer])[None]
            now, then = (
                (m(inputs, use_cache=False).logits[0, len(prompt) - 1 : -1] / recipe.rollout.temperature).log_softmax(
                    -1
                )
                for m in (model, frozen)
            )
            entropy = -(now.exp() * now).sum(-1)
            now, then = now[torch.arange(len(answer)), answer], then[torch.arange(len(answer)), answer].detach()
            ratio = (now - torch.tensor(rollouts.logprobs[where])).exp()
            surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            penalty = (then - now).exp() - (then - now) - 1
            terms = -surrogate + kl_coef * penalty - entropy_coef * entropy
            loss = loss + (terms * torch.tensor(rollouts.loss_mask[where])).sum() / total
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(learning, config.clip_grad_norm)
        optimizer.step()
        said.append({"loss": loss.item(), "grad_norm": norm.item(), "tokens": total})
    return said, dict(model.named_parameters())


@pytest.mark.quick
@pytest.mark.parametrize(("kl_coef", "entropy_coef"), [(0.0, 0.0), (0.5, 0.3)])
@pytest.mark.parametrize("budget", [10000, 64, 9])
def test_steps_are_those_of_the_plain_formula(
    backend: str, tmp_path: Path, kl_coef: float, entropy_coef: float, budget: int
) -> None:
    """Whatever the micro-batches: packed into one, several, or one sample each."""
    recipe = tiny.recipe(
        trainer={"backend": backend, "tokens_per_micro_batch": budget, "clip_grad_norm": 0.5},
        algorithm={"kl_coef": kl_coef, "entropy_coef": entropy_coef, "dual_clip": 0},
        rollout={"temperature": 0.8},
    )
    trainer, algorithm = trainer_of(recipe, tmp_path), make_algorithm(recipe.algorithm)
    batches = [tiny.random_rollouts(12, seed=s) for s in range(3)]
    policy, frozen = (AutoModelForCausalLM.from_pretrained(tmp_path).eval() for _ in range(2))
    expected, final = oracle_steps(recipe, policy, frozen, batches, kl_coef, entropy_coef)
    for step, (rollouts, said) in enumerate(zip(batches, expected, strict=True)):
        metrics = trainer.step(rollouts, algorithm, step)
        for name, value in said.items():
            assert metrics[name] == pytest.approx(value, rel=2e-4, abs=1e-6), (step, name)
    for name, tensor in weights(trainer).items():
        torch.testing.assert_close(
            tensor, final[name], rtol=0, atol=2e-4
        )  # AdamW's first steps magnify: they are lr · sign


PPO: dict[str, Any] = {
    "name": "ppo",
    "discount": 0.9,
    "gae_lambda": 0.8,
    "value_lambda": 0.95,
    "critic": {"learning_rate": 3e-3, "clip": 0.3, "warmup_steps": 1},
}


def critic_oracle(recipe: Recipe, folder: Path, batches: list[Rollouts]) -> tuple[list[dict[str, float]], list[Tensor]]:
    """PPO's critic written out sample by sample: metrics of each step, and the advantages that it was trained with."""
    body, head = AutoModelForCausalLM.from_pretrained(folder).eval().model, torch.nn.Linear(32, 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    own, config = [*body.parameters(), *head.parameters()], recipe.trainer
    optimizer = torch.optim.AdamW(own, lr=PPO["critic"]["learning_rate"], betas=config.betas, weight_decay=0.0)
    said, advantages = [], []
    for rollouts in batches:
        found, old, returns, loss = torch.zeros(len(rollouts.tokens)), [], [], torch.zeros(())
        values = []
        for i, (prompt, answer, where) in enumerate(sequences(rollouts)):
            mask = torch.tensor(rollouts.loss_mask[where] == 1)
            hidden = body(torch.cat([prompt, answer])[None], use_cache=False).last_hidden_state
            mine = head(hidden[0, len(prompt) - 1 : -1])[mask, 0]
            values += [mine]
            seen, n = mine.detach().double(), len(mine)
            rewards = torch.zeros(n).double()
            rewards[-1:] = float(rollouts.rewards[i])
            for smoothing in (PPO["gae_lambda"], PPO["value_lambda"]):
                gae, later = torch.zeros(n).double(), 0.0
                for t in reversed(range(n)):
                    after = seen[t + 1] if t + 1 < n else 0.0
                    later = rewards[t] + 0.9 * after - seen[t] + 0.9 * smoothing * later
                    gae[t] = later
                if smoothing == PPO["gae_lambda"]:
                    found[torch.arange(where.start, where.stop)[mask]] = gae.float()
            returns += [gae + seen]
            old += [seen]
        now, before, wanted = (torch.cat(parts) for parts in (values, old, returns))
        held = before + (now - before).clamp(-0.3, 0.3)
        loss = torch.maximum((now - wanted) ** 2, (held - wanted) ** 2).mean() / 2
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(own, config.clip_grad_norm)
        optimizer.step()
        explained = 1 - (wanted - before).var(correction=0) / wanted.var(correction=0)
        said.append(
            {"value_loss": loss.item(), "critic_grad_norm": norm.item(), "explained_variance": explained.item(),
             "value_mean": now.mean().item(), "return_mean": wanted.mean().item()}
        )  # fmt: skip
        chosen = torch.tensor(rollouts.loss_mask == 1)
        whole = found[chosen]
        found[chosen] = (whole - whole.mean()) / (whole.std(correction=0) + 1e-6)
        advantages.append(found)
    return said, advantages


@pytest.mark.parametrize("budget", [10000, 30])
def test_a_critic_learns_by_the_plain_formula_and_alone_at_first(backend: str, tmp_path: Path, budget: int) -> None:
    recipe = tiny.recipe(
        trainer={"backend": backend, "tokens_per_micro_batch": budget, "clip_grad_norm": 0.5},
        algorithm=PPO,
        rollout={"temperature": 0.8},
    )
    trainer, algorithm = trainer_of(recipe, tmp_path), make_algorithm(recipe.algorithm)
    trainer.begin_training()
    batches = [tiny.random_rollouts(9, group_size=1, seed=s, masked=0.3) for s in range(4)]
    expected, advantages = critic_oracle(recipe, tmp_path, batches)
    given: list[Tensor] = []
    ours = algorithm.advantages
    algorithm.advantages = lambda rollouts: given.append(ours(rollouts)) or given[-1]  # type: ignore[method-assign,func-returns-value]
    before = weights(trainer)
    for step, (rollouts, said) in enumerate(zip(batches, expected, strict=True)):
        metrics = trainer.step(rollouts, algorithm, step)
        for name, value in said.items():
            assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), (step, name)
        assert metrics["tokens"] == rollouts.loss_mask.sum() and metrics["critic_learning_rate"] == 3e-3
        if step == 0:
            assert identical(before, weights(trainer)) and metrics["learning_rate"] == 0
            continue
        assert metrics["learning_rate"] == recipe.trainer.learning_rate and metrics["grad_norm"] > 0
        torch.testing.assert_close(given[-1], advantages[step], rtol=2e-3, atol=2e-3)
    assert not identical(before, weights(trainer)) and len(given) == 3


def test_a_critic_in_processes_of_its_own_says_and_learns_what_the_trainers_does(backend: str, tmp_path: Path) -> None:
    about: dict[str, Any] = {"trainer": {"backend": backend, "updates_per_step": 2}, "algorithm": PPO}
    inside, apart = tiny.recipe(**about), tiny.recipe(**about, critic={})
    algorithm, batches = make_algorithm(inside.algorithm), [tiny.random_rollouts(8, seed=s) for s in range(3)]
    assert isinstance(algorithm, ActorCritic)
    both, policy = (trainer_of(recipe, tmp_path) for recipe in (inside, apart))
    critic = make_critic(apart, tmp_path, 0, 1)
    for trainer in (both, policy):
        trainer.begin_training()
    for step, rollouts in enumerate(batches):
        values = critic.values(rollouts)
        assert values.shape == rollouts.tokens.shape and not values[rollouts.loss_mask == 0].any()
        assert (step == 0) != bool(values.any()), "its head begins at zero"
        given = dataclasses.replace(rollouts, columns={"values": values})
        learned, trained = critic.learn(given, algorithm, step), policy.step(given, algorithm, step)
        expected = both.step(rollouts, algorithm, step)
        assert {"value_loss", "explained_variance"} <= set(learned) and not {"value_loss"} & set(trained)
        assert learned["tokens"] == expected["tokens"] and "critic_learning_rate" in learned
        for name, value in (trained | learned).items():
            if name not in ("learning_rate", "skipped"):
                assert expected[name] == pytest.approx(value, rel=1e-5, abs=1e-7), (step, name)
    assert identical(weights(both), weights(policy)), "warm-up and updates with values of its own"
    (tmp_path / "saved").mkdir()
    critic.save(tmp_path / "saved")
    again = make_critic(apart, tmp_path, 0, 1)
    again.load(tmp_path / "saved")
    given = dataclasses.replace(batches[0], columns={"values": critic.values(batches[0])})
    assert np.array_equal(again.values(batches[0]), given.columns["values"])
    assert again.learn(given, algorithm, 3) == critic.learn(given, algorithm, 3)
    assert np.array_equal(again.values(batches[1]), critic.values(batches[1])), "its optimizer came back as well"


def test_a_critic_begins_with_the_policys_weights_of_after_the_warm_up_or_with_its_own_models(
    backend: str, tmp_path: Path
) -> None:
    """Seen by what it is after one step, from which a difference in the body does not vanish."""
    tiny.folder(tiny.recipe(), tmp_path / "other", seed=5)
    own, other = (
        tiny.recipe(
            trainer={"backend": backend}, algorithm={"name": "ppo", "critic": {"learning_rate": 1e-3, **critic}}
        )
        for critic in ({}, {"model": tmp_path / "other"})
    )
    rollouts, algorithm, found = tiny.random_rollouts(8), make_algorithm(own.algorithm), []
    for recipe in (own, other):
        for warm in (False, True):
            trainer = trainer_of(recipe, tmp_path / "model")
            if warm:
                trainer.supervised_step(tiny.prompts([3, 4]), tiny.prompts([3, 4]), 1e-2)
            trainer.begin_training()
            found.append(trainer.step(rollouts, algorithm, 0)["critic_grad_norm"])
    assert found[0] != found[1] and found[2] == found[3] not in found[:2]
    strange = tiny.recipe(model={"alphabet": "0123456789"})
    tiny.folder(strange, tmp_path / "strange")
    wrong = tiny.recipe(
        trainer={"backend": backend}, algorithm={"name": "ppo", "critic": {"model": tmp_path / "strange"}}
    )
    with pytest.raises(RunError, match=r"algorithm\.critic\.model = '.*strange' has another vocabulary \(13 tokens\)"):
        trainer_of(wrong, tmp_path / "model")
    with pytest.raises(RunError, match="needs a critic"):
        trainer_of(tiny.recipe(trainer={"backend": backend}), tmp_path / "model").step(rollouts, algorithm, 0)


def test_updates_of_a_step_train_on_groups_in_turn_and_recompute_before_the_first(backend: str, tmp_path: Path) -> None:
    """Two updates are two steps on their groups; the ratio of the second is to the policy of before the first."""
    table = {"name": "grpo", "old_logprobs": "recomputed", "clip": [0.9, 9.0]}
    several, one = (
        tiny.recipe(trainer={"backend": backend, "updates_per_step": n, "schedule": "constant"}, algorithm=table)
        for n in (2, 1)
    )
    rollouts, algorithm = tiny.random_rollouts(12, masked=0.3), make_algorithm(several.algorithm)
    trainer, by_hand = trainer_of(several, tmp_path), trainer_of(one, tmp_path)
    before: dict[int, float] = {}

    class Recorded:
        """With one update a step: notes or replaces the recomputed logprobs."""

        needs: frozenset[str] = frozenset()
        advantages = staticmethod(algorithm.advantages)

        def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
            keys = [float(b) for b in inputs.old_logprobs]  # random: they tell tokens apart
            if len(before) < rollouts.loss_mask.sum():
                before.update(zip(keys, inputs.logprobs.tolist(), strict=True))
                return inputs.logprobs * 0, {}
            recomputed = torch.tensor([before[key] for key in keys])
            return algorithm.loss(dataclasses.replace(inputs, recomputed=recomputed))

    trainer_of(one, tmp_path).step(rollouts, Recorded(), 0)
    turn = np.repeat(rollouts.group % 2, np.diff(rollouts.offsets))
    said = [
        by_hand.step(dataclasses.replace(rollouts, loss_mask=rollouts.loss_mask * (turn == u)), Recorded(), 0)
        for u in range(2)
    ]
    together = trainer.step(rollouts, algorithm, 0)
    assert together["tokens"] == rollouts.loss_mask.sum()
    mean = sum(m["loss"] * m["tokens"] for m in said) / together["tokens"]
    assert together["loss"] == pytest.approx(mean, rel=1e-4, abs=1e-6)
    assert together["grad_norm"] == pytest.approx(
        sum(m["grad_norm"] * m["tokens"] for m in said) / together["tokens"], rel=1e-4
    )
    for name, tensor in weights(by_hand).items():
        torch.testing.assert_close(tensor, weights(trainer)[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputed_logprobs_are_those_of_the_updates_themselves_to_the_bit(
    backend: str, tmp_path: Path, dtype: str
) -> None:
    """While nothing moves (no weight is changed by a rate of 1e-30), no ratio is off 1 and no sample of GSPO is clipped."""
    recipe = tiny.recipe(
        trainer={"backend": backend, "updates_per_step": 4, "learning_rate": 1e-30, "dtype": dtype},
        algorithm={"name": "gspo", "old_logprobs": "recomputed", "clip": [0, 0]},
    )
    rollouts, algorithm = tiny.random_rollouts(64, masked=0.1), make_algorithm(recipe.algorithm)
    parted: list[float] = []

    class Watched:
        needs = algorithm.needs
        advantages = staticmethod(algorithm.advantages)

        def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
            assert inputs.recomputed is not None
            parted.append((inputs.logprobs.detach() - inputs.recomputed).abs().max().item())
            return algorithm.loss(inputs)

    said = trainer_of(recipe, tmp_path).step(rollouts, Watched(), 0)
    assert len(parted) >= 4 and max(parted) == 0
    assert said["clip_fraction"] == 0 and said["grad_norm"] > 0 and said["tokens"] == rollouts.loss_mask.sum()


@pytest.mark.parametrize(("temperature", "experts"), [(1.0, 0), (0.7, 0), (0.7, 4)])
def test_logprobs_agree_with_the_engine(backend: str, tmp_path: Path, temperature: float, experts: int) -> None:
    model = {"experts": experts, "moe_intermediate_size": 16}
    recipe = tiny.recipe(
        model=model, trainer={"backend": backend}, rollout={"temperature": temperature, "device": "cpu"}
    )
    trainer, engine = trainer_of(recipe, tmp_path), make_engine(recipe, tmp_path)
    engine.load(0, trainer.export())
    asked = tiny.prompts([2, 7, 12])
    done = engine.generate(asked, 4, Sampling(temperature=temperature, max_new_tokens=20), 0)
    rollouts = tiny.rollouts([p for p in asked for _ in range(4)], [c.tokens for c in done], 4)
    rollouts.logprobs[:] = np.concatenate([c.logprobs for c in done])
    differences: list[float] = []

    class Compare:
        needs: frozenset[str] = frozenset()

        def advantages(self, rollouts: Rollouts) -> Tensor:
            return torch.zeros(len(rollouts.tokens))

        def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
            differences.append(float((inputs.logprobs.detach() - inputs.old_logprobs).abs().max()))
            return inputs.logprobs * 0, {}

    metrics = trainer.step(rollouts, Compare(), 0)
    assert max(differences) < 1e-4
    assert metrics["kl"] < 1e-8 and metrics["tokens"] == len(rollouts.tokens)


def test_a_head_in_chunks_is_the_same_head(tmp_path: Path) -> None:
    from relax_hpc.trainers.packing import pack, plan

    recipe = tiny.recipe()
    model = AutoModelForCausalLM.from_pretrained(tiny.folder(recipe, tmp_path))
    rollouts = tiny.random_rollouts(8)
    [[rows]] = plan(rollouts, 1, 10000)
    batch = pack(rollouts, rows)
    targets = torch.from_numpy(rollouts.tokens[batch.targets]).long()
    found = []
    for logits_per_chunk in (2**24, 52 * 7, 1):
        model.zero_grad()
        logprobs, entropies = token_logprobs(model, batch, targets, 0.9, logits_per_chunk)
        logprobs.sum().backward()
        found.append((logprobs.detach(), entropies, model.model.embed_tokens.weight.grad.clone()))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_answers_behind_one_copy_of_their_prompt_have_the_logprobs_and_gradients_of_sequences_apart(
    tmp_path: Path,
) -> None:
    from relax_hpc.trainers.packing import pack, plan

    recipe = tiny.recipe()
    model = AutoModelForCausalLM.from_pretrained(tiny.folder(recipe, tmp_path))
    asked = [p for p in tiny.prompts([20, 12]) for _ in range(4)]
    shared = tiny.rollouts(asked, tiny.prompts([5, 1, 3, 2, 2, 4, 1, 1], seed=1), 4)
    apart = dataclasses.replace(shared, group=np.arange(8))
    found = []
    for rollouts, trees in ((shared, 2), (apart, 8)):
        [[rows]] = plan(rollouts, 1, 10000)
        assert sum(len(row) for row in rows) == trees
        batch = pack(rollouts, rows)
        model.zero_grad()
        logprobs, _ = token_logprobs(model, batch, torch.from_numpy(rollouts.tokens[batch.targets]).long(), 0.9)
        (logprobs * torch.from_numpy(np.cos(batch.targets))).sum().backward()
        order = torch.from_numpy(np.argsort(batch.targets))
        found.append((logprobs.detach()[order], model.model.embed_tokens.weight.grad.clone()))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_teacher_is_another_model_of_the_same_vocabulary(backend: str, tmp_path: Path) -> None:
    """Of other sizes; what it says of the tokens is what it says of them as a policy, and it stays as it is."""
    large = tiny.recipe(model={"layers": 3, "hidden_size": 64}, trainer={"backend": backend})
    teacher = tiny.folder(large, tmp_path / "teacher", seed=3)
    table = {"name": "opd", "group_size": 1, "teacher": teacher}
    trainers = {"tokens_per_micro_batch": 60, "backend": backend}
    recipe = tiny.recipe(trainer=trainers, algorithm=table, rollout={"temperature": 0.8})
    trainer, algorithm = trainer_of(recipe, tmp_path / "model"), make_algorithm(recipe.algorithm)
    model = AutoModelForCausalLM.from_pretrained(teacher)
    given: list[NDArray[np.float32]] = []
    ours = algorithm.advantages
    algorithm.advantages = lambda r: given.append(r.columns["teacher"]) or ours(r)  # type: ignore[method-assign,func-returns-value]
    for step in range(2):
        rollouts = tiny.random_rollouts(6, seed=1)
        metrics = trainer.step(rollouts, algorithm, step)
        for prompt, answer, where in sequences(rollouts):
            with torch.no_grad():
                logits = model(torch.cat([prompt, answer])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            said = (logits / 0.8).log_softmax(-1)[torch.arange(len(answer)), answer].numpy()
            np.testing.assert_allclose(given[-1][where], said * rollouts.loss_mask[where], rtol=1e-4, atol=1e-4)
    assert np.isfinite(metrics["teacher_kl"]) and metrics["grad_norm"] > 0
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    trainer.save(saved)  # without the teacher
    trainer_of(tiny.recipe(trainer=trainers), tmp_path / "model").load(saved)
    strange = tiny.recipe(model={"alphabet": "0123456789"})
    tiny.folder(strange, tmp_path / "strange")
    wrong = tiny.recipe(trainer=trainers, algorithm={**table, "teacher": tmp_path / "strange"})
    with pytest.raises(RunError, match=r"algorithm\.teacher = '.*strange' has another vocabulary \(13 tokens\)"):
        trainer_of(wrong, tmp_path / "model")


@pytest.mark.parametrize("samples", [0, 4])
def test_a_step_without_tokens_leaves_the_weights_alone(backend: str, tmp_path: Path, samples: int) -> None:
    recipe = tiny.recipe(trainer={"backend": backend})
    trainer = trainer_of(recipe, tmp_path)
    before = weights(trainer)
    metrics = trainer.step(tiny.random_rollouts(samples, masked=1.1), make_algorithm(recipe.algorithm), 0)
    assert metrics["tokens"] == 0 and all(np.isfinite(v) for v in metrics.values())
    assert identical(before, weights(trainer))


@pytest.mark.parametrize("poison", [float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_loss_that_is_not_finite_is_skipped_and_leaves_no_trace(
    backend: str, tmp_path: Path, poison: float, name: str
) -> None:
    recipe = tiny.recipe(trainer={"backend": backend}, algorithm={"name": name})
    algorithm, good = make_algorithm(recipe.algorithm), [tiny.random_rollouts(8, seed=s) for s in range(2)]
    bad = tiny.random_rollouts(8, seed=9, masked=0.0)
    bad.rewards[0] = poison
    clean, tried = (trainer_of(recipe, tmp_path) for _ in range(2))
    clean.step(good[0], algorithm, 0)
    tried.step(good[0], algorithm, 0)
    assert tried.step(bad, algorithm, 1)["skipped"] == {"grpo": 1, "ppo": 2}[name]  # the critic's update too
    assert clean.step(good[1], algorithm, 1) == tried.step(good[1], algorithm, 1)
    assert identical(weights(clean), weights(tried))


def test_one_skipped_update_of_several_leaves_the_others_and_their_metrics(backend: str, tmp_path: Path) -> None:
    """The second update's groups have a reward that is not a number: the step is that of the first one's groups."""
    table = {"name": "dr_grpo", "overlong": [2, 30]}
    several, one = (tiny.recipe(trainer={"backend": backend, "updates_per_step": n}, algorithm=table) for n in (2, 1))
    algorithm, rollouts = make_algorithm(one.algorithm), tiny.random_rollouts(8, masked=0.0)
    rollouts.rewards[5] = float("nan")
    tried, clean = trainer_of(several, tmp_path), trainer_of(one, tmp_path)
    first = rollouts.loss_mask * np.repeat(rollouts.group == 0, np.diff(rollouts.offsets))
    said = tried.step(rollouts, algorithm, 0)
    alone = clean.step(dataclasses.replace(rollouts, loss_mask=first.astype(np.uint8)), algorithm, 0)
    assert said["skipped"] == 1 and said["tokens"] == len(rollouts.tokens)
    same = ("loss", "grad_norm", "kl", "importance_max", "entropy")
    assert [said[name] for name in same] == [alone[name] for name in same] and np.isfinite(said["loss"])
    assert identical(weights(tried), weights(clean))


def test_the_warm_up_and_fine_tuning_learn_the_answers(backend: str, tmp_path: Path) -> None:
    recipe = tiny.recipe(trainer={"backend": backend, "learning_rate": 1e-9}, rollout={"temperature": 0.5})
    trainer = trainer_of(recipe, tmp_path)
    asked, answers = tiny.prompts([3, 6, 2, 9]), tiny.prompts([5, 2, 7, 1], seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        parts = []
        for prompt, answer in zip(asked, answers, strict=True):
            logits = model(torch.tensor(np.concatenate([prompt, answer]))[None].long()).logits[0, len(prompt) - 1 : -1]
            parts.append(torch.nn.functional.cross_entropy(logits, torch.tensor(answer).long(), reduction="none"))
        expected = {"token": torch.cat(parts).mean().item(), "sequence": np.mean([p.mean().item() for p in parts])}
    for aggregate, loss in expected.items():
        algorithm = make_algorithm(Sft.model_validate({"aggregate": aggregate}))
        said = trainer.step(as_rollouts(asked, answers), algorithm, 0)
        assert said["loss"] == pytest.approx(loss, rel=1e-5) and not said.keys() & {"kl", "importance"}, said
    losses = [trainer.supervised_step(asked, answers, 1e-2) for _ in range(40)]
    assert losses[0] == pytest.approx(expected["token"], rel=1e-5)
    assert losses[-1] < 0.1 * losses[0]


def test_training_begins_with_a_fresh_optimizer_and_the_weights_of_now_as_reference(
    backend: str, tmp_path: Path
) -> None:
    recipe = tiny.recipe(trainer={"backend": backend}, algorithm={"kl_coef": 0.1})
    algorithm, rollouts = make_algorithm(recipe.algorithm), tiny.random_rollouts(8)
    trainer = trainer_of(recipe, tmp_path)
    for _ in range(3):
        trainer.supervised_step(tiny.prompts([3, 4]), tiny.prompts([3, 4]), 1e-2)
    assert trainer.step(rollouts, algorithm, 0)["reference_kl"] > 1e-4  # against the weights before the SFT warm start
    trainer.begin_training()
    folder = tmp_path / "warm"
    shutil.copytree(tmp_path, folder, ignore=shutil.ignore_patterns("warm"))
    from safetensors.torch import save_file

    save_file(weights(trainer), folder / "model.safetensors", metadata={"format": "pt"})
    fresh = trainer_of(recipe, folder)
    first = trainer.step(rollouts, algorithm, 0)
    assert first["reference_kl"] < 1e-9
    assert first == fresh.step(rollouts, algorithm, 0)
    assert identical(weights(trainer), weights(fresh))
    assert trainer.step(rollouts, algorithm, 1)["reference_kl"] > 1e-7


def test_every_so_many_steps_the_policy_becomes_the_reference(backend: str, tmp_path: Path) -> None:
    recipe = tiny.recipe(trainer={"backend": backend}, algorithm={"kl_coef": 0.1, "reference_refresh_steps": 2})
    trainer, algorithm = trainer_of(recipe, tmp_path), make_algorithm(recipe.algorithm)
    trainer.begin_training()
    rollouts = tiny.random_rollouts(8)
    distances = [trainer.step(rollouts, algorithm, step)["reference_kl"] for step in range(5)]
    assert [distance < 1e-9 for distance in distances] == [True, False, True, False, True]


def test_a_run_goes_on_from_a_checkpoint_of_one_without_reference_or_critic(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    plain = tiny.recipe()
    trainer, rollouts = trainer_of(plain, tmp_path / "model"), tiny.random_rollouts(8)
    trainer.step(rollouts, make_algorithm(plain.algorithm), 0)
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    trainer.save(saved)
    recipe = tiny.recipe(algorithm={"name": "ppo", "kl_coef": 0.1})
    forked, algorithm = trainer_of(recipe, tmp_path / "model"), make_algorithm(recipe.algorithm)
    forked.load(saved)
    assert identical(weights(trainer), weights(forked))
    metrics = forked.step(rollouts, algorithm, 1)
    assert metrics["reference_kl"] < 1e-9 and metrics["value_mean"] == 0 and metrics["skipped"] == 0
    (saved / "optimizer-2.safetensors").unlink()
    with pytest.raises(RunError, match="incomplete"):
        forked.load(saved)


RESUMED: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo, kl": {"kl_coef": 0.2, "reference_refresh_steps": 3},
    "ppo": PPO,
}


@pytest.mark.quick
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_trainer_goes_on_to_the_bit(backend: str, tmp_path: Path, name: str) -> None:
    recipe = tiny.recipe(trainer={"backend": backend, "schedule": "cosine"}, algorithm=RESUMED[name], run={"steps": 4})
    algorithm = make_algorithm(recipe.algorithm)
    batches = [tiny.random_rollouts(8, seed=s) for s in range(4)]
    straight, cut = (trainer_of(recipe, tmp_path / "model") for _ in range(2))
    for step in (0, 1):
        straight.step(batches[step], algorithm, step)
        cut.step(batches[step], algorithm, step)
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    torch.rand(5)  # a new trainer seeds anew: the saved state must not be that of the beginning
    saving = cut.begin_save(saved)
    state = torch.get_rng_state()
    cut.step(batches[3], algorithm, 2)  # what is saved is the state of before
    saving.finish()
    assert saving.done()
    torch.set_rng_state(state)
    drawn = torch.rand(3)
    assert not pickles(saved)
    resumed = trainer_of(recipe, tmp_path / "model")
    for _ in range(2):  # what is loaded is taken over what is there
        resumed.step(batches[3], algorithm, 0)
    resumed.load(saved)
    assert torch.equal(drawn, torch.rand(3))
    for step in (2, 3):
        assert straight.step(batches[step], algorithm, step) == resumed.step(batches[step], algorithm, step)
        assert resident(straight) > 0
        straight.offload()  # and so does one whose devices were others' in between
        assert resident(straight) == 0
        straight.onload()
    assert identical(weights(straight), weights(resumed))


def test_a_resumed_trainer_may_have_another_learning_rate(backend: str, tmp_path: Path) -> None:
    """Ten times the rate is ten times the way, from the same moments."""
    slow, fast = (tiny.recipe(trainer={"backend": backend, "learning_rate": rate}) for rate in (1e-4, 1e-3))
    algorithm, rollouts = make_algorithm(slow.algorithm), tiny.random_rollouts(8)
    first = trainer_of(slow, tmp_path / "model")
    first.step(rollouts, algorithm, 0)
    (saved := tmp_path / "saved").mkdir()
    first.save(saved)
    before, ways = weights(first), []
    for recipe in (slow, fast):
        trainer = trainer_of(recipe, tmp_path / "model")
        trainer.load(saved)
        assert trainer.step(rollouts, algorithm, 1)["learning_rate"] == recipe.trainer.learning_rate
        after = weights(trainer)
        ways.append(torch.cat([(after[name] - before[name]).flatten() for name in sorted(before)]))
    assert ways[0].abs().max() > 1e-5
    torch.testing.assert_close(ways[1], 10 * ways[0], rtol=0.02, atol=2e-6)


def test_what_engine_and_trainer_differ_by_is_told_of_tokens_that_the_steps_own_version_made(
    backend: str, tmp_path: Path
) -> None:
    one, two = (tiny.recipe(trainer={"backend": backend, "updates_per_step": n, "learning_rate": 0.1}) for n in (1, 2))
    algorithm, rollouts = make_algorithm(one.algorithm), tiny.random_rollouts(8)
    trainer = trainer_of(one, tmp_path)
    fresh = trainer.step(rollouts, algorithm, 0)
    assert fresh["engine_diff"] == fresh["logprob_diff"] > 0
    assert "engine_diff" not in trainer.step(rollouts, algorithm, 1)
    said = trainer_of(two, tmp_path).step(rollouts, algorithm, 0)  # the second update has moved, far
    first = rollouts.loss_mask * np.repeat(rollouts.group == 0, np.diff(rollouts.offsets)).astype(np.uint8)
    alone = trainer_of(one, tmp_path).step(dataclasses.replace(rollouts, loss_mask=first), algorithm, 0)
    assert said["engine_diff"] == alone["engine_diff"] != said["logprob_diff"]


def test_a_checkpoint_before_the_first_step_loads(backend: str, tmp_path: Path) -> None:
    recipe = tiny.recipe(trainer={"backend": backend})
    trainer = trainer_of(recipe, tmp_path)
    (saved := tmp_path / "saved").mkdir()
    trainer.save(saved)
    used = trainer_of(recipe, tmp_path)
    used.step(tiny.random_rollouts(4), make_algorithm(recipe.algorithm), 0)
    used.load(saved)
    rollouts = tiny.random_rollouts(8, seed=5)
    assert used.step(rollouts, make_algorithm(recipe.algorithm), 0) == trainer.step(
        rollouts, make_algorithm(recipe.algorithm), 0
    )


@pytest.mark.quick
def test_a_checkpoint_of_another_model_or_a_torn_one_is_refused(backend: str, tmp_path: Path) -> None:
    small, large = (
        tiny.recipe(model={"layers": n, "intermediate_size": 32 * n}, trainer={"backend": backend}) for n in (2, 3)
    )
    trainer, other = trainer_of(small, tmp_path / "a"), trainer_of(large, tmp_path / "b")
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    other.save(saved)
    before = weights(trainer)
    with pytest.raises(RunError, match=r"layers\.2.*not in the model.*more"):
        trainer.load(saved)
    assert identical(before, weights(trainer))
    torn = max(saved.iterdir(), key=lambda path: path.stat().st_size)
    torn.write_bytes(torn.read_bytes()[:1000])
    with pytest.raises(RunError, match="cannot be read"):
        other.load(saved)
    (saved / {"torch": "model.safetensors", "megatron": ".metadata"}[backend]).unlink()
    with pytest.raises(RunError, match="incomplete"):
        other.load(saved)


def test_a_flipped_byte_in_any_file_of_a_sealed_checkpoint_is_found_when_it_is_loaded(
    backend: str, tmp_path: Path
) -> None:
    recipe = tiny.recipe(trainer={"backend": backend})
    trainer = trainer_of(recipe, tmp_path / "model")
    trainer.step(tiny.random_rollouts(4), make_algorithm(recipe.algorithm), 0)
    (saved := tmp_path / "saved").mkdir()
    folder_checksums.write(saved, trainer.save(saved))
    sealed = folder_checksums.expected(saved)
    assert sealed == {p.name: folder_checksums.of_file(p) for p in saved.iterdir() if p.name != folder_checksums.SEAL}
    for path in (saved / name for name in sealed):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(folder_checksums.DamagedCheckpoint, match=f"{re.escape(str(path))}.*{sealed[path.name]}"):
            trainer.load(saved)
        path.write_bytes(whole)
    trainer.load(saved)


def test_what_is_exported_loads_as_a_hugging_face_model(backend: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    recipe = tiny.recipe(trainer={"backend": backend})
    trainer = trainer_of(recipe, tmp_path)
    early = weights(trainer)
    assert "lm_head.weight" not in early
    trainer.step(tiny.random_rollouts(8), make_algorithm(recipe.algorithm), 0)
    late = weights(trainer)
    assert not identical(early, late), "the exported tensors change under the reader's hands"
    save_file(late, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert identical(late, dict(model.named_parameters()))


def test_bfloat16_trains_float32_weights_and_exports_bfloat16(backend: str, tmp_path: Path) -> None:
    exact, rough = (
        tiny.recipe(trainer={"backend": backend, "dtype": d, "learning_rate": 1e-6}) for d in ("float32", "bfloat16")
    )
    rollouts = tiny.random_rollouts(12)
    a, b = trainer_of(exact, tmp_path), trainer_of(rough, tmp_path)
    one, two = (t.step(rollouts, make_algorithm(exact.algorithm), 0) for t in (a, b))
    assert two["loss"] == pytest.approx(one["loss"], rel=0.05, abs=0.01) and two["loss"] != one["loss"]
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.1)
    assert {t.dtype for t in weights(b).values()} == {torch.bfloat16}


def test_master_weights_are_float32_through_a_checkpoint(backend: str, tmp_path: Path) -> None:
    """Steps too small for bfloat16 add up, before and after a restart."""
    recipe = tiny.recipe(trainer={"backend": backend, "dtype": "bfloat16", "learning_rate": 3e-4})
    algorithm, rollouts = make_algorithm(recipe.algorithm), tiny.random_rollouts(12)
    trainer = trainer_of(recipe, tmp_path)
    saved = tmp_path / "checkpoint"
    for restarted in (False, True):
        for step in range(4):
            trainer.step(rollouts, algorithm, step)
        ones = [t for n, t in trainer.export() if n.endswith("norm.weight")]
        assert all(torch.equal(t, torch.ones_like(t)) for t in ones) != restarted
        if not restarted:
            saved.mkdir()
            trainer.save(saved)
            trainer = trainer_of(recipe, tmp_path)
            trainer.load(saved)


def test_an_algorithm_of_the_wrong_shape_is_told_so(backend: str, tmp_path: Path) -> None:
    recipe = tiny.recipe(trainer={"backend": backend})
    trainer = trainer_of(recipe, tmp_path)

    class Wrong:
        needs: frozenset[str] = frozenset()

        def __init__(self, advantages: int) -> None:
            self.count = advantages

        def advantages(self, rollouts: Rollouts) -> Tensor:
            return torch.zeros(self.count)

        def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
            return inputs.logprobs.mean(), {}

    rollouts = tiny.random_rollouts(8)
    with pytest.raises(RunError, match=r"shape \[3\]"):
        trainer.step(rollouts, Wrong(3), 0)
    with pytest.raises(RunError, match=r"\['loss'\]"):
        trainer.step(rollouts, Wrong(len(rollouts.tokens)), 0)


def test_progress_is_reported(backend: str, tmp_path: Path) -> None:
    recipe = tiny.recipe(trainer={"backend": backend, "tokens_per_micro_batch": 40})
    heartbeats: list[None] = []
    trainer_of(recipe, tmp_path).step(
        tiny.random_rollouts(12), make_algorithm(recipe.algorithm), 0, lambda: heartbeats.append(None)
    )
    assert len(heartbeats) > 3


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802]),
    ],
)
def test_the_learning_rate_is_a_function_of_the_step(schedule: str, rates: list[float]) -> None:
    config = tiny.recipe(
        trainer={"schedule": schedule, "learning_rate": 1.0, "min_learning_rate": 0.1, "lr_warmup_steps": 2}
    ).trainer
    assert [learning_rate(config, step, 6) for step in range(6)] == pytest.approx(rates, abs=1e-5)


def test_a_tiny_model_is_the_same_for_a_seed_and_its_tokenizer_is_exact(tmp_path: Path) -> None:
    recipe = tiny.recipe()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(1)
        materialise(recipe.model, tmp_path / name, seed)
    a, b, c = ((tmp_path / n / "model.safetensors").read_bytes() for n in "abc")
    assert a == b and a != c
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    text = "12 + 34 =\n (a, b) .  ?"
    tokens = tokenizer(text).input_ids
    assert len(tokens) == len(text) and tokenizer.decode(tokens) == text
    assert tokenizer.decode([*tokens, tokenizer.eos_token_id, tokenizer.pad_token_id], skip_special_tokens=True) == text
    assert tokenizer("Ä").input_ids == [tokenizer.unk_token_id]
    assert json.loads((tmp_path / "a" / "config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id


def test_a_model_at_a_path_keeps_its_weights_there(backend: str, tmp_path: Path) -> None:
    made = tiny.recipe()
    tiny.folder(made, tmp_path / "hub")
    recipe = Recipe.model_validate(
        {"model": {"path": tmp_path / "hub"}, "source": [{"task": "chain_sum"}], "trainer": {"backend": backend}}
    )
    materialise(recipe.model, tmp_path / "run", 0)
    assert not list((tmp_path / "run").glob("*.safetensors"))
    assert AutoTokenizer.from_pretrained(tmp_path / "run")("0").input_ids == [3]
    engine = make_engine(recipe, tmp_path / "run")
    trainer = make_trainer(recipe, tmp_path / "run", 0, 1)
    engine.load(0, trainer.export())
    assert identical(weights(trainer), weights(make_trainer(made, tmp_path / "hub", 0, 1)))


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("", "not a directory"),
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer"),
        ("model.safetensors", "no safetensors weights"),
    ],
)
def test_a_path_that_is_no_model_is_named(tmp_path: Path, gone: str, message: str) -> None:
    path = tmp_path / "model"
    if gone:
        tiny.folder(tiny.recipe(), path)
        (path / gone).unlink()
    with pytest.raises(RunError, match=f"{path}.*{message}"):
        materialise(PathModel(path=path), tmp_path / "run", 0)


def test_weights_that_do_not_fill_the_model_are_refused(backend: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    recipe = tiny.recipe(trainer={"backend": backend})
    tiny.folder(recipe, tmp_path)
    held: dict[str, Any] = load_file(tmp_path / "model.safetensors")
    del held["model.norm.weight"]
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match=r"model\.norm\.weight"):
        trainer_of(recipe, tmp_path)
