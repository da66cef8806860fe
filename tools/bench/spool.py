"""The spool against TransferQueue's client and against a raw file, all in one interleaved run.

put: from per-sample arrays in the producer's process until the samples can be had by others. Ours: encoded, written,
     fsynced, linked, the folder fsynced, on a disk (a memory file system is refused). TransferQueue: the call returned, the
     samples are in its storage processes' memory.
get: another process has every value of every column and has summed them. Ours: from listing the folder on. The page cache
     is warm, as it is for a trainer on the worker's node.
raw: the same bytes, flat already, written to one file and fsynced by the producer; read and summed by the consumer.

Both sides carry the same samples (about 2 k tokens, lognormal) and columns (tokens int32, logprobs float32, loss mask uint8,
reward float32); ours also stores prompts, versions and checksums. Both prepare their own kind of batch before the clock
starts: list[Group], or TensorDicts of nested tensors. Every process is persistent; calls are made one after the other.

put_ratio, get_ratio: their seconds over ours. check_ratio: CPU seconds of a get over those of one of the same shards that reads each column
in one piece and compares nothing (goal: 1.03 at most). raw_ratio: raw write + read over our put + get, at `all`, the lower of the two
sizes. syscalls_per_trajectory: file-system calls (strace) of one request of 512 samples from the write to the last byte read.
publish_to_read_p99_ms: from the beginning of publishing (64 samples) to the values in a reader that polls as the trainer does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from rich.table import Table

from relax_hpc.supervise.environment import ALLOCATOR
from tools.bench.common import (
    BENCH,
    SIDES,
    Ratio,
    console,
    disk_directory,
    finish,
    interleave,
    our_environment,
    parse,
    parser,
    peer_environment,
    progress,
    ratio,
    show,
)
from tools.bench.sides.child import Child
from tools.bench.sides.payload import MARKER_BEGIN, MARKER_END

SIZES = (512, 4096)
BATCHES = ("8", "64", "all")
STREAM, STREAM_WAIT_S = 400, 0.03
CHECK_PAIRS = 31
"""A get takes milliseconds: fewer pairs of them say nothing about three percent."""
NO_FILE = {"mmap", "mprotect", "munmap", "brk"}
"""Calls in strace's file and descriptor classes that ask nothing of a file system."""


def child(stack: ExitStack, name: str, python: str, script: str, environment: dict[str, str]) -> Child:
    command = [python, str(SIDES / script)]
    return stack.enter_context(Child(name, command, BENCH / "logs" / f"spool-{name}.log", environment))


class Sides:
    """The processes of both sides."""

    def __init__(self, stack: ExitStack, root: Path) -> None:
        self.root = str(root)
        self.producer = child(stack, "producer", sys.executable, "ours.py", our_environment())
        self.consumer = child(stack, "consumer", sys.executable, "ours.py", our_environment())
        self.peer = child(
            stack,
            "transferqueue",
            str(peer_environment("transferqueue")),
            "transferqueue.py",
            {**os.environ, **ALLOCATOR, "RAY_USAGE_STATS_ENABLED": "0"},
        )

    def prepare(self, samples: int, batch: int) -> int:
        """Bytes of the payload, which both sides must agree on."""
        ours = [s.call("prepare", root=self.root, samples=samples, batch=batch) for s in (self.producer, self.consumer)]
        theirs = self.peer.call("prepare", samples=samples, batch=batch)
        if {*ours} != {theirs}:
            raise AssertionError(f"the sides have payloads of {ours} and {theirs} bytes")
        return int(theirs)

    def ours(self, number: int) -> tuple[float, float]:
        seconds = self.producer.call("put", number=number), self.consumer.call("get")[0]
        self.producer.call("remove")
        return seconds

    def checking(self) -> Ratio:
        """CPU seconds of a get over those of one that compares nothing: CHECK_PAIRS gets each of the same shards, in turn first."""
        self.producer.call("put", number=0)
        cpu: dict[bool, list[float]] = {True: [], False: []}
        for number in range(CHECK_PAIRS):
            for check in (True, False) if number % 2 else (False, True):
                cpu[check].append(self.consumer.call("get", check=check)[1])
        self.producer.call("remove")
        return ratio(cpu[False], cpu[True])

    def theirs(self, number: int) -> tuple[float, float]:
        seconds = self.peer.call("put", number=number), self.peer.call("get", number=number)
        self.peer.call("remove", number=number)
        return seconds

    def raw(self, number: int) -> tuple[float, float]:
        return self.producer.call("raw_put", number=number), self.consumer.call("raw_get", number=number)


def compare(sides: Sides, rounds: int, sizes: tuple[int, ...]) -> tuple[dict[str, dict[str, Ratio]], Table]:
    """{"put" | "get" | "unchecked" | "raw": {"512x8": …}} and a table to look at."""
    found: dict[str, dict[str, Ratio]] = {"put": {}, "get": {}, "raw": {}, "unchecked": {}}
    table = Table("case", "MB", "put ratio", "get ratio", "get / get unchecked", "put samples/s ours · theirs", "get samples/s ours · theirs",
                  "put MB/s", "get MB/s", "raw ratio")  # fmt: skip
    warmup = 2
    cases = [(samples, batch) for samples in sizes for batch in BATCHES]
    with progress("spool: rounds", len(cases) * (rounds + warmup)) as step:
        for samples, batch in cases:
            nbytes = sides.prepare(samples, samples if batch == "all" else int(batch))
            turns = {"ours": sides.ours, "theirs": sides.theirs} | ({"raw": sides.raw} if batch == "all" else {})
            seen = {name: np.array(values) for name, values in interleave(turns, rounds, warmup, step).items()}
            ours, theirs, key = seen["ours"], seen["theirs"], f"{samples}x{batch}"
            for i, what in enumerate(("put", "get")):
                found[what][key] = ratio(ours[:, i].tolist(), theirs[:, i].tolist())
            found["unchecked"][key] = sides.checking()
            if batch == "all":
                found["raw"][key] = ratio(ours.sum(1).tolist(), seen["raw"].sum(1).tolist())
            a, b = np.median(ours, 0), np.median(theirs, 0)
            table.add_row(key, f"{nbytes / 1e6:.0f}", str(found["put"][key]), str(found["get"][key]), str(found["unchecked"][key]),
                          *(f"{samples / a[i]:.0f} · {samples / b[i]:.0f}" for i in (0, 1)),
                          *(f"{nbytes / 1e6 / a[i]:.0f} · {nbytes / 1e6 / b[i]:.0f}" for i in (0, 1)),
                          str(found["raw"].get(key, "")))  # fmt: skip
    return found, table


def count_calls(log: str) -> Counter[str]:
    """File-system calls by name between the two markers of an strace log (-f: lines begin with the process id)."""
    begin, end = log.index(MARKER_BEGIN), log.rindex(MARKER_END)
    between = log[log.index("\n", begin) + 1 : log.rindex("\n", 0, end) + 1]
    names = re.findall(r"^(?:\d+ +)?([a-z]\w*)\(", between, re.MULTILINE)
    return Counter(name for name in names if name not in NO_FILE)


def system_calls(root: Path, samples: int) -> Counter[str]:
    """File-system calls of writing, publishing, finding and reading one request of `samples` samples."""
    strace = shutil.which("strace")
    if strace is None:
        raise SystemExit("strace is not installed (apt-get install strace): it counts the system calls")
    log = root / f"strace-{samples}.txt"
    ours = [sys.executable, str(SIDES / "ours.py"), "--traced", str(samples), "--root", str(root / "traced")]
    subprocess.run([strace, "-f", "-o", str(log), "-e", "trace=%file,%desc", *ours], check=True, env=our_environment())
    return count_calls(log.read_text(errors="replace"))


def publish_to_read(sides: Sides, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[count] milliseconds from the beginning of publishing to the values read in another process."""
    for side in (sides.producer, sides.consumer):
        side.call("prepare", root=sides.root, samples=64, batch=64)
    sides.consumer.send("read_stream", count=count)
    begun = sides.producer.call("publish_stream", count=count, mean_wait_s=STREAM_WAIT_S)
    read_at = sides.consumer.receive()
    return np.array([(read_at[name] - begun[name]) * 1e3 for name in begun])


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--rounds", type=int, default=7, help="interleaved rounds of each case, after two that warm up"
    )
    arguments.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="samples in a case")
    given = parse(arguments)
    root = disk_directory("spool")
    with ExitStack() as stack:
        sides = Sides(stack, root)
        found, table = compare(sides, given.rounds, tuple(given.sizes))
        latency = publish_to_read(sides, STREAM)
    calls = {samples: system_calls(root, samples) for samples in (512, 64)}
    shutil.rmtree(root)
    show(table)
    for samples, counted in calls.items():
        console.print(
            f"{samples} samples a request: {counted.total()} calls, {counted.total() / samples:.3f} a sample: {dict(counted)}"
        )
    console.print(
        "publish to read, ms: "
        + ", ".join(f"p{q} {np.percentile(latency, q):.1f}" for q in (50, 90, 99))
        + f", max {latency.max():.1f}"
    )
    finish(
        {
            **{f"{what}_ratio": {k: round(r.median, 3) for k, r in found[what].items()} for what in ("put", "get")},
            "check_ratio": {k: round(r.median, 3) for k, r in found["unchecked"].items()},
            "raw_ratio": round(min(r.median for r in found["raw"].values()), 3),
            "syscalls_per_trajectory": round(calls[512].total() / 512, 4),
            "publish_to_read_p99_ms": round(float(np.percentile(latency, 99)), 2),
        },
        given.json,
    )


if __name__ == "__main__":
    main()
