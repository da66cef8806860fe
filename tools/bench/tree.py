"""Training on rollouts that branch, with what they share computed once, against the same samples packed apart.

    one trace ──► the torch trainer, share_prefixes = true ──► false ──► true ──► … seconds of a step's forward and backward
              └─► both in float64, a shorter trace: gradients compared

The trace is made up, in the shape of τ²-bench: a long prompt (policy and tools), and samples of 10 turns that leave each other
at different turns. speedup: seconds apart over seconds shared. bound: operations apart over operations shared, padding not
counted. of_flop_bound: speedup over bound. max_grad_diff: the largest difference of a gradient's number in float64.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from rich.table import Table
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from relax_hpc.algorithms import make_algorithm
from relax_hpc.recipe import Recipe
from relax_hpc.records import Rollouts
from relax_hpc.trainers import make_trainer
from relax_hpc.trainers.build import materialise
from relax_hpc.trainers.forward import token_logprobs
from relax_hpc.trainers.packing import pack, plan
from tools.bench.common import finish, interleave, parse, parser, progress, ratio, show
from tools.bench.trainers import words

SAMPLES, TURNS, SEED = 16, 10, 0
PROMPT = 4000
TURN = (150, 300)
"""Range of the tokens of a turn, the environment's answer included; the model's own are its first half."""
MODEL = {"hidden_size": 128, "intermediate_size": 384, "layers": 2, "heads": 2, "kv_heads": 1, "context": 8192}
BUDGET = 16384


def recipe(share: bool) -> Recipe:
    trainer = {"device": "cpu", "tokens_per_micro_batch": BUDGET, "learning_rate": 1e-9, "share_prefixes": share}
    algorithm = {"name": "grpo", "group_size": SAMPLES}
    return Recipe.model_validate(
        {"model": MODEL, "algorithm": algorithm, "trainer": trainer, "source": [{"task": "chain_sum"}]}
    )


def trace(prompt: int, turn: tuple[int, int], samples: int = SAMPLES) -> Rollouts:
    """A group of samples: each but the first leaves an earlier one behind a turn drawn at random, the first one included."""
    rng = np.random.default_rng(SEED)
    rows: list[list[tuple[Any, Any]]] = []
    for _ in range(samples):
        other = rows[int(rng.integers(len(rows)))] if rows else []
        turns = other[: int(rng.integers(0, TURNS))]
        while len(turns) < TURNS:
            count = int(rng.integers(*turn))
            turns = [*turns, (rng.integers(3, 50, count).astype(np.int32), np.arange(count) < count // 2)]
        rows.append(turns)
    tokens, mask = ([np.concatenate([each[i] for each in row]) for row in rows] for i in (0, 1))
    offsets = np.cumsum([0, *map(len, tokens)])
    none = np.zeros(samples, np.float32)
    return Rollouts(
        ids=[f"o/{i}" for i in range(samples)],
        group=np.zeros(samples, np.int64),
        rewards=rng.normal(size=samples).astype(np.float32),
        raw_rewards=none,
        prompt_tokens=np.tile(rng.integers(3, 50, prompt).astype(np.int32), samples),
        prompt_offsets=np.arange(samples + 1) * prompt,
        tokens=np.concatenate(tokens),
        offsets=offsets,
        loss_mask=np.concatenate(mask).astype(np.uint8),
        logprobs=np.full(offsets[-1], -4, np.float32),
        versions=np.zeros(offsets[-1], np.int32),
        finish=none.astype(np.uint8),
    )


def operations(made: Rollouts, share: bool, config: Any, parameters: int) -> float:
    """Multiplications of a forward: of matrices, of the head at each prediction, and of attention's pairs."""
    total = 0.0
    for rows in plan(made, 1, BUDGET, share=share)[0]:
        batch = pack(made, rows)
        of_tree = batch.positions[batch.segments >= 0] + 1  # keys that each token sees
        asked = len(batch.shared.asked) if batch.shared else len(batch.targets)
        pairs = 2 * config.num_attention_heads * config.head_dim * config.num_hidden_layers
        total += parameters * of_tree.size + pairs * float(of_tree.sum())
        total += asked * config.vocab_size * config.hidden_size
    return total


class Wide(TorchFunctionMode):
    """Computes in float64 what models ask to be computed in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


def wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def difference(folder: Path) -> float:
    """Compare gradients in float64, of a sum of logprobs with a weight of its own for each token of each sample."""
    made, model = trace(200, (70, 120), 8), AutoModelForCausalLM.from_pretrained(folder).double()
    weight = torch.from_numpy(np.random.default_rng(1).normal(size=len(made.tokens)))
    found = []
    for share in (True, False):
        model.zero_grad()
        for rows in plan(made, 1, BUDGET, share=share)[0]:
            batch = pack(made, rows)
            assert (batch.shared is not None) == share
            targets = torch.from_numpy(made.tokens[batch.targets].astype(np.int64))
            with Wide():
                (token_logprobs(model, batch, targets, 1.0)[0] * weight[batch.targets]).sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def stepper(folder: Path, made: Rollouts, share: bool) -> Callable[[int], float]:
    """A step, and the seconds of its forward and backward, packing included."""
    ours = recipe(share)
    trainer, algorithm = make_trainer(ours, folder, 0, 1), make_algorithm(ours.algorithm)

    def step(number: int) -> float:
        trainer.step(made, algorithm, number)
        return trainer.seconds["forward_backward_s"]

    return step


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=3, help="interleaved rounds, after one that warms up")
    arguments.add_argument("--threads", type=int, default=1)
    given = parse(arguments)
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as where, progress("tree: rounds", given.rounds + 1) as done:
        folder, made = Path(where), trace(PROMPT, TURN)
        materialise(recipe(True).model, folder, 0)
        model = AutoModelForCausalLM.from_pretrained(folder)
        parameters = sum(p.numel() for p in model.model.layers.parameters())
        tokens = {
            share: sum(pack(made, r).tokens.size for r in plan(made, 1, BUDGET, share=share)[0])
            for share in (True, False)
        }
        bound = operations(made, False, model.config, parameters) / operations(made, True, model.config, parameters)
        sides = {name: stepper(folder, made, name == "shared") for name in ("shared", "apart")}
        seen = interleave(sides, given.rounds, 1, done)
        apart = difference(folder)
    found = ratio(seen["shared"], seen["apart"])
    table = Table("side", "tokens with padding", "s of forward and backward: median (lowest–highest)")
    for name, seconds in seen.items():
        text = f"{statistics.median(seconds):.2f} ({min(seconds):.2f}–{max(seconds):.2f})"
        table.add_row(name, f"{tokens[name == 'shared']:,}", text)
    show(table)
    result = {"speedup": round(found.median, 3), "spread": words(found), "bound": round(bound, 3)}
    result |= {"of_flop_bound": round(found.median / bound, 3), "max_grad_diff": apart}
    finish(result, given.json)


if __name__ == "__main__":
    main()
