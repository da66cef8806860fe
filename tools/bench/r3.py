"""Rollout routing replay: what it costs, and by how much it brings engine and trainer together.

cost       recipes/quickstart-moe-r3.toml with rollout.routed_experts = true and false, runs in turn, without the SFT warm start
           train_overhead, end_to_end_overhead    medians of train_s and step_s, with over without, less 1
           shard_bytes_ratio                      bytes of a request's shard, with over without
mismatch   |logprob of the engine - logprob of the trainer| of the same tokens under the same weights, drawn by SGLang's
           server and computed by Megatron-core: mean and greatest; of a dense model, of one with experts, and of that
           with the experts replayed that the engine chose
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import Tensor

from relax_hpc.algorithms import LossInputs
from relax_hpc.engines import Sampling, make_engine
from relax_hpc.recipe import Recipe, load_recipe
from relax_hpc.records import Rollouts
from relax_hpc.trainers import make_trainer
from relax_hpc.trainers.build import materialise
from tools.bench.common import ROOT, finish, interleave, parse, parser, progress
from tools.bench.runs import run

RECIPE = ROOT / "recipes" / "quickstart-moe-r3.toml"
DROPPED = 5
"""Steps at the beginning of a run that do not count."""
EXPERTS = {"dense": 0, "experts": 8}
CONTEXT, PROMPT, ANSWER, COPIES = 256, 24, 128, 4


class Listen:
    """An algorithm that writes down the trainer's logprobs, and trains nothing."""

    needs: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.heard: dict[int, float] = {}

    def advantages(self, rollouts: Rollouts) -> Tensor:
        return torch.arange(len(rollouts.tokens), dtype=torch.float32)

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = inputs.advantages.round().long().tolist()
        self.heard |= dict(zip(tokens, inputs.logprobs.tolist(), strict=True))
        return inputs.logprobs * 0, {}


def one_run(replay: bool, steps: int, number: int) -> dict[str, float]:
    """The figures of a run."""
    sets = {
        "run.steps": steps, "run.seed": number, "sft_warm_start.steps": 1, "evaluation.every": 10 * steps, "evaluation.prompts": 1,
        "rollout.routed_experts": str(replay).lower(),
    }  # fmt: skip
    done = run(RECIPE, f"r3-{'with' if replay else 'without'}", sets)
    found = {name: statistics.median(step[name] for step in done.steps[DROPPED:]) for name in ("train_s", "step_s")}
    return {**found, "bytes": statistics.mean(path.stat().st_size for path in (done.root / "shards").rglob("*.h5"))}


def cost(rounds: int, steps: int) -> dict[str, float]:
    """Runs with and without, in turn."""
    with progress("r3: rounds", rounds) as done:
        sides = {name: partial(one_run, replay, steps) for name, replay in (("with", True), ("without", False))}
        seen = interleave(sides, rounds, done=done)

    def ratio(name: str) -> float:
        return statistics.median(a[name] / b[name] for a, b in zip(seen["with"], seen["without"], strict=True))

    return {
        "train_overhead": round(ratio("train_s") - 1, 4),
        "end_to_end_overhead": round(ratio("step_s") - 1, 4),
        "shard_bytes_ratio": round(ratio("bytes"), 3),
    }


def mismatch(dtype: str, experts: int, prompts: int) -> dict[str, dict[str, float]]:
    """Of one model: {"plain": …}, and {"replayed": …} where there are experts."""
    sets = [
        f"trainer.dtype={dtype}", "trainer.processes=1", "trainer.parallel.expert=1", f"model.experts={experts}",
        f"model.context={CONTEXT}", f"rollout.max_new_tokens={ANSWER}", f"rollout.routed_experts={str(experts > 0).lower()}",
    ]  # fmt: skip
    recipe = load_recipe(RECIPE, sets)
    with tempfile.TemporaryDirectory() as folder:
        materialise(recipe.model, Path(folder), recipe.run.seed)
        trainer = make_trainer(recipe, Path(folder), 0, 1)
        rollouts = generated(recipe, Path(folder), dict(trainer.export()), prompts)
        found = {"plain": apart(trainer, dataclasses.replace(rollouts, routed_experts=None))}
        if experts:
            found["replayed"] = apart(trainer, rollouts)
    return found


def generated(recipe: Recipe, folder: Path, weights: dict[str, Tensor], prompts: int) -> Rollouts:
    """Answers of SGLang to random prompts, as a trainer gets them."""
    random = np.random.default_rng(0)
    asked = [random.integers(3, 50, PROMPT).astype(np.int32) for _ in range(prompts)]
    engine = make_engine(recipe, folder)
    try:
        engine.load(0, weights.items())
        done = engine.generate(asked, COPIES, Sampling(1.0, 1.0, 0, ANSWER, ()), 0)
    finally:
        engine.close()
    offsets = np.cumsum([0, *(len(c.tokens) for c in done)])
    routed = [c.routed_experts for c in done if c.routed_experts is not None]
    return Rollouts(
        ids=[f"o/{i}" for i in range(len(done))],
        group=np.arange(len(done)) // COPIES,
        rewards=np.zeros(len(done), np.float32),
        raw_rewards=np.zeros(len(done), np.float32),
        prompt_tokens=np.concatenate([asked[i // COPIES] for i in range(len(done))]),
        prompt_offsets=np.arange(len(done) + 1) * PROMPT,
        tokens=np.concatenate([c.tokens for c in done]),
        offsets=offsets,
        loss_mask=np.ones(offsets[-1], np.uint8),
        logprobs=np.concatenate([c.logprobs for c in done]),
        versions=np.zeros(offsets[-1], np.int32),
        finish=np.zeros(len(done), np.uint8),
        routed_experts=np.concatenate(routed) if routed else None,
    )


def apart(trainer: Any, rollouts: Rollouts) -> dict[str, float]:
    """By how much the trainer's logprobs differ from the engine's."""
    listen = Listen()
    trainer.step(rollouts, listen, 0)
    heard = np.array([listen.heard[i] for i in range(len(rollouts.tokens))])
    difference = np.abs(heard - rollouts.logprobs)
    return {"mean": float(difference.mean()), "max": float(difference.max()), "tokens": len(difference)}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=2, help="pairs of runs (default: %(default)s)")
    arguments.add_argument("--steps", type=int, default=40, help="of each run (default: %(default)s)")
    arguments.add_argument("--prompts", type=int, default=16, help="whose answers are compared (default: %(default)s)")
    given = parse(arguments)
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "mismatch": {
            dtype: {name: mismatch(dtype, experts, given.prompts) for name, experts in EXPERTS.items()}
            for dtype in ("float32", "bfloat16")
        }
    }
    if given.rounds:
        result |= cost(given.rounds, given.steps)
    finish(result, given.json)


if __name__ == "__main__":
    main()
