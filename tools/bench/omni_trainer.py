"""Training on prompts with pictures, a CPU thread a process: packed against padded, ranks balanced with and without the
pictures' cost, encoders on every process against a share on each.

    the same samples, the same weights ──► packed ──► prompts apart ──► padded ──► packed ──► …

padded_over_packed: seconds of a step where each sample stands in a row of its own, as long as the longest, with its own copy of the
prompt and its pictures, over those where a group's answers share one. apart_over_packed: rows are packed, and only the prompts are
not shared, so that pictures are encoded once a sample. Medians of interleaved rounds, with the lowest and highest.
idle: share of the time of --ranks data-parallel ranks that they wait for the slowest, of the CPU seconds of each rank's share, one
after the other, where trees are spread by tokens alone, and by tokens and patches; patches_of_most: the most patches that a rank
has, over the mean. Half of the prompts are text with long answers.
spread: Megatron-core with all processes in one tensor-parallel group (tensor = --worlds, sequence parallel), each of which encodes all
pictures, against parallel.spread_encoders. CPU seconds of a step, of all processes together and of the busiest one, since more
processes than cores share this machine: what spreading saves of work, not of time.
"""

from __future__ import annotations

import dataclasses
import io
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from rich.table import Table

from relax_hpc.algorithms import make_algorithm
from relax_hpc.media.families import family_of
from relax_hpc.media.process import Cell, Processor
from relax_hpc.recipe import Recipe
from relax_hpc.recipe.tables.source import Media as Limits
from relax_hpc.records import Media, Rollouts
from relax_hpc.trainers import make_trainer
from relax_hpc.trainers.build import materialise
from relax_hpc.trainers.forward import token_logprobs
from relax_hpc.trainers.packing import Rows, pack, plan
from relax_hpc.trainers.trees.segments import media_of
from relax_hpc.trainers.work import position_costs
from tools.bench.common import finish, interleave, parse, parser, progress, ratio, show
from tools.bench.trainers import TOKENS, padded, stepper, words

MODEL = {
    "name": "tiny", "context": 512, "hidden_size": 64, "intermediate_size": 192, "layers": 3, "heads": 4, "kv_heads": 4,
    "vision": {"hidden_size": 48, "intermediate_size": 128, "layers": 3, "heads": 4},
}  # fmt: skip
GROUP = 8
LETTERS = (15, 50)
"""Range of tokens that mean nothing to the processor."""
SIDES_PX = (64, 96, 128)
"""Sides of the pictures: 16 to 64 tokens, four patches each."""
MEAN_ANSWER, LONG_ANSWER, SIGMA = 24, 64, 0.7
TIMEOUT_S = 600
"""For all rounds of a group of processes."""


def recipe(**trainer: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": MODEL, "algorithm": {"name": "reinforce_plus_plus", "group_size": GROUP},
            "trainer": {"device": "cpu", "tokens_per_micro_batch": TOKENS, "learning_rate": 1e-6, **trainer},
            "rollout": {"max_new_tokens": 256}, "source": [{"task": "chain_sum"}],
        }
    )  # fmt: skip


def prompts(folder: Path, count: int) -> list[tuple[np.ndarray[Any, Any], Media | None]]:
    """A picture each, of every size in turn, by the model's own processor."""
    processor, rng = Processor(folder, Limits()), np.random.default_rng(0)
    made: list[tuple[np.ndarray[Any, Any], Media | None]] = []
    for number in range(count):
        side, file = SIDES_PX[number % len(SIDES_PX)], io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (side, side, 3), np.uint8)).save(file, "PNG")
        text = f"which of these is number {number}? {processor.family.marks['image']}"
        made.append(processor.tokens(text, [Cell("image", file.getvalue())], folder, special=True))
    return made


def samples(shown: list[tuple[np.ndarray[Any, Any], Media | None]], means: list[int]) -> Rollouts:
    """GROUP answers of random tokens to each prompt, of lognormal lengths around its mean."""
    rng = np.random.default_rng(1)
    each = [(tokens, media, mean) for (tokens, media), mean in zip(shown, means, strict=True) for _ in range(GROUP)]
    lengths = np.array([np.clip(int(rng.lognormal(np.log(mean), SIGMA)), 1, 200) for _, _, mean in each])
    total, count = int(lengths.sum()), len(each)
    return Rollouts(
        ids=[f"o/{i}" for i in range(count)],
        group=np.arange(count) // GROUP,
        rewards=rng.normal(size=count).astype(np.float32),
        raw_rewards=np.zeros(count, np.float32),
        prompt_tokens=np.concatenate([tokens for tokens, _, _ in each]),
        prompt_offsets=np.cumsum([0, *(len(tokens) for tokens, _, _ in each)]),
        tokens=rng.integers(*LETTERS, total).astype(np.int32),
        offsets=np.cumsum([0, *lengths]),
        loss_mask=np.ones(total, np.uint8),
        logprobs=np.full(total, -4, np.float32),
        versions=np.zeros(total, np.int32),
        finish=np.zeros(count, np.uint8),
        media=tuple(media for _, media, _ in each),
    )


def apart(rollouts: Rollouts) -> Rollouts:
    """The same samples, each a group of its own: none shares its prompt."""
    return dataclasses.replace(rollouts, group=np.arange(len(rollouts)))


def steps(folder: Path, made: Rollouts, rounds: int, done: Callable[[], None]) -> dict[str, Any]:
    """Seconds of a step on each side."""
    wide = apart(padded(made))
    wide = dataclasses.replace(wide, tokens=np.maximum(wide.tokens, LETTERS[0]))
    sides = {"packed": made, "apart": apart(made), "padded": wide}
    ours = recipe()
    trainer = make_trainer(ours, folder, 0, 1)
    seen = interleave({name: stepper(trainer, ours, side) for name, side in sides.items()}, rounds, 1, done)
    found = {name: ratio(seen["packed"], seen[name]) for name in ("apart", "padded")}
    table = Table("side", "s a step", "slower than packed")
    for name, seconds in seen.items():
        table.add_row(name, f"{statistics.median(seconds):.3f}", str(found.get(name, "")))
    show(table)
    return {
        "step_s": {name: round(statistics.median(seconds), 3) for name, seconds in seen.items()},
        **{f"{name}_over_packed": words(each) for name, each in found.items()},
    }


def idle(folder: Path, made: Rollouts, ranks: int, rounds: int, done: Callable[[], None]) -> dict[str, Any]:
    """Shares of time in which ranks wait for the slowest: by tokens alone, and by tokens and patches."""
    model = make_trainer(recipe(), folder, 0, 1).model  # type: ignore[attr-defined]
    family, costs = family_of(model.config), position_costs(model)
    plans = {"tokens": plan(made, ranks, TOKENS), "tokens and patches": plan(made, ranks, TOKENS, family, costs)}

    def seconds(share: list[Rows]) -> float:
        began = time.process_time()
        for rows in share:
            batch = pack(made, rows, family=family, config=model.config)
            targets = torch.from_numpy(made.tokens[batch.targets].astype(np.int64))
            token_logprobs(model, batch, targets, 1.0)[0].sum().backward()
        return time.process_time() - began

    def waiting(shares: list[list[Rows]]) -> Callable[[int], float]:
        return lambda number: 1 - statistics.mean(each := [seconds(share) for share in shares]) / max(each)

    def patches(share: list[Rows]) -> int:
        media = [media_of(made, tree[0]) for rows in share for row in rows for tree in row]
        return sum(len(one.tensors["pixel_values"]) for one in media if one)

    most = {name: max(each := [*map(patches, shares)]) / statistics.mean(each) for name, shares in plans.items()}
    seen = interleave({name: waiting(shares) for name, shares in plans.items()}, rounds, 1, done)
    table = Table("ranks balanced by", "idle share: median (lowest–highest)", "most patches of a rank over the mean")
    for name, found in seen.items():
        middle = f"{statistics.median(found):.3f} ({min(found):.3f}–{max(found):.3f})"
        table.add_row(name, middle, f"{most[name]:.2f}")
    show(table)
    shares = {name.replace(" ", "_"): round(statistics.median(found), 3) for name, found in seen.items()}
    most = {name.replace(" ", "_"): round(each, 3) for name, each in most.items()}
    return {"idle": shares, "patches_of_most": most, "patch_in_tokens": round(costs["vision"], 3)}


def process(rank: int, world: int, folder: Path, made: Rollouts, rounds: int, results: Any) -> None:
    """One of a tensor-parallel group: puts (rank, CPU seconds of a step on each side)."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet-{world}", rank=rank, world_size=world)
    split = {"tensor": world, "sequence": True}
    sides = {
        name: recipe(backend="megatron", processes=world, parallel={**split, "spread_encoders": name == "spread"})
        for name in ("replicated", "spread")
    }
    trainer: Any = make_trainer(sides["replicated"], folder, rank, world)
    algorithm = make_algorithm(trainer.recipe.algorithm)

    def step(name: str) -> Callable[[int], float]:
        def seconds(number: int) -> float:
            trainer.recipe = sides[name]  # read anew for each step's batches
            dist.barrier()
            began = time.process_time()
            trainer.step(made, algorithm, number)
            return time.process_time() - began

        return seconds

    results.put((rank, interleave({name: step(name) for name in sides}, rounds, 1)))
    dist.barrier()
    dist.destroy_process_group()


def spread(folder: Path, made: Rollouts, worlds: list[int], rounds: int, done: Callable[[], None]) -> dict[str, Any]:
    """CPU seconds of a step where each process encodes all pictures, over those where each encodes a share."""
    context = multiprocessing.get_context("spawn")
    table = Table("processes", "CPU s a step, replicated", "spread", "all together: saved", "the busiest: saved")
    found: dict[str, Any] = {}
    for world in worlds:
        results = context.Queue()
        each = [context.Process(target=process, args=(r, world, folder, made, rounds, results)) for r in range(world)]
        for one in each:
            one.start()
        by_rank = dict(results.get(timeout=TIMEOUT_S) for _ in each)
        for one in each:
            one.join()
        sides = {
            name: list(zip(*(by_rank[r][name] for r in by_rank), strict=True)) for name in ("replicated", "spread")
        }
        whole, busiest = (
            ratio([of(step) for step in sides["spread"]], [of(step) for step in sides["replicated"]])
            for of in (sum, max)
        )
        middle = {name: statistics.median(map(sum, steps)) for name, steps in sides.items()}
        table.add_row(str(world), *(f"{seconds:.3f}" for seconds in middle.values()), str(whole), str(busiest))
        found[str(world)] = {"together": words(whole), "busiest": words(busiest)}
        done()
    show(table)
    return {"replicated_over_spread": found}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=5, help="interleaved rounds, after one that warms up")
    arguments.add_argument("--prompts", type=int, default=12, help=f"of a step, {GROUP} samples each")
    arguments.add_argument("--ranks", type=int, default=4, help="data-parallel ranks, measured one after the other")
    arguments.add_argument("--worlds", type=int, nargs="*", default=[2, 4], help="sizes of the tensor-parallel group")
    given = parse(arguments)
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as where,
        progress("omni_trainer: rounds", 2 * (given.rounds + 1) + len(given.worlds)) as done,
    ):
        folder = Path(where)
        materialise(recipe().model, folder, 0)
        shown = prompts(folder, given.prompts)
        seen = samples(shown, [MEAN_ANSWER] * len(shown))
        result = steps(folder, seen, given.rounds, done)
        text: list[tuple[np.ndarray[Any, Any], Media | None]] = [(tokens[:20], None) for tokens, _ in shown]
        mixed = samples([*shown, *text], [MEAN_ANSWER // 4] * len(shown) + [LONG_ANSWER] * len(text))
        result |= idle(folder, mixed, given.ranks, given.rounds, done)
        result |= spread(folder, seen, given.worlds, given.rounds, done)
    finish(result, given.json)


if __name__ == "__main__":
    main()
