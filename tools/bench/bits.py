"""Whether two runs ended with the same bits, and whether that proves anything.

final_weights       the checksum to compare
gradient_fraction   of a run's steps: a run without gradients ends with the same bits whatever happened to its data
flip_a_bit          the control: one bit of one token that is about to be trained on; the end must be another
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from relax_hpc.files.publish import Data, read_json, replace
from relax_hpc.files.run_dir import RunDir
from relax_hpc.spool.shard import Shard
from relax_hpc.spool.shard_writer import encode
from relax_hpc.telemetry import read_heartbeat, read_metrics

ENOUGH_GRADIENTS = 0.9
"""Of the steps of a run whose bits are compared."""
PAUSE_S = 120.0
"""How long a worker may take for what the paused trainer has asked for; less than supervision.hang_s."""


def final_weights(run: RunDir, step: int) -> str:
    """The checksum of version `step`, in its newest lineage."""
    return str(read_json(max(run.weights.glob(f"v{step:08d}.l*.json")))["checksum"])


def gradient_fraction(run: RunDir) -> float:
    """The share of steps, replays included, that had a gradient: one that was not finite (null) is none."""
    norms = [r["grad_norm"] for r in read_metrics(run.metrics / "trainer-0.jsonl")[0] if r["kind"] == "step"]
    return float(sum((norm or 0) > 0 for norm in norms) / len(norms))


def same_bits(one: RunDir, other: RunDir, step: int) -> bool:
    """Whether two runs have the same weights after `step` steps. Raises AssertionError where that would prove nothing."""
    for run in (one, other):
        assert (found := gradient_fraction(run)) >= ENOUGH_GRADIENTS, (
            f"a gradient in {found:.0%} of the steps of {run.root}"
        )
    return final_weights(one, step) == final_weights(other, step)


def flip_a_bit(run: RunDir) -> str:
    """Change one bit of one token in a shard that the running trainer is about to read, its checksums too; the id of its request."""
    while True:
        with _paused(run, "trainer-0"):
            known = _shards(run)
            deadline = time.monotonic() + PAUSE_S
            while time.monotonic() < deadline and _shards(run) == known and _asked_for(run):
                time.sleep(0.02)
            if new := _shards(run) - known:
                path = run.shard(min(new))
                replace(path, _with_a_bit_flipped(path))
                return path.stem
        time.sleep(0.01)  # nothing was asked for at this moment


def _shards(run: RunDir) -> set[str]:
    return {path.stem for path in run.shards.rglob("*.h5")}


def _asked_for(run: RunDir) -> bool:
    """Whether a worker has something to generate."""
    return any(path.is_file() for folder in (run.open_requests, run.claimed_requests) for path in folder.rglob("*"))


def _with_a_bit_flipped(path: Path) -> Data:
    """The shard at `path` as its worker would have published it, had it sampled another token."""
    with Shard(path) as shard:
        groups = [shard.group(i) for i in range(len(shard.groups))]
        meta = {k: v for k, v in shard.meta.items() if k not in ("request", "reasons", "prompts", "checksums")}
        tokens = groups[0].samples[0].tokens
        tokens[int(tokens.argmin())] ^= 1
        return encode(shard.request, groups, meta)


@contextlib.contextmanager
def _paused(run: RunDir, role: str) -> Iterator[None]:
    """Stop a role's process in order to go on with it."""
    process = psutil.Process(int((read_heartbeat(run, role) or {})["pid"]))
    process.suspend()
    try:
        yield
    finally:
        process.resume()
