"""Run `relax-hpc run` as a user does, as a subprocess, and read what the run's own metrics say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.bench.common import BENCH, ROOT, our_environment

QUICKSTART = ROOT / "recipes" / "quickstart.toml"


@dataclass(frozen=True)
class Finished:
    """A run that is done."""

    root: Path
    seconds: float
    """Wall clock of the whole command, process start and warm-up included."""
    steps: list[dict[str, Any]]
    """The trainer's metrics of every step, in order; a replayed step counts once, as it was last."""
    scores: list[tuple[int, float]]
    """(version, held-out score), by version."""


def command(target: Path, sets: Mapping[str, object], fork: str | None = None) -> list[str]:
    """The command line that runs `target`, a recipe, with these keys overridden; or forks it, a run, as `fork`."""
    options = [option for key, value in sets.items() for option in ("--set", f"{key}={value}")]
    forked = ["--fork", fork] if fork else []
    return [sys.executable, "-m", "relax_hpc", "run", str(target), *forked, *options]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def finished(root: Path, seconds: float) -> Finished:
    """What a done run's metrics say. Raises SystemExit when it is not done."""
    outcome = root / "outcome.json"
    if not outcome.is_file() or json.loads(outcome.read_text())["outcome"] != "done":
        raise SystemExit(f"the run '{root}' is not done: see {outcome} and {root / 'logs'}")
    lines = read_lines(root / "metrics" / "trainer-0.jsonl")
    steps = {line["step"]: line for line in lines if line.get("kind") == "step"}
    scores = {line["version"]: line["score"] for line in lines if line.get("kind") == "eval"}
    return Finished(root, seconds, [steps[s] for s in sorted(steps)], sorted(scores.items()))


def run(
    recipe: Path,
    name: str,
    sets: Mapping[str, object],
    watch: Callable[[subprocess.Popen[bytes]], None] | None = None,
    fork_of: Path | None = None,
) -> Finished:
    """Run `recipe` to its end in a fresh directory .bench/runs/NAME. `watch` sees the process while it runs.

    `fork_of`: go on from the newest checkpoint of that run, which lies beside it. Raises SystemExit with the end of its
    output when it fails.
    """
    root = BENCH / "runs" / name
    shutil.rmtree(root, ignore_errors=True)
    log = BENCH / "logs" / f"{name.replace('/', '-')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    where = {"run.root": root.parent, "run.name": root.name}
    line = command(fork_of, sets, root.name) if fork_of else command(recipe, {**sets, **where})
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(line, stdout=output, stderr=output, env=our_environment(), cwd=ROOT)
        try:
            if watch:
                watch(process)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()  # the supervisor checkpoints and stops its roles
                process.wait()
    if code:
        raise SystemExit(
            f"`relax-hpc run` ended with {code}; the end of {log}:\n{log.read_text(errors='replace')[-3000:]}"
        )
    return finished(root, time.monotonic() - begin)


def samples_per_second(ends_s: Sequence[float], batch: int, drop: int) -> float:
    """Steady throughput from the times at which steps ended, without the first `drop` steps.

    Raises ValueError when fewer than two steps are left.
    """
    kept = ends_s[drop:]
    if len(kept) < 2:
        raise ValueError(f"{len(ends_s)} steps, {drop} of them dropped: nothing left to measure between")
    return batch * (len(kept) - 1) / (kept[-1] - kept[0])
