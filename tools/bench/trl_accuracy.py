"""Against TRL's GRPOTrainer on the CPU: seconds until a held-out accuracy is reached, over paired seeds.

Both sides go on from the same warmed-up weights on two-digit addition, with as many prompts and samples a step, the same reward,
learning rate, betas, clip range and token denominator; both have two cores. TRL: one process, with as many threads as make its
first steps faster here, one or two. Ours: `relax-hpc run`, a trainer and a rollout worker of one thread each, max_staleness 1.

Weights are kept every few steps on both sides (on TRL's the clock stands still for it), and all are scored afterwards by the same
engine, greedily, on prompts that neither side saw. seconds: from the beginning of training, model loaded, to the end of the first
step whose weights reach the target; with_start: from the start of the command.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from rich.table import Table
from safetensors.torch import load_file

from relax_hpc.engines import Engine, Sampling, make_engine
from relax_hpc.launch.export import export_checkpoint
from relax_hpc.recipe import load_recipe
from tools.bench.common import BENCH, SIDES, finish, parse, parser, peer_environment, progress, ratio, show
from tools.bench.runs import run

SAME: dict[str, Any] = {
    "group": 8, "samples": 384, "new_tokens": 8, "learning_rate": 4e-4, "betas": [0.9, 0.99], "clip": [0.2, 0.28],
    "lr_warmup_steps": 10,
}  # fmt: skip
"""What both sides are given."""
RECIPE = """
[model]
name = "tiny"
hidden_size = 128
intermediate_size = 384
layers = 3
heads = 4
kv_heads = 2
context = 64
[algorithm]
name = "grpo"
group_size = {group}
clip = {clip}
[trainer]
prompts_per_step = 48
learning_rate = {learning_rate}
betas = {betas}
lr_warmup_steps = {lr_warmup_steps}
[rollout]
groups_per_request = 24
max_new_tokens = {new_tokens}
[[source]]
prompts = "train.jsonl"
"""
WARMUP = "{steps = 600, batch_size = 128, learning_rate = 2e-3, stop_at_loss = 0.42}"
HELD_OUT, CALIBRATION_STEPS, CALIBRATION_DROP = 1000, 12, 4
MEAN_OF = 3
"""Scores that are averaged, for one alone is noisy: a target is reached where its mean with those around it is."""


@dataclass(frozen=True)
class Side:
    """One run of one side."""

    started: float
    began: float
    ends: dict[int, float]
    """When each step ended."""
    weights: dict[int, Path]


def write_task(folder: Path) -> list[tuple[str, str]]:
    """train.jsonl, and what is held out of it."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    rows = [(f"{a} + {b}=", str(a + b)) for a, b in pairs]
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows[HELD_OUT:]]
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "recipe.toml").write_text(RECIPE.format(**SAME))
    return rows[:HELD_OUT]


def warmed_up(folder: Path, seed: int) -> Path:
    """The model folder that both sides begin with."""
    sets = {"sft_warm_start": WARMUP, "run.steps": 1, "trainer.learning_rate": 1e-12, "run.seed": seed}
    done = run(folder / "recipe.toml", f"trl-accuracy/warm-{seed}", sets)
    output = folder / f"model-{seed}"
    shutil.rmtree(output, ignore_errors=True)
    export_checkpoint(done.root, output)
    return output


def ours(folder: Path, model: Path, seed: int, steps: int, every: int) -> Side:
    started = time.time()
    sets = {
        "model": f"{{name = 'path', path = '{model}'}}", "run.steps": steps, "run.seed": seed, "run.checkpoint_every": every,
        "run.keep_checkpoints": steps, "async.max_staleness": 1,
    }  # fmt: skip
    done = run(folder / "recipe.toml", f"trl-accuracy/ours-{seed}", sets)
    kept = {
        n: done.root / "checkpoints" / f"step-{n:08d}" / "model.safetensors" for n in range(every, steps + 1, every)
    }
    first = done.steps[0]
    return Side(started, first["time"] - first["step_s"], {s["step"] + 1: s["time"] for s in done.steps}, kept)


def theirs(folder: Path, model: Path, seed: int, steps: int, every: int, threads: int) -> Side:
    output = folder / f"trl-{seed}"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    settings = {
        **SAME, "model": str(model), "prompts": str(folder / "train.jsonl"), "output": str(output), "steps": steps, "every": every,
        "seed": seed,
    }  # fmt: skip
    (output / "settings.json").write_text(json.dumps(settings))
    command = [str(peer_environment("trl")), str(SIDES / "trl_accuracy_peer.py"), str(output / "settings.json")]
    own = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    started = time.time()
    with (output / "log").open("w") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **own})
    if done.returncode:
        raise SystemExit(f"TRL's side ended with {done.returncode}: see {output / 'log'}")
    seen = json.loads(done.stdout.splitlines()[-1])
    kept = {n: output / f"{n}.safetensors" for n in range(every, steps + 1, every)}
    return Side(started, seen["began"], dict(enumerate(seen["ends"], 1)), kept)


def faster_threads(folder: Path, model: Path) -> int:
    """One or two: with which TRL's steps are faster here."""

    def step_s(threads: int) -> float:
        ends = theirs(folder, model, 0, CALIBRATION_STEPS, CALIBRATION_STEPS, threads).ends
        return ends[CALIBRATION_STEPS] - ends[CALIBRATION_DROP]

    return min((1, 2), key=step_s)


def accuracies(side: Side, engine: Engine, tokenizer: Any, rows: Sequence[tuple[str, str]]) -> dict[int, float]:
    """By step."""
    prompts = [np.array(tokenizer(prompt)["input_ids"], np.int32) for prompt, _ in rows]
    found, greedy = {}, Sampling(temperature=0.0, max_new_tokens=SAME["new_tokens"])
    for step, path in side.weights.items():
        engine.load(step, load_file(path).items())
        said = [tokenizer.decode(c.tokens, skip_special_tokens=True) for c in engine.generate(prompts, 1, greedy, 0)]
        found[step] = statistics.mean(text.strip() == answer for text, (_, answer) in zip(said, rows, strict=True))
    return found


def reached(scores: Mapping[int, float], target: float) -> int | None:
    """The first step whose score is the target's, as the mean of it and those around it; None where none is."""
    steps, half = sorted(scores), MEAN_OF // 2
    for i in range(half, len(steps) - half):
        if statistics.mean(scores[step] for step in steps[i - half : i + half + 1]) >= target:
            return steps[i]
    return None


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--seeds", type=int, default=1, metavar="N")
    arguments.add_argument("--steps", type=int, default=300, help="of each run (default: %(default)s)")
    arguments.add_argument("--every", type=int, default=10, help="steps between two scores")
    arguments.add_argument("--target", type=float, default=0.65, help="held-out accuracy (default: %(default)s)")
    given = parse(arguments)
    folder = BENCH / "trl-accuracy"
    rows = write_task(folder)
    found: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    table = Table("seed", "side", "steps to it", "s", "s with start", "s a step", "accuracy at the end")
    with progress("trl accuracy: warm-up, threads, both sides, both scores", 5 * given.seeds + 1) as done:
        threads = 0
        for seed in range(given.seeds):
            model = warmed_up(folder, seed)
            done()
            if not threads:
                threads = faster_threads(folder, model)
                done()
            sides = {"theirs": theirs(folder, model, seed, given.steps, given.every, threads)}
            done()
            sides["ours"] = ours(folder, model, seed, given.steps, given.every)
            done()
            for name, side in sides.items():
                found[name].append(measured(name, side, model, rows, given, table, seed))
                done()
    show(table)
    result: dict[str, Any] = {"target": given.target, "peer_threads": threads}
    for key in ("seconds", "with_start"):
        each = {name: [seen[key] for seen in values] for name, values in found.items()}
        spread = ratio(each["ours"], each["theirs"])
        result |= {
            f"ratio_{key}": {"median": round(spread.median, 2), "low": round(spread.low, 2), "high": round(spread.high, 2)},
            key: {name: [round(s, 1) for s in values] for name, values in each.items()},
        }  # fmt: skip
    finish(result, given.json)


def measured(
    name: str,
    side: Side,
    model: Path,
    rows: Sequence[tuple[str, str]],
    given: argparse.Namespace,
    table: Table,
    seed: int,
) -> dict[str, float]:
    """Raises SystemExit where the target was not reached."""
    recipe = load_recipe(BENCH / "trl-accuracy" / "recipe.toml", [f"model={{name='path', path='{model}'}}"])
    engine = make_engine(recipe, model)
    scores = accuracies(side, engine, engine.tokenizer, rows)  # type: ignore[attr-defined]  # the torch engine's
    step = reached(scores, given.target)
    if step is None:
        raise SystemExit(
            f"{name}, seed {seed}: {given.target} was not reached in {given.steps} steps: {scores}; raise --steps"
        )
    seen = {"seconds": side.ends[step] - side.began, "with_start": side.ends[step] - side.started}
    each = (side.ends[given.steps] - side.ends[given.every]) / (given.steps - given.every)
    numbers = (f"{seen['seconds']:.1f}", f"{seen['with_start']:.1f}", f"{each:.3f}", f"{scores[given.steps]:.3f}")
    table.add_row(str(seed), name, str(step), *numbers)
    return seen


if __name__ == "__main__":
    main()
