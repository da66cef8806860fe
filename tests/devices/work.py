"""What trainers, engines, scorers and critics compute, on whatever device: each piece of work returns numbers to compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn import Module

from relax_hpc.algorithms import ActorCritic, make_algorithm
from relax_hpc.engines import Ask, Engine, Sampling, Streams, make_engine
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Rollouts
from relax_hpc.trainers import Trainer, make_critic, make_scoring, make_trainer
from relax_hpc.trainers.trees import segments
from relax_hpc.weights import FilePublisher, FileReceiver
from tests import omni, tiny

PPO = {"name": "ppo", "group_size": 1, "kl_coef": 0.1, "kl_in": "loss", "critic": {"learning_rate": 3e-3}}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a piece of work is done. folder: an empty one, of its own."""

    device: str
    models: Path
    folder: Path
    backend: str = "torch"
    rank: int = 0
    world: int = 1
    parallel: dict[str, Any] = dataclasses.field(default_factory=dict)

    def recipe(self, **tables: Any) -> Recipe:
        own = {"backend": self.backend, "device": self.device, "processes": self.world, "parallel": self.parallel}
        tables["trainer"] = own | tables.get("trainer", {})
        tables["rollout"] = {"device": self.device, "temperature": 0.8} | tables.get("rollout", {})
        return tiny.recipe(**tables)

    def trainer(self, recipe: Recipe) -> Trainer:
        made = make_trainer(recipe, self.models / "model", self.rank, self.world)
        for model in made._held()[0]:  # type: ignore[attr-defined]
            held = [
                *model.parameters(),
                *Module.buffers(model),
            ]  # torch's own: Megatron's wrapper has a list of this name
            assert {tensor.device.type for tensor in held} == {self.device}, type(model)
        return made


Work = Callable[[Place], dict[str, Any]]


def models(folder: Path) -> Path:
    """Make the models that the work needs, in `folder`."""
    for name, seed in (("model", 0), ("teacher", 3)):
        tiny.folder(tiny.recipe(), folder / name, seed)
    return folder


def weights(trainer: Trainer) -> dict[str, Any]:
    """Export, bucket by bucket as transports do: on the host, whatever the device."""
    found = dict(trainer.export())
    assert all(tensor.device.type == "cpu" for tensor in found.values())
    return found


def short(seed: int) -> Rollouts:
    """Long prompts with short answers: a group shares one copy of its prompt, which takes an attention mask."""
    asked = [prompt for prompt in tiny.prompts([20, 17], seed) for _ in range(4)]
    return tiny.rollouts(asked, tiny.prompts([3, 5, 2, 4] * 2, seed), 4, seed)


def steps(
    algorithm: dict[str, Any], trainer: dict[str, Any] | None = None, *, count: int = 1, shared: bool = False
) -> Work:
    """Steps by an algorithm. shared: on prompts that groups share."""

    def work(place: Place) -> dict[str, Any]:
        table = dict(algorithm)
        if "teacher" in table:
            table["teacher"] = place.models / table["teacher"]
        policy = {"async": {"max_staleness": 0}} if table.get("name") == "rloo" else {}
        recipe = place.recipe(algorithm=table, **policy, trainer={"tokens_per_micro_batch": 60, **(trainer or {})})
        made, rule = place.trainer(recipe), make_algorithm(recipe.algorithm)
        made.begin_training()
        data = [short(step) if shared else tiny.random_rollouts(8, seed=step) for step in range(count)]
        said = [made.step(rollouts, rule, step) for step, rollouts in enumerate(data)]
        return {"said": said, "weights": weights(made)}

    return work


def branching(place: Place) -> dict[str, Any]:
    """A step on samples that have turns in common."""
    recipe = place.recipe()
    made, rule = place.trainer(recipe), make_algorithm(recipe.algorithm)
    made.begin_training()
    with mock.patch.object(segments, "SHORTEST_SHARED", 3):
        said = made.step(tiny.branching_rollouts(2, seed=3), rule, 0)
    return {"said": said, "weights": weights(made)}


def warm_start(place: Place) -> dict[str, Any]:
    trainer = place.trainer(place.recipe())
    loss = trainer.supervised_step(tiny.prompts([3, 4]), tiny.prompts([3, 4]), 1e-2)
    return {"loss": loss, "weights": weights(trainer)}


def checkpoint(place: Place) -> dict[str, Any]:
    """Save, load into another trainer and go on; one of them leaves its device in between."""
    recipe = place.recipe(algorithm=PPO)
    straight, rule = place.trainer(recipe), make_algorithm(recipe.algorithm)
    straight.begin_training()
    straight.step(tiny.random_rollouts(8, seed=0), rule, 0)
    drawn = random_states(place)
    saving = straight.begin_save(place.folder)
    before = weights(straight)
    straight.step(tiny.random_rollouts(8, seed=1), rule, 1)  # what is saved is the state of before
    saving.finish()
    resumed = place.trainer(recipe)
    if place.device == "cuda":
        torch.cuda.manual_seed(9)
    resumed.load(place.folder)
    assert same(before, weights(resumed)) and same(drawn, random_states(place))
    resumed.offload()
    held = [tensor for model in resumed._held()[0] for tensor in model.parameters()]  # type: ignore[attr-defined]
    assert not any(t.untyped_storage().nbytes() for t in held if t.untyped_storage().resizable())
    resumed.onload()
    said = resumed.step(tiny.random_rollouts(8, seed=1), rule, 1)
    assert same(weights(straight), weights(resumed)), "a checkpoint, offload and onload keep every bit"
    return {"said": said, "weights": weights(resumed)}


def random_states(place: Place) -> list[torch.Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if place.device == "cuda" else [])]


def critic(place: Place) -> dict[str, Any]:
    """The critic's role: values, learning, its checkpoint."""
    recipe = place.recipe(algorithm=PPO, critic={})
    rule = make_algorithm(recipe.algorithm)
    assert isinstance(rule, ActorCritic)
    made = make_critic(recipe, place.models / "model", 0, 1)
    rollouts = tiny.random_rollouts(8)
    columns = {"values": made.values(rollouts), "reference": rollouts.logprobs}
    given = dataclasses.replace(rollouts, columns=columns)
    said = [made.learn(given, rule, step) for step in (0, 1)]
    made.save(place.folder)
    again = make_critic(recipe, place.models / "model", 0, 1)
    again.load(place.folder)
    assert again.learn(given, rule, 2) == made.learn(given, rule, 2)
    return {"said": said, "values": made.values(rollouts)}


def scorer(place: Place) -> dict[str, Any]:
    """The scorer's role: a teacher of its own, a reference from exported weights."""
    recipe = place.recipe(algorithm={"kl_coef": 0.1}, scorer={"scores": ["reference"]})
    made = make_scoring(recipe, place.models / "model", 0, 1)
    made.hold("teacher", place.models / "teacher")
    made.load("reference", weights(place.trainer(recipe)), place.folder)
    rollouts = tiny.random_rollouts(8)
    return {name: made.logprobs(name, rollouts) for name in ("teacher", "reference")}


def media(kind: str) -> Work:
    """A step, a scorer and an engine of a model with media: prompts of every modality and mixture that it knows."""

    def work(place: Place) -> dict[str, Any]:
        folder, shown = omni.folder(kind, place.folder / kind), omni.prompts(kind)
        own: dict[str, Any] = {"device": place.device, "freeze": ["vision"], "tokens_per_micro_batch": 60}
        algorithm = {"name": "grpo", "group_size": 2, "kl_coef": 0.1}
        tables = {"algorithm": algorithm, "scorer": {"scores": ["reference"]}, "rollout": {"device": place.device}}
        recipe = omni.recipe(folder, trainer=own, **tables)
        made = tiny.rollouts([p.tokens for p in shown for _ in range(2)], tiny.prompts([3, 4] * len(shown)), 2)
        made = dataclasses.replace(made, media=tuple(p.media for p in shown for _ in range(2)))
        scoring = make_scoring(recipe, folder, 0, 1)
        scoring.hold("reference", folder)
        made = dataclasses.replace(made, columns={"reference": scoring.logprobs("reference", made)})
        trainer, engine = make_trainer(recipe, folder, 0, 1), make_engine(recipe, folder)
        trainer.begin_training()
        said = trainer.step(made, make_algorithm(recipe.algorithm), 0)
        engine.load(1, weights(trainer).items())
        prompts, how = [p.tokens for p in shown], Sampling(temperature=0, max_new_tokens=5)
        done = engine.generate(prompts, 2, how, 1, media=[p.media for p in shown])
        return {"said": said, "weights": weights(trainer), "drawn": [(c.tokens, c.logprobs) for c in done]}

    return work


def engine_of(place: Place, **tables: Any) -> Engine:
    recipe = place.recipe(**tables)
    engine = make_engine(recipe, place.models / "model")
    engine.load(3, weights(place.trainer(recipe)).items())
    return engine


def generated(engine: Engine, sampling: Sampling, count: int = 3, begun: Any = ()) -> list[Any]:
    done = engine.generate(tiny.prompts([3, 9, 1, 9, 5, 3]), count, sampling, 1, begun=begun)
    return [(c.tokens, c.logprobs, c.spans, c.finish) for c in done]


def engine(place: Place) -> dict[str, Any]:
    """Greedy and drawn tokens, answers that end early and leave the batch, stop strings, answers that were begun."""
    made = engine_of(place)
    stops = Sampling(max_new_tokens=10, stop=("1", "23"))
    return {
        "greedy": generated(made, Sampling(temperature=0, max_new_tokens=12)),
        "drawn": generated(made, Sampling(max_new_tokens=24)),
        "truncated": generated(made, Sampling(0.7, 0.9, 8, max_new_tokens=8)),
        "stopped": generated(made, stops),
        "begun": generated(made, stops, 1, tiny.prompts([1, 2, 3, 4, 5, 6], seed=2)),
    }


def engine_stream(place: Place) -> dict[str, Any]:
    """Answers that join and leave a batch; one is aborted."""
    made = engine_of(place)
    assert isinstance(made, Streams)
    stream, done = made.stream(), []
    hows = [Sampling(0, max_new_tokens=12), Sampling(0.7, 0.9, 8, max_new_tokens=20), Sampling(stop=("1", "23"))]
    for first in (0, 6, 12):
        prompts = enumerate(tiny.prompts([3, 9, 1, 9, 5, 3]), first)
        stream.ask([Ask(i, prompt, hows[i % 3], i) for i, prompt in prompts])
        done += stream.advance(60)
    while len(done) < 12:
        done += stream.advance(60)
    stream.ask([Ask(18, tiny.prompts([2])[0], Sampling(max_new_tokens=40), 1)])
    done += stream.advance(0)
    done += stream.abort()
    return {"drawn": [(key, c.tokens, c.logprobs, c.spans, c.finish) for key, c in sorted(done, key=lambda d: d[0])]}


def engine_offloaded(place: Place) -> dict[str, Any]:
    """An engine whose device others have in between."""
    made = engine_of(place)
    given, sampling = dict(weights(place.trainer(place.recipe()))), Sampling(max_new_tokens=9)
    before = generated(made, sampling)
    made.offload()
    made.onload()
    made.load(3, given.items())
    assert same(before, generated(made, sampling))
    return {"generated": before}


def transport(place: Place) -> dict[str, Any]:
    """A version published from the trainer's export and received into an engine."""
    run = RunDir(place.folder)
    run.create()
    commit_dir = run.lease / "000001" / "i000001"
    commit_dir.mkdir(parents=True)
    recipe = place.recipe()
    trainer = place.trainer(recipe)
    publisher, receiver = FilePublisher(run, commit_dir, 1), FileReceiver(run)
    version = publisher.publish(0, trainer.export)
    made = make_engine(recipe, place.models / "model")
    with receiver.fetch(version) as fetched:
        made.load(0, fetched.tensors)
    return {"checksum": version.checksum, "generated": generated(made, Sampling(max_new_tokens=5))}


WORK: dict[str, Work] = {
    "grpo": steps({"kl_coef": 0.1, "entropy_coef": 0.1}, count=2),
    "grpo, one micro-batch": steps({}, {"tokens_per_micro_batch": 10000, "clip_grad_norm": 0.01}),
    "grpo, prompts shared": steps({"kl_coef": 0.1, "kl_unbiased": True}, shared=True),
    "grpo, turns shared": branching,
    "grpo, bfloat16": steps({"kl_coef": 0.1}, {"dtype": "bfloat16"}),
    "grpo, recomputed": steps({"old_logprobs": "recomputed", "aggregate": "sequence"}, {"updates_per_step": 2}),
    "grpo, corrected": steps({"old_logprobs": "recomputed", "correction": {"name": "mis"}, "opsm": 0.1}),
    "gspo": steps({"name": "gspo", "old_logprobs": "recomputed", "correction": {"name": "tis"}}),
    "gspo, token": steps(
        {"name": "gspo", "level": "token", "old_logprobs": "recomputed", "correction": {"name": "icepop"}}
    ),
    "dr_grpo": steps({"name": "dr_grpo"}),
    "sapo": steps({"name": "sapo"}),
    "cispo": steps({"name": "cispo"}),
    "gmpo": steps({"name": "gmpo", "aggregate": "prompt", "kl_cov": {}}),
    "dppo": steps({"name": "dppo", "rejection": {"geometric": [0.9, 1.1], "max_kl": 0.1}}),
    "rloo": steps({"name": "rloo"}),
    "reinforce++": steps({"name": "reinforce_plus_plus", "kl_coef": 0.1}),
    "ppo": steps(PPO, {"updates_per_step": 2}),
    "ppo, bfloat16": steps(PPO, {"dtype": "bfloat16"}, count=2),
    "opd": steps({"name": "opd", "teacher": "teacher"}),
    "sft": steps({"name": "sft"}),
    "reference refreshed": steps({"kl_coef": 0.1, "reference_refresh_steps": 1}, count=2),
    "warm start": warm_start,
    "checkpoint": checkpoint,
    "critic": critic,
    "scorer": scorer,
    "engine": engine,
    "engine, one batch": lambda place: {"drawn": generated(engine_of(place), Sampling(max_new_tokens=20))},
    "engine, a stream": engine_stream,
    "engine, stopped": lambda place: {"drawn": generated(engine_of(place), Sampling(max_new_tokens=4, stop=("1",)))},
    "engine, offloaded": engine_offloaded,
    "transport": transport,
    **{f"media, {kind}": media(kind) for kind in ("qwen3_vl", "qwen2_5_vl", "qwen3_omni", "gemma4_unified")},
}
MEGATRON = ("grpo", "grpo, bfloat16", "grpo, recomputed", "ppo", "opd", "warm start", "checkpoint", "critic", "scorer")
"""What this backend computes otherwise; losses are those of both."""


def same(a: Any, b: Any) -> bool:
    """Compare to the bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        a, b = (x.contiguous().view(torch.uint8).numpy() for x in (a, b))
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b or (a != a and b != b))
