"""File-system calls below the run's directory, of all processes of a run, with ever more rollout workers than it needs.

    relax-hpc run (tiny model, 2 requests a step, steps of `--pace` seconds)   strace attached to supervisor, trainer, workers
    per_request      calls in `--window` seconds over the requests that were published in them, polling and heartbeats counted
    idle_per_second  the trainer is stopped (SIGSTOP) and every worker waits: calls a second

Three workers or more are more than are needed here: what they add is the cost of waiting. Calls are those that name the
directory or a file in it, by path or by an open file; strace makes all of it slower, the requests too.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from relax_hpc.files.run_dir import RunDir
from relax_hpc.supervise.lease import holder
from relax_hpc.telemetry import read_heartbeat, read_metrics
from tools.bench import common, runs
from tools.bench.chaos import RECIPE
from tools.bench.spool import NO_FILE

WORKERS = (2, 8, 32)
START_S = 900.0
"""Workers begin one after the other on few cores."""
SETTLED = 3
"""Requests a worker before anything is counted: each polls as seldom as its last waits allow."""
LEAD_S = 5.0
"""Workers take their time to finish what was ordered."""
ATTACH_S = 120.0
_CALL = re.compile(r"^\d+ +(?P<time>\d+\.\d+) (?P<name>[a-z]\w*)\(")


def count(log: str, root: Path, since: float, until: float) -> Counter[str]:
    """Calls by name between two moments that name something below `root` (strace -f -ttt -y)."""
    below = re.compile(re.escape(str(root)) + r'[/">]')
    calls = [(_CALL.match(line), line) for line in log.splitlines()]
    timed = [(call["name"], line) for call, line in calls if call and since <= float(call["time"]) < until]
    return Counter(name for name, line in timed if name not in NO_FILE and below.search(line))


@contextlib.contextmanager
def started(folder: Path, workers: int, pace_s: float) -> Iterator[tuple[RunDir, list[int]]]:
    """A run whose workers all generate or wait, and its processes, the trainer first."""
    algorithm = (
        f'{{name="own", factory="{common.SIDES / "paced.py"}:paced", options={{seconds={pace_s}}}, group_size=4}}'
    )
    sets = {"run.root": folder, "run.name": f"w{workers}", "run.steps": 1000000, "rollout.workers": workers,
            "algorithm": algorithm, "supervision.hang_s": 600.0, "run.checkpoint_every": 1000000}  # fmt: skip
    run = RunDir(folder / f"w{workers}")
    with (folder / f"w{workers}.log").open("ab") as log:
        process = subprocess.Popen(runs.command(RECIPE, sets), stdout=log, stderr=log, env=common.our_environment())
    try:
        roles = ["trainer-0", *(f"rollout-{i}" for i in range(workers))]
        deadline = time.monotonic() + START_S
        while (pids := working(run, roles)) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"not all of {workers} workers began in {START_S:.0f} s: see {run.logs}")
            time.sleep(1)
        about = holder(run)
        assert about is not None
        yield run, [*pids, int(about["pid"])]
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()


def working(run: RunDir, roles: list[str]) -> list[int] | None:
    """Their processes, once each has begun and a step was made."""
    heartbeats = [read_heartbeat(run, role) if run.exists else None for role in roles]
    if any(
        heartbeat is None or heartbeat["state"] in ("starting", "syncing") for heartbeat in heartbeats
    ) or not requests(run, 0):
        return None
    return [int(heartbeat["pid"]) for heartbeat in heartbeats if heartbeat is not None]


def requests(run: RunDir, since: float, until: float = float("inf")) -> int:
    """Requests that were published between two moments."""
    records = [record for path in run.metrics.glob("rollout-*.jsonl") for record in read_metrics(path)[0]]
    return sum(record["kind"] == "request" and since <= record["time"] < until for record in records)


def attached(log: Path, pids: list[int]) -> bool:
    """Whether strace has seen a call of each process: it attaches to one after the other."""
    seen = {line.partition(" ")[0] for line in log.read_text(errors="replace").splitlines()} if log.exists() else set()
    return {str(pid) for pid in pids} <= seen


def watch(root: Path, pids: list[int], log: Path, window_s: float) -> tuple[Counter[str], float, float]:
    """The calls of these processes for a while, and from when to when."""
    strace = shutil.which("strace")
    if strace is None:
        raise SystemExit("strace is not installed (apt-get install strace): it counts the system calls")
    attach = [word for pid in pids for word in ("-p", str(pid))]
    options = ["-f", "-qq", "-ttt", "-y", "-s", "0", "-e", "trace=%file,%desc", "-e", "signal=none", "-o", str(log)]
    tracer = subprocess.Popen([strace, *options, *attach])
    deadline = time.monotonic() + ATTACH_S
    while not attached(log, pids):
        if tracer.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"strace did not attach to all of {len(pids)} processes: see {log}")
        time.sleep(0.5)
    since = time.time()
    time.sleep(window_s)
    until = time.time()
    tracer.terminate()
    tracer.wait()
    return count(log.read_text(errors="replace"), root, since, until), since, until


def measure(folder: Path, workers: int, pace_s: float, window_s: float) -> tuple[float, float]:
    """(calls a request, calls a second while all wait)."""
    with started(folder, workers, pace_s) as (run, pids):
        while requests(run, 0) < SETTLED * workers:
            time.sleep(1)
        calls, since, until = watch(run.root, pids, folder / f"w{workers}.busy", window_s)
        made = requests(run, since, until)
        os.kill(pids[0], signal.SIGSTOP)
        try:
            time.sleep(LEAD_S)
            idle, *_ = watch(run.root, pids[1:], folder / f"w{workers}.idle", window_s)
        finally:
            os.kill(pids[0], signal.SIGCONT)
    for what, counted in (("busy", calls), ("idle", idle)):
        common.console.print(
            f"{workers} workers, {what}, {window_s:.0f} s, {made} requests: {dict(counted.most_common())}"
        )
    return calls.total() / max(made, 1), idle.total() / window_s


def main() -> None:
    arguments = common.parser(__doc__)
    arguments.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), help="numbers of rollout workers")
    arguments.add_argument("--pace", type=float, default=1.0, help="seconds of a step (default: %(default)s)")
    arguments.add_argument("--window", type=float, default=20.0, help="seconds that are counted (default: %(default)s)")
    given = common.parse(arguments)
    folder = common.disk_directory("file_ops") / time.strftime("%H%M%S")
    folder.mkdir()
    result: dict[str, Any] = {"per_request": {}, "idle_per_second": {}}
    for workers in given.workers:
        busy, idle = measure(folder, workers, given.pace, given.window)
        result["per_request"][str(workers)], result["idle_per_second"][str(workers)] = round(busy, 1), round(idle, 1)
    common.finish(result, given.json)


if __name__ == "__main__":
    main()
