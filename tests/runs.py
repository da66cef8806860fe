"""What tests that run the real thing share: a recipe that trains in seconds, and the command line as a user has it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.monitor.analysis.audit import Audit, audit
from relax_hpc.telemetry import read_heartbeat, read_metrics

ROOT = Path(__file__).resolve().parents[1]
SMALL = """
[run]
name = "small"
root = "{root}"
steps = 6
checkpoint_every = 2

[model]
name = "tiny"
hidden_size = 32
intermediate_size = 64
layers = 1
heads = 2
kv_heads = 1
context = 48

[algorithm]
name = "grpo"
group_size = 4

[async]
max_staleness = 1

[trainer]
prompts_per_step = 8
learning_rate = 1e-3

[rollout]
workers = 1
groups_per_request = 4
max_new_tokens = 6

[supervision]
max_restarts = 50
backoff_s = 0.1

[[source]]
name = "reasoning_gym"
task = "basic_arithmetic"
size = 500
template = "{{metadata[expression]}} = "
[source.config]
min_terms = 2
max_terms = 2
min_digits = 1
max_digits = 1
operators = ["+"]
allow_parentheses = false
allow_negation = false
"""
"""6 steps of 2 requests of 4 groups of 4 samples."""
STRONG = SMALL.replace('task = "basic', f'reward = "{ROOT / "tools" / "bench" / "varied.py"}:score"\ntask = "basic')
"""The same, with a reward that gives every step a gradient: for runs whose bits are compared."""


def write_recipe(folder: Path, text: str = SMALL) -> Path:
    """The recipe as a file whose runs lie in `folder`."""
    path = folder / "small.toml"
    path.write_text(text.format(root=folder))
    return path


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "relax_hpc", *map(str, arguments)]


def relax_hpc(*arguments: str | Path, code: int | None = 0, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; `code`: the exit code it must have."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=timeout, check=False)
    assert code is None or done.returncode == code, f"{done.args}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    """Begin a command."""
    return subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(what: Callable[[], Any], timeout: float = 180, progress: Callable[[], object] = lambda: None) -> Any:
    """The first true value of `what()`; fails when none comes in `timeout` seconds. Looking takes a fifth of the time at most.

    The seconds are those of a machine that has nothing else to do: with three processes a core waiting, one passes in three.
    They are counted anew whenever the value of `progress()` changes.
    """
    left, before = timeout, progress()
    while left > 0:
        began = time.monotonic()
        if value := what():
            return value
        if (now := progress()) != before:
            before, left = now, timeout
        time.sleep(max(0.01, 4 * (time.monotonic() - began)))
        left -= (time.monotonic() - began) / max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    raise AssertionError(f"nothing came in {timeout} s" + (f" after {before}" if before is not None else ""))


def steps_of(run: RunDir) -> list[dict[str, Any]]:
    """The metrics of all steps, replays too."""
    return [r for r in read_metrics(run.metrics / "trainer-0.jsonl")[0] if r["kind"] == "step"]


def step_now(run: RunDir) -> int:
    return int((read_heartbeat(run, "trainer-0") or {}).get("step", 0))


def pid_of(run: RunDir, role: str) -> int | None:
    """The process of a role that has begun to work."""
    heartbeat = read_heartbeat(run, role)
    return None if heartbeat is None or heartbeat.get("state") == "starting" else int(heartbeat["pid"])


def audited(run: RunDir) -> Audit:
    """The audit of a run, which finds nothing wrong."""
    found = audit(run.root)
    assert (found.lost, found.twice, found.torn, found.over_bound, found.mixed) == ([], [], [], [], []), found
    return found


def outcome(run: RunDir) -> dict[str, Any]:
    value: dict[str, Any] = read_json(run.outcome)
    return value
