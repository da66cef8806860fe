"""What an adapter of rank 16 saves, on a model of half a gigabyte in float32: bytes and seconds of a sync, the trainer's memory.

    whole     trainer's export ──file transport, fsync──► worker: verified ──► engine     the model
    adapter   the same                                                                  the adapter alone; the base is there

adapter_bytes_fraction: bytes of a version over those of a whole one. sync_speedup: seconds of a whole version over those of an adapter's,
from the export until the engine has it, in interleaved rounds; every version's weights differ, and the page cache is warm.
peak_memory_fraction: how far a trainer's resident memory rises in two steps, with the adapter over without. max_logprob_diff: of an
engine with base and adapter to one with the merged model, over tokens that the first one drew.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "sides"))

import numpy as np
import torch
from adapter import RANK, recipe_of
from rich.table import Table
from transformers import AutoConfig

from relax_hpc.engines import Sampling, TakesAdapters, make_engine
from relax_hpc.files.run_dir import RunDir
from relax_hpc.huggingface.lora import merged
from relax_hpc.recipe import Recipe
from relax_hpc.trainers.build import materialise
from relax_hpc.trainers.torch import TorchTrainer
from relax_hpc.weights import FilePublisher, FileReceiver
from tools.bench.common import (
    SIDES,
    Ratio,
    disk_directory,
    doing,
    finish,
    interleave,
    our_environment,
    parse,
    parser,
    progress,
    ratio,
    show,
)

MOVED = 0.02
"""Standard deviation of what is added to an adapter's second factor, so that it matters."""
ASKED, DRAWN = 4, 24


class Side:
    """A trainer, an engine, and the run directory between them."""

    def __init__(self, root: Path, model: Path, lora: bool) -> None:
        self.recipe: Recipe = recipe_of(lora)
        self.trainer = TorchTrainer(self.recipe, model, 0, 1)
        self.engine = make_engine(self.recipe, model)
        run = RunDir(root)
        run.create()
        commit = root / "i0"
        commit.mkdir()
        self.publisher, self.receiver = FilePublisher(run, commit, 0), FileReceiver(run)
        self.bytes = 0
        if lora:
            assert isinstance(self.engine, TakesAdapters)
            self.engine.load_base(self.trainer.export_base())

    @torch.no_grad()
    def move(self, number: int) -> None:
        """Change what learns."""
        generator = torch.Generator().manual_seed(number)
        for name, parameter in self.trainer.learning["policy"].parameters.items():
            if self.recipe.trainer.lora is None:
                parameter.mul_(1.0001)
            elif name.endswith("lora_B"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * MOVED)

    def sync(self, number: int) -> float:
        """Bring a new version to the engine; returns the seconds from its export on."""
        self.move(number)
        began = time.perf_counter()
        version = self.publisher.publish(number, self.trainer.export)
        with self.receiver.fetch(version) as fetched:
            tensors = dict(fetched)
            self.engine.load(number, tensors.items())
        took = time.perf_counter() - began
        self.bytes = sum(tensor.nbytes for tensor in tensors.values())
        return took


def logprob_diff(adapter: Side, whole: Side, model: Path) -> float:
    """The greatest difference of an answer's logprobs between the engine with an adapter and one with the merged model."""
    lora = adapter.recipe.trainer.lora
    assert lora is not None
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    parts = (dict(adapter.trainer.export_base()), dict(adapter.trainer.export()))
    whole.engine.load(0, merged(*parts, lora.alpha / lora.rank, config))
    asked = [np.random.default_rng(i).integers(3, 50, 12).astype(np.int32) for i in range(ASKED)]
    settings = Sampling(max_new_tokens=DRAWN)
    said = [side.engine.generate(asked, 1, settings, seed=0) for side in (adapter, whole)]
    worst = 0.0
    for one, other in zip(*said, strict=True):  # up to the first token that rounding draws otherwise
        same = len(np.trim_zeros(np.cumprod(one.tokens[: len(other.tokens)] == other.tokens[: len(one.tokens)])))
        worst = max(worst, float(np.abs(one.logprobs[:same] - other.logprobs[:same]).max(initial=0.0)))
    return worst


def peak(what: str, model: Path) -> int:
    command = [sys.executable, str(SIDES / "adapter.py"), what, str(model)]
    printed = subprocess.run(command, check=True, env=our_environment(), stdout=subprocess.PIPE, text=True).stdout
    return int(json.loads(printed.splitlines()[-1])["peak"])


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=7)
    given = parse(arguments)
    torch.set_num_threads(1)
    root = disk_directory("lora") / f"{time.time_ns()}"
    model = root / "model"
    with doing("making the model"):
        materialise(recipe_of(False).model, model, 0)
    with doing("two steps of each trainer"):
        memory = {what: peak(what, model) for what in ("adapter", "whole")}
    sides = {"adapter": Side(root / "adapter", model, True), "whole": Side(root / "whole", model, False)}
    numbers = iter(range(1, 1000))
    with progress("syncs", given.rounds + 1) as done:
        calls = {name: lambda _, side=side: side.sync(next(numbers)) for name, side in sides.items()}
        seen = interleave(calls, given.rounds, 1, done)
    faster: Ratio = ratio(seen["adapter"], seen["whole"])
    table = Table(f"rank {RANK}", "MB of a version", "seconds of a sync", "MB of the trainer at most")
    for name, side in sides.items():
        table.add_row(name, f"{side.bytes / 1e6:.1f}", f"{np.median(seen[name]):.3f}", f"{memory[name] / 1e6:.0f}")
    show(table)
    finish(
        {
            "adapter_bytes_fraction": round(sides["adapter"].bytes / sides["whole"].bytes, 4),
            "sync_speedup": round(faster.median, 2),
            "sync_speedup_low": round(faster.low, 2),
            "sync_speedup_high": round(faster.high, 2),
            "peak_memory_fraction": round(memory["adapter"] / memory["whole"], 3),
            "max_logprob_diff": logprob_diff(sides["adapter"], sides["whole"], model),
        },
        given.json,
    )


if __name__ == "__main__":
    main()
