"""One run on three hosts: supervisor and trainer on the first, a rollout worker on each of the others.

backing folder ─┬─ mount trainer    relax-hpc run: `python -m tools.faults.hosts FOLDER run RECIPE …`
                ├─ mount rollout-0  a worker, which has the run's folder by this mount's path, and a disk of its own
                └─ mount rollout-1  another
Each mount has caches of its own: what one host changes, another learns late. The processes are those of `relax-hpc run`, forked
and started again by its supervisor.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_hpc.cli import app
from relax_hpc.files.run_dir import RunDir
from relax_hpc.recipe.tables.run import Supervision
from relax_hpc.supervise import rollout_workers
from relax_hpc.supervise.processes import LocalProcesses
from relax_hpc.telemetry import read_metrics
from tools.faults.faultfs import Caches, FaultFS

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "tools" / "bench" / "chaos.toml"
TRAINER, WORKERS = "trainer", ("rollout-0", "rollout-1")
BEGINNING = 2
"""Steps that workers start in: their waits are not those of caches."""
PROFILES = {
    "local": Caches(),
    "mtime_1s": Caches(whole_seconds=True),
    "cache_1s": Caches(attributes_s=1, entries_s=1, negative_s=1, listings_s=1, whole_seconds=True, silly_rename=True),
    "cache_3s": Caches(attributes_s=3, entries_s=3, negative_s=3, listings_s=3, silly_rename=True),
    "cache_30s": Caches(attributes_s=30, entries_s=30, negative_s=30, listings_s=30, silly_rename=True),
}
"""Caches of all three hosts. All keep what opening asks for anew ("close to open"), as NFS does."""


@dataclass
class Hosts:
    """The three hosts of one run, whose folder is looked at from behind, without caches."""

    folder: Path
    caches: Caches
    sets: Mapping[str, object]
    run: RunDir = field(init=False)
    mounts: dict[str, FaultFS] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.run = RunDir(self.folder / "backing" / "caches")

    def drive(self, limit_s: float, look: Callable[[Hosts], None] = lambda hosts: None) -> None:
        """Drive the run to its end; `look` is called all the while. Raises SystemExit where it does not end in `limit_s`."""
        until = time.monotonic() + limit_s
        with self._mounted(), self._running() as process:
            while process.poll() is None:
                if time.monotonic() > until:
                    raise SystemExit(f"the run did not end in {limit_s:.0f} s: see {self.folder}/run.log")
                look(self)
                time.sleep(0.02)
            if process.returncode:
                raise SystemExit(f"the run ended with {process.returncode}: see {self.folder}/run.log")

    def waits_s(self) -> list[float]:
        """Seconds that each step waited for its data, without the first ones."""
        lines, _ = read_metrics(self.run.metrics / "trainer-0.jsonl")
        steps = {line["step"]: float(line["wait_s"]) for line in lines if line["kind"] == "step"}
        return [steps[step] for step in sorted(steps)][BEGINNING:]

    @contextlib.contextmanager
    def _mounted(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in (TRAINER, *WORKERS):
                disk = FaultFS(self.folder / "backing", self.folder / name, self.caches)
                self.mounts[name] = stack.enter_context(disk)
            yield

    @contextlib.contextmanager
    def _running(self) -> Iterator[subprocess.Popen[bytes]]:
        where = {"run.root": self.folder / TRAINER, "run.name": self.run.root.name, "rollout.workers": len(WORKERS)}
        options = [word for key, value in {**where, **self.sets}.items() for word in ("--set", f"{key}={value}")]
        words = [sys.executable, "-m", "tools.faults.hosts", str(self.folder), "run", str(RECIPE), *options]
        with (self.folder / "run.log").open("ab") as log:
            process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


def main(folder: Path, words: list[str]) -> None:
    """Give a command of relax-hpc whose rollout workers are on hosts of their own, with disks of their own."""

    def elsewhere(run: RunDir, supervision: Supervision, role: str, name: str, *rest: Any) -> LocalProcesses:
        if role != "rollout":
            return LocalProcesses(run, supervision, role, name, *rest)
        processes, fork_server, own = rest
        disk = folder / f"disk-{name}"
        disk.mkdir(exist_ok=True)
        there = RunDir(folder / name / run.root.name)
        return LocalProcesses(
            there, supervision, role, name, processes, fork_server, {**own, "SLURM_TMPDIR": str(disk)}
        )

    rollout_workers.LocalProcesses = elsewhere  # type: ignore[assignment, attr-defined]
    app(words)


def step_waits(steps: Mapping[str, int] | None = None, limit_s: float = 600.0) -> dict[str, float]:
    """Measure the median wait of a step in seconds, by profile. steps: how many of each; all profiles but cache_1s by default."""
    wanted = steps or {"local": 30, "mtime_1s": 30, "cache_3s": 15, "cache_30s": 6}
    return {name: round(statistics.median(_waits(name, count, limit_s)), 3) for name, count in wanted.items()}


def _waits(profile: str, steps: int, limit_s: float) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        hosts = Hosts(Path(folder), PROFILES[profile], {"run.steps": steps, "async.max_staleness": 0})
        hosts.drive(limit_s)
        return hosts.waits_s()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
