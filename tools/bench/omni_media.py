"""Media in the spool: how often their bytes are stored, a worker's memory, and publishing against a raw file.

stored_ratio: bytes of all shards' files over the bytes of the distinct media, with 8 samples a prompt (goal: 1.05 at most).
peak_over_request: how far a worker's resident memory rises at most while it generates and publishes requests, over the media
     of one request (goal: 2 at most: one that is generated, one on its way to the disk). A fresh process (see sides/media_worker.py).
put_over_raw: one shard with media, encoded, written, fsynced, linked, the folder fsynced, against one file of the same bytes,
     joined already, written and fsynced, on a disk, in turns; their seconds over ours (goal: 0.7 at least).
decode_overlap: share of reading, decoding and processing prompts that is hidden behind generation (goal: 0.9 at least): what a
     worker waits for its prompts with one process that reads ahead, over what it takes without, of all requests but the first,
     medians of rounds in turns (see sides/media_ahead.py). Generating a request takes longer than decoding one here, as it does
     anywhere; with the memory that reading ahead takes, over the media of one request ("ahead_over_request").
"""

from __future__ import annotations

import json
import shutil
import statistics
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

AHEAD = (9, 8, 512, 192)
"""Requests, prompts of one, pixels of a picture's side, tokens of an answer."""


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


def decoding(folder: Path, rounds: int) -> dict[str, float]:
    """Seconds for which a worker waited for prompts, with and without reading ahead (see sides/media_ahead.py)."""

    def seen(data_workers: int) -> dict[str, float]:
        sizes = (*AHEAD, data_workers)
        command = [sys.executable, str(SIDES / "media_ahead.py"), str(folder / "ahead"), *map(str, sizes)]
        printed = subprocess.run(command, check=True, env=our_environment(), stdout=subprocess.PIPE, text=True).stdout
        shutil.rmtree(folder / "ahead")
        found: dict[str, float] = json.loads(printed.splitlines()[-1])
        return found

    pairs = [(seen(1), seen(0)) for _ in range(rounds)]

    def middle(side: int, name: str) -> float:
        return statistics.median(pair[side][name] for pair in pairs)

    return {
        "waited": middle(0, "read_s"), "decoding": middle(1, "read_s"), "generating": middle(0, "generate_s"),
        "generating_alone": middle(1, "generate_s"), "ahead": middle(0, "ahead") / middle(0, "request"),
    }  # fmt: skip


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
    arguments.add_argument("--ahead-rounds", type=int, default=3)
    given = parse(arguments)
    folder = disk_directory("omni_media")
    with doing("a worker generates and publishes"):
        sizes = (given.prompts // given.in_request, given.in_request, given.bytes, given.samples)
        seen = worker_memory(folder, *sizes)
    shutil.rmtree(folder / "run")
    put = put_over_raw(folder, given.in_request, given.bytes, given.samples, given.rounds)
    with doing("a worker reads ahead"):
        ahead = decoding(folder, given.ahead_rounds)
    shutil.rmtree(folder)
    table = Table("media of a request", "peak of a worker", "all distinct media", "all shards", "put over raw")
    table.add_row(*(f"{seen[name] / 1e6:.1f} MB" for name in ("request", "peak", "distinct", "stored")), str(put))
    show(table)
    hidden = 1 - ahead["waited"] / ahead["decoding"]
    table = Table(
        "decoding", "waited for it, read ahead", "hidden", "generating", "without reading ahead", "memory / request"
    )
    seconds = (f"{ahead[name]:.2f} s" for name in ("decoding", "waited", "generating", "generating_alone"))
    decoding_s, waited_s, generating_s, alone_s = seconds
    table.add_row(decoding_s, waited_s, f"{hidden:.1%}", generating_s, alone_s, f"{ahead['ahead']:.2f}")
    show(table)
    finish(
        {
            "stored_ratio": round(seen["stored"] / seen["distinct"], 4),
            "peak_over_request": round(seen["peak"] / seen["request"], 3),
            "put_over_raw": round(put.median, 3),
            "decode_overlap": round(hidden, 3),
            "ahead_over_request": round(ahead["ahead"], 3),
        },
        given.json,
    )


if __name__ == "__main__":
    main()
