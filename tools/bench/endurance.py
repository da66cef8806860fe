"""Thousands of steps with faults in between: does anything wear out? The quickstart's task, or videos, at max_staleness 2.

A random role (supervisor, trainer, worker; with videos, also the process that reads them ahead) is killed -9 `--faults` times, spread
over the run; a killed supervisor is followed by the same command again. Learning rate and clip range are the recipe's, the rate
constant. Seen every two seconds: of each process the memory that no other shares and its open files, and the bytes of shards, weights
and checkpoints on the disk (spool.keep = "needed").

tenths: medians over each tenth of the time. wear: the last tenth over the third one, for memory and files; 1 is none.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
from rich.table import Table

from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.analysis.audit import audit
from relax_hpc.supervise.lease import holder
from relax_hpc.telemetry import read_heartbeat, read_metrics
from tools.bench.chaos import Monkey
from tools.bench.common import ROOT, disk_directory, finish, parse, parser, progress, show
from tools.bench.omni import make_data
from tools.bench.runs import QUICKSTART

VIDEO = ROOT / "tools" / "bench" / "video.toml"
ROLES = ("supervisor", "trainer-0", "rollout-0")
READER, FORKS = "reader", "fork server"
"""The worker's child, which decodes videos ahead; the supervisor's, from which the others are forked."""
FOLDERS = ("shards", "weights", "checkpoints", "requests", "quarantine")
EVERY_S, TENTHS = 2.0, 10
SETS = ("async.max_staleness=2", "trainer.schedule=constant", "evaluation.every=100", "spool.keep=needed")


class Hunter(Monkey):
    """Kills the process that reads ahead, too."""

    def _pid(self, role: str) -> int | None:
        if role != READER:
            return super()._pid(role)
        while (worker := super()._pid("rollout-0")) is not None:
            if children := children_of(psutil.Process(worker)):
                return int(children[0].pid)
        return None


class Watch(threading.Thread):
    """Looks at a run until `stop`."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(daemon=True)
        self.run_dir, self._ended = run, threading.Event()
        self.seen: list[dict[str, float]] = []

    def run(self) -> None:
        while not self._ended.wait(EVERY_S):
            if self.run_dir.exists:
                self.seen.append(dict(self._processes()) | {f"{f} (MB)": size(self.run_dir.root / f) for f in FOLDERS})

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def _processes(self) -> Iterator[tuple[str, float]]:
        for name, process in self._named():
            try:
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                yield f"{name}: memory (MB)", process.memory_full_info().uss / 1e6
                yield f"{name}: open files", float(process.num_fds())
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue  # it was killed just now

    def _named(self) -> Iterator[tuple[str, psutil.Process]]:
        children = {"supervisor": FORKS, "rollout-0": READER}
        for role in ROLES:
            about = holder(self.run_dir) if role == "supervisor" else read_heartbeat(self.run_dir, role)
            try:
                process = psutil.Process(int((about or {"pid": 0})["pid"]))
            except psutil.NoSuchProcess:
                continue
            yield role, process
            if role in children:
                yield from ((children[role], child) for child in children_of(process))


def children_of(process: psutil.Process) -> list[psutil.Process]:
    """Those that run, none where it has ended."""
    try:
        return list(process.children())
    except psutil.NoSuchProcess:
        return []


def size(folder: Path) -> float:
    """Megabytes of all files below it; what goes away meanwhile does not count."""
    total = 0
    for where, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except FileNotFoundError:
                continue
    return total / 1e6


def tenths(values: Sequence[float]) -> list[float]:
    """Medians."""
    count = len(values)
    return [statistics.median(values[i * count // TENTHS : (i + 1) * count // TENTHS] or values) for i in range(TENTHS)]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--steps", type=int, default=1000, help="default: %(default)s")
    arguments.add_argument("--faults", type=int, default=6, help="default: %(default)s")
    arguments.add_argument("--seed", type=int, default=0, help="of the kills")
    arguments.add_argument("--video", action="store_true", help="prompts with videos instead of the quickstart's task")
    given = parse(arguments)
    if given.video:
        make_data()
    recipe, more = (VIDEO, []) if given.video else (QUICKSTART, ["evaluation.prompts=1000"])
    folder = disk_directory("endurance") / time.strftime("%H%M%S")
    folder.mkdir()
    values = (f"run.root={folder}", "run.name=long", f"run.steps={given.steps}", *SETS, *more)
    options = [word for value in values for word in ("--set", value)]
    with progress("faults", given.faults) as done:
        hit = [*ROLES, READER] if given.video else list(ROLES)
        monkey = Hunter(RunDir(folder / "long"), [str(recipe), *options], hit, random.Random(given.seed), done)
        watch = Watch(monkey.run)
        watch.start()
        monkey.drive(given.faults, given.steps)
        watch.stop()
    finish(report(monkey, watch), given.json)


def report(monkey: Monkey, watch: Watch) -> dict[str, Any]:
    lines = read_metrics(monkey.run.metrics / "trainer-0.jsonl")[0]
    scores = {r["version"]: r["score"] for r in lines if r["kind"] == "eval"}
    rewards = [r["raw_reward"] for r in lines if r["kind"] == "step"]
    found = audit(monkey.run.root)
    names = sorted({name for seen in watch.seen for name in seen})
    series = {name: tenths([seen[name] for seen in watch.seen if name in seen]) for name in names}
    series["reward in training"] = tenths(rewards)
    table = Table("medians over tenths of the time", *(str(i + 1) for i in range(TENTHS)))
    for name, each in series.items():
        table.add_row(name, *(f"{value:.3g}" for value in each))
    show(table)
    wears = {name: round(each[-1] / each[2], 3) for name, each in series.items() if ":" in name}
    return {
        "steps": len({r["step"] for r in lines if r["kind"] == "step"}), "faults": len(monkey.kills),
        "killed": dict(Counter(kill.split()[0] for kill in monkey.kills)), "lost": len(found.lost),
        "twice": len(found.twice), "over_bound": len(found.over_bound), "score": {str(v): round(s, 3) for v, s in sorted(scores.items())},
        "wear": wears, "spool_mb": [round(value, 1) for value in series["shards (MB)"]],
    }  # fmt: skip


if __name__ == "__main__":
    main()
