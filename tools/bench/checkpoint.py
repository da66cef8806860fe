"""The price of a checkpoint's checksums: writing and loading one with them and without, in turn in one run.

write: tensors of a model and of AdamW's moments until the checkpoint is under its name, on the disk. load: from there into memory, every
byte of which was read. Without: nothing is hashed, sealed or compared; all else is the same. The page cache is warm.

write_ratio, load_ratio: seconds with over seconds without, median of the rounds. write_cpu_ratio, load_cpu_ratio: the same of CPU seconds of all
threads, which other processes on the machine change less.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from rich.table import Table

from relax_hpc import checkpoint
from relax_hpc.files import folder_checksums
from relax_hpc.files.run_dir import RunDir
from relax_hpc.trainers import state_files
from tools.bench.common import disk_directory, finish, interleave, parse, parser, progress, ratio, show

TENSORS, WARMUP = 64, 1
WHAT = ("write", "load", "write_cpu", "load_cpu")


class NoDigest:
    """A digest of nothing."""

    def update(self, data: Any) -> None: ...

    def hexdigest(self) -> str:
        return "-"  # of a known file, which is not read back


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Checkpoints are written and loaded as they are: what the price of checksums is measured against."""
    with (
        patch("relax_hpc.files.folder_checksums.xxhash.xxh3_128", NoDigest),
        patch("relax_hpc.files.read_ahead.xxhash.xxh3_128", NoDigest),
        patch.object(folder_checksums, "compare", lambda path, found=None: None),
    ):
        yield


def timed(act: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and CPU seconds of all threads."""
    begin, cpu = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - begin, time.process_time() - cpu


class Side:
    """A run's folder and what its trainer holds: as many bytes of weights as of each of AdamW's two moments."""

    def __init__(self, root: Path, total_bytes: int) -> None:
        self.run, self.commit_dir = RunDir(root), root / "commit_dir"
        self.run.create()
        self.commit_dir.mkdir()
        count = total_bytes // 3 // 4 // TENSORS
        model = {f"layers.{i}.weight": torch.randn(count) for i in range(TENSORS)}
        moments = {
            f"{kind}/{name}": tensor * 0.1 for kind in ("exp_avg", "exp_avg_sq") for name, tensor in model.items()
        }
        self.files = {state_files.MODEL: model, **state_files.in_parts(state_files.OPTIMIZER, moments)}
        self.model = {name: torch.zeros_like(tensor) for name, tensor in model.items()}

    def save(self, step: int) -> None:
        folder = checkpoint.begin(self.commit_dir, step)
        checkpoint.commit(self.run, folder, step, {}, state_files.write(folder, self.files))

    def load(self, step: int) -> None:
        folder = self.run.checkpoint(step)
        checkpoint.read_state(folder)
        path = folder / state_files.MODEL
        state_files.fill(self.model, state_files.read(path), path)
        state_files.read_parts(folder, state_files.OPTIMIZER, keep=True)

    def turn(self, step: int) -> tuple[float, ...]:
        """Seconds of writing and of loading, and the CPU seconds of both."""
        (write, write_cpu), (load, load_cpu) = timed(lambda: self.save(step)), timed(lambda: self.load(step))
        shutil.rmtree(self.run.checkpoint(step))
        return write, load, write_cpu, load_cpu

    def bare(self, step: int) -> tuple[float, ...]:
        with without_checksums():
            return self.turn(step)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=15, help="interleaved rounds, after one that warms up")
    arguments.add_argument("--mb", type=int, default=400, help="size of a checkpoint")
    given = parse(arguments)
    root = disk_directory("checkpoint")
    side = Side(root, given.mb * 10**6)
    with progress("checkpoint: rounds", given.rounds + WARMUP) as step:
        seen = interleave({"with": side.turn, "without": side.bare}, given.rounds, WARMUP, step)
    shutil.rmtree(root)
    checked, bare = (np.array(seen[name]) for name in ("with", "without"))
    table, found = Table("what", "with (s)", "without (s)", "with over without"), dict[str, float]()
    for i, what in enumerate(WHAT):
        price = ratio(bare[:, i].tolist(), checked[:, i].tolist())
        table.add_row(what, f"{np.median(checked[:, i]):.3f}", f"{np.median(bare[:, i]):.3f}", f"{price.median:.3f} ({price.low:.3f}–{price.high:.3f})")  # fmt: skip
        found[f"{what}_ratio"] = round(price.median, 3)
    show(table)
    finish(found, given.json)


if __name__ == "__main__":
    main()
