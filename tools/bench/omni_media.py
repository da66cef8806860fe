"""Media in the spool: how often their bytes are stored, a worker's memory, and publishing against a raw file.

stored_ratio: bytes of all shards' files over the bytes of the distinct media, with 8 samples a prompt (goal: 1.05 at most).
peak_over_request: how far a worker's resident memory rises at most while it generates and publishes requests, over the media
     of one request (goal: 2 at most: one that is generated, one on its way to the disk). A fresh process (see sides/media_worker.py).
put_over_raw: one shard with media, encoded, written, fsynced, linked, the folder fsynced, against one file of the same bytes,
     joined already, written and fsynced, on a disk, in turns; their seconds over ours (goal: 0.7 at least).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "sides"))

import numpy as np
from media_worker import groups_of
from rich.table import Table

from relax_hpc.files.publish import publish, write_file
from relax_hpc.records import Group
from relax_hpc.spool.shard_writer import encode
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


def worker_memory(folder: Path, *sizes: int) -> dict[str, int]:
    """What a fresh worker saw (see sides/media_worker.py)."""
    command = [sys.executable, str(SIDES / "media_worker.py"), str(folder / "run"), *map(str, sizes)]
    printed = subprocess.run(command, check=True, env=our_environment(), stdout=subprocess.PIPE, text=True).stdout
    return {name: int(value) for name, value in json.loads(printed).items()}


class Puts:
    """The same media as a shard and as a raw file."""

    def __init__(self, folder: Path, groups: list[Group]) -> None:
        self._folder, self._groups = folder, groups
        image = encode("r000000-000", groups, {"version": 0})
        self._raw = image if isinstance(image, bytes) else b"".join(image)

    def ours(self, number: int) -> float:
        path = self._folder / f"shard-{number}.h5"
        begin = time.perf_counter()
        publish(path, encode("r000000-000", self._groups, {"version": 0}))
        seconds = time.perf_counter() - begin
        path.unlink()
        return seconds

    def raw(self, number: int) -> float:
        path = self._folder / f"raw-{number}"
        begin = time.perf_counter()
        write_file(path, self._raw)
        seconds = time.perf_counter() - begin
        path.unlink()
        return seconds


def put_over_raw(folder: Path, prompts: int, size: int, samples: int, rounds: int) -> Ratio:
    puts = Puts(folder, groups_of(np.random.default_rng(0), prompts, size, samples))
    with progress("puts", rounds + 2) as done:
        seen = interleave({"ours": puts.ours, "raw": puts.raw}, rounds, 2, done)
    return ratio(seen["ours"], seen["raw"])


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--prompts", type=int, default=256, help="prompts of all requests together")
    arguments.add_argument("--in-request", type=int, default=32, help="prompts of a request")
    arguments.add_argument("--bytes", type=int, default=2_000_000, help="bytes of a prompt's media")
    arguments.add_argument("--samples", type=int, default=8, help="samples of a prompt")
    arguments.add_argument("--rounds", type=int, default=15)
    given = parse(arguments)
    folder = disk_directory("omni_media")
    with doing("a worker generates and publishes"):
        sizes = (given.prompts // given.in_request, given.in_request, given.bytes, given.samples)
        seen = worker_memory(folder, *sizes)
    shutil.rmtree(folder / "run")
    put = put_over_raw(folder, given.in_request, given.bytes, given.samples, given.rounds)
    shutil.rmtree(folder)
    table = Table("media of a request", "peak of a worker", "all distinct media", "all shards", "put over raw")
    table.add_row(*(f"{seen[name] / 1e6:.1f} MB" for name in ("request", "peak", "distinct", "stored")), str(put))
    show(table)
    finish(
        {
            "stored_ratio": round(seen["stored"] / seen["distinct"], 4),
            "peak_over_request": round(seen["peak"] / seen["request"], 3),
            "put_over_raw": round(put.median, 3),
        },
        given.json,
    )


if __name__ == "__main__":
    main()
