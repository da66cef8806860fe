"""A 1 GB shard, and a fresh process that reads one rank's slice of it: `python shard_memory.py make|read SHARD [RANK WORLD HOW]`.

`read` prints {"peak": …, "slice": …, "file_slice": …} in bytes: how far the resident memory rose at most while the slice was
read, what the slice holds in memory (all arrays of Rollouts), and what its token columns take in the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
import payload

from relax_hpc.files.publish import publish
from relax_hpc.records import Finish, Group, Prompt, Sample
from relax_hpc.spool.shard import Shard
from relax_hpc.spool.shard_writer import encode

GROUP, DISTINCT = 8, 2048
BYTES_PER_TOKEN = 9
"""tokens int32, logprobs float32, loss mask uint8."""


def make(path: Path, size: int) -> None:
    """Publish a shard of at least `size` bytes; its samples repeat a few thousand distinct ones, so that making it is cheap."""
    data = payload.make(DISTINCT)
    cuts = list(zip(data.offsets[:-1].tolist(), data.offsets[1:].tolist(), strict=True))
    samples = [
        Sample(data.tokens[a:b], data.loss_mask[a:b], data.logprobs[a:b], [(0, 3)], Finish.STOP, float(r), float(r))
        for (a, b), r in zip(cuts, data.rewards, strict=True)
    ]
    copies = -(-size // (BYTES_PER_TOKEN * len(data.tokens)))
    prompt = Prompt(0, 0, "a question", np.arange(64, dtype=np.int32), "42")
    groups = [Group(prompt, samples[i : i + GROUP]) for _ in range(copies) for i in range(0, DISTINCT, GROUP)]
    publish(path, encode("s000000-000", groups, {"version": 3}))


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (the most since the last reset) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def read(path: Path, rank: int, world: int, how: str) -> dict[str, int]:
    """Read samples [rank·N/world, (rank+1)·N/world), or every world-th one from `rank` on."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    with Shard(path) as shard:
        count = len(shard.samples)
        which = (
            np.arange(rank, count, world)
            if how == "strided"
            else np.arange(rank * count // world, (rank + 1) * count // world)
        )
        rollouts = shard.rollouts(which)
    arrays = [getattr(rollouts, f.name) for f in dataclasses.fields(rollouts)]
    held = sum(a.nbytes for a in arrays if isinstance(a, np.ndarray))
    return {"peak": resident("VmHWM") - before, "slice": held, "file_slice": BYTES_PER_TOKEN * len(rollouts.tokens)}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("what", choices=("make", "read"))
    arguments.add_argument("shard", type=Path)
    arguments.add_argument("--bytes", type=int, default=10**9)
    arguments.add_argument("--rank", type=int, default=3)
    arguments.add_argument("--world", type=int, default=8)
    arguments.add_argument("--how", choices=("stretch", "strided"), default="stretch")
    given = arguments.parse_args()
    if given.what == "make":
        make(given.shard, given.bytes)
    else:
        print(json.dumps(read(given.shard, given.rank, given.world, given.how)))


if __name__ == "__main__":
    main()
