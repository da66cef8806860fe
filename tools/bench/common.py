"""What the benchmarks share: interleaved rounds, ratios, a peer's own environment, progress, and the JSON line at the end.

for each round:  ours → theirs → ours → theirs → …       so that the machine's noise hits both sides alike
ratio of a round = their seconds / our seconds           higher is better; reported: the median, with all rounds' spread
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from relax_hpc.supervise.environment import ALLOCATOR

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / ".bench"
"""Where benchmarks keep their environments, data and logs; ignored by git."""
SIDES = Path(__file__).resolve().parent / "sides"
LOCKS = Path(__file__).resolve().parent / "locks"
TORCH = "torch==2.13.0"
QUIET_LOAD = 0.7
"""Load average of the last minute above which figures are not worth keeping: threads that spin for a core lose it."""
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}

LOAD_BEFORE = os.getloadavg()[0]
"""Load average when the benchmark began."""

console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
T = TypeVar("T")
_shown: list[Table] = []


@dataclass(frozen=True)
class Ratio:
    """Ours over theirs in speed, one value a round."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}–{self.high:.2f})"


def ratio(ours_s: Sequence[float], theirs_s: Sequence[float]) -> Ratio:
    """Speed of ours over speed of theirs, round by round. Raises ValueError when the rounds do not pair up."""
    each = [theirs / ours for ours, theirs in zip(ours_s, theirs_s, strict=True)]
    return Ratio(statistics.median(each), min(each), max(each))


def interleave(
    sides: Mapping[str, Callable[[int], T]],
    rounds: int,
    warmup: int = 0,
    done: Callable[[], None] = lambda: None,
) -> dict[str, list[T]]:
    """Call every side in turn, `warmup + rounds` times, with the round's number; what the last `rounds` rounds returned."""
    seen: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(warmup + rounds):
        for name, side in sides.items():
            value = side(number)
            if number >= warmup:
                seen[name].append(value)
        done()
    return seen


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr, lines where that is no terminal; yields the function that moves it on by one."""
    if not console.is_terminal:
        began, made = time.monotonic(), itertools.count(1)
        console.print(f"{what}: 0 of {total}")
        yield lambda: console.print(f"{what}: {next(made)} of {total} after {time.monotonic() - began:.0f} s")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Say what is being done, for as long as it is; a line where stderr is no terminal."""
    if not console.is_terminal:
        console.print(f"{what} …")
    with console.status(what):
        yield


def parser(docstring: str | None) -> argparse.ArgumentParser:
    """The command line that all benchmarks have. Defaults answer within ten minutes on two cores; docs/benchmarks.md says with
    how many seeds, rounds and faults its figures were made.
    """
    made = argparse.ArgumentParser(description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--json", action="store_true", help="print the results as one JSON object, the last line of stdout"
    )
    return made


def parse(arguments: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; say so when something else is keeping the machine busy."""
    given = arguments.parse_args()
    load = os.getloadavg()[0]
    if load > QUIET_LOAD:
        console.print(
            f"[yellow]the machine is not quiet (load {load:.1f}): these figures show that it works, not how fast it is"
        )
    return given


def show(table: Table) -> None:
    """Print a table, and have `finish` put it into the JSON: docs/benchmarks.md is made from it."""
    console.print(table)
    _shown.append(table)


def finish(result: dict[str, Any], as_json: bool) -> None:
    """Print the results: readable ones on stderr always, one JSON line on stdout when asked for, with the tables shown."""
    console.print_json(data=result)
    if as_json:
        print(json.dumps({**result, "about": about(), "tables": [_data(table) for table in _shown]}), flush=True)


def about() -> dict[str, str]:
    """The command, date and machine of these figures."""
    command = shlex.join(["python", os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    machine = f"{len(os.sched_getaffinity(0))} cores, {memory}, {file_system(ROOT)}"
    return {"command": command, "date": f"{date.today()}", "machine": machine, "load_before": f"{LOAD_BEFORE:.1f}"}


def _data(table: Table) -> dict[str, Any]:
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    return {"columns": [str(column.header) for column in table.columns], "rows": [*zip(*columns, strict=True)]}


def file_system(path: Path) -> str:
    """The type of the file system that holds `path`, such as 'ext4'."""
    where = path.resolve()
    mounts = {Path(p.mountpoint): p.fstype for p in psutil.disk_partitions(all=True)}
    return next((mounts[p] for p in (where, *where.parents) if p in mounts), "unknown")


def disk_directory(name: str) -> Path:
    """A directory of the benchmark's own that really lies on a disk; ends the program where it would lie in memory."""
    folder = BENCH / name
    folder.mkdir(parents=True, exist_ok=True)
    kind = file_system(folder)
    if kind in MEMORY_FILE_SYSTEMS:
        raise SystemExit(
            f"'{folder}' is on {kind}, which keeps nothing: fsync costs nothing there; run from a checkout on a disk"
        )
    return folder.resolve()  # strace names files so


def peer_environment(name: str) -> Path:
    """The python of a virtual environment of the benchmark's own, made from locks/NAME.txt when it is not there yet.

    torch comes first and by its exact version, so that the lock's other packages cannot pull another one.
    """
    lock = LOCKS / f"{name}.txt"
    folder = BENCH / "environments" / name
    python, stamp = folder / "bin" / "python", folder / "lock.sha256"
    wanted = hashlib.sha256(TORCH.encode() + lock.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    with doing(f"installing {lock.name} into {folder} (some minutes, once)"):
        venv.create(folder, with_pip=True, clear=True, symlinks=True)
        for what in ([TORCH], ["-r", str(lock)]):
            subprocess.run([str(python), "-m", "pip", "install", "-qq", *what], check=True, stdout=sys.stderr)
        if "torchvision==" in lock.read_text() and subprocess.run([str(python), "-c", "import torchvision"]).returncode:
            site = next(folder.glob("lib/python*/site-packages"))
            shutil.copy(ROOT / "tools" / "torchvision_cpu.py", site)  # a CUDA build of it beside a CPU build of torch
            (site / "torchvision_cpu.pth").write_text("import torchvision_cpu")
    stamp.write_text(wanted)
    return python


def our_environment(threads: int = 1) -> dict[str, str]:
    """The environment of a child process that imports this checkout's relax_hpc."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **ALLOCATOR, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(threads)}
