"""Memory: a reader's peak over the slice it reads, and all processes of the quickstart together.

reader_peak_over_slice: a 1 GB shard on disk; a fresh process opens it and takes the samples of one rank of eight. How far its
resident memory rises at most (VmHWM, reset before), over the bytes of the slice in memory (all arrays of Rollouts).
quickstart_peak_mb: proportional set size (shared pages counted once) of the command and all its descendants, summed, its most
over the whole run. Printed besides: how much each process grew from the first fifth of the steps to the last.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import psutil
from rich.table import Table

from tools.bench.common import SIDES, console, disk_directory, doing, finish, our_environment, parse, parser, show
from tools.bench.runs import QUICKSTART, run

EVERY_S = 0.5
SCRIPT = str(SIDES / "shard_memory.py")


def reader_peak(folder: Path, how: str) -> dict[str, int]:
    """What a fresh reader of one rank's slice saw (see sides/shard_memory.py)."""
    command = [sys.executable, SCRIPT, "read", str(folder / "large.h5"), "--how", how]
    printed = subprocess.run(command, check=True, env=our_environment(), stdout=subprocess.PIPE, text=True).stdout
    return {name: int(value) for name, value in json.loads(printed).items()}


def name_of(process: psutil.Process) -> str:
    """The role's name where the process is one, else its module or program, and pid."""
    words = " ".join(process.cmdline()).split()
    for option in ("--name", "-m"):
        if option in words[:-1]:
            name = words[words.index(option) + 1]
            return name if option == "--name" else f"{name} ({process.pid})"
    return f"{Path(words[0]).name if words else '?'} ({process.pid})"


def sample(top: psutil.Process) -> Iterator[tuple[str, int, int]]:
    """(name, proportional set size, bytes that no other process shares) of `top` and its descendants.

    Only the last can show growth: the first changes with whatever else maps the same libraries.
    """
    for process in [top, *top.children(recursive=True)]:
        try:
            seen = process.memory_full_info()
            yield name_of(process), seen.pss, seen.uss
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue


class Watch:
    """Samples a command's memory until it ends."""

    def __init__(self) -> None:
        self.peak = 0
        self.series: dict[str, list[int]] = defaultdict(list)

    def __call__(self, process: subprocess.Popen[bytes]) -> None:
        top = psutil.Process(process.pid)
        while True:
            try:
                process.wait(EVERY_S)
                return
            except subprocess.TimeoutExpired:
                now = list(sample(top))
            self.peak = max(self.peak, sum(proportional for _, proportional, _ in now))
            for name, _, own in now:
                self.series[name].append(own)


def growth(series: list[int]) -> tuple[float, float]:
    """(MB in the second fifth of the samples, MB in the last fifth), medians; the first fifth is start and warm-up."""
    fifth = max(1, len(series) // 5)
    return float(np.median(series[fifth : 2 * fifth] or series)) / 1e6, float(np.median(series[-fifth:])) / 1e6


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=500, help="run.steps of the quickstart")
    arguments.add_argument("--shard-bytes", type=int, default=10**9, help="size of the shard that is read")
    given = parse(arguments)
    folder = disk_directory("memory")
    with doing("making the shard"):
        make = [sys.executable, SCRIPT, "make", str(folder / "large.h5"), "--bytes", str(given.shard_bytes)]
        subprocess.run(make, check=True, env=our_environment())
    reader, strided = reader_peak(folder, "stretch"), reader_peak(folder, "strided")
    shutil.rmtree(folder)
    for how, seen in (("samples in a row", reader), ("every eighth sample", strided)):
        console.print(f"{how}: peak {seen['peak'] / 1e6:.0f} MB = {seen['peak'] / seen['slice']:.2f} × the slice in memory ({seen['slice'] / 1e6:.0f} MB) "
                      f"= {seen['peak'] / seen['file_slice']:.2f} × its bytes in the file")  # fmt: skip
    watch = Watch()
    with doing(f"quickstart, {given.steps} steps"):
        run(QUICKSTART, "memory", {"run.steps": given.steps}, watch)
    table = Table("process", "peak MB of its own", "in the second fifth", "in the last fifth")
    for name, series in watch.series.items():
        if len(series) >= 10:
            table.add_row(name, f"{max(series) / 1e6:.0f}", *(f"{mb:.0f}" for mb in growth(series)))
    show(table)
    finish(
        {
            "reader_peak_over_slice": round(reader["peak"] / reader["slice"], 3),
            "quickstart_peak_mb": round(watch.peak / 1e6),
        },
        given.json,
    )


if __name__ == "__main__":
    main()
