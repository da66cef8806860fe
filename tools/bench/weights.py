"""How fast versions of the weights travel, against the raw thing with the same library, in interleaved rounds.

    collective   trainer and one worker, gloo over loopback       raw: one broadcast of the same bytes, flat already
    mpi          the same, two MPI jobs connected by a port     raw: one MPI_Isend and MPI_Irecv of the same bytes
    file         trainer writes, worker reads, on a disk          raw: the same bytes into one file, fsync, read back

Ours ends when the worker can give the version to its engine, every checksum compared; it is made of 217 tensors with a language
model's proportions. The page cache is warm. ratio: raw seconds over ours, the lower of the two sizes. of_verified: the same, where
both sides also make the checksum of the raw bytes (file: one after the other): what a version needs that is compared. stall_s: how long the
trainer is held up by a version of the larger size. peak_buckets: memory over the resident model while it is published.
delta_time_ratio: a whole version's seconds over those of one in which 0.5 % of the weights changed, both with copies in
memory. delta_bytes_fraction: bytes of a change over those of a whole version, the median over the steps of a
quickstart run in bfloat16, by learning rate.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from relax_hpc.files.run_dir import RunDir
from tools.bench.common import (
    BENCH,
    ROOT,
    SIDES,
    Ratio,
    console,
    disk_directory,
    finish,
    interleave,
    our_environment,
    parse,
    parser,
    progress,
    ratio,
)
from tools.bench.sides.child import Child

TRANSPORTS = ("collective", "mpi", "file")
SIZES_MB = (100, 500)
MEMORY = Path("/dev/shm/relax_hpc-bench-weights")
BUCKET = 128 << 20
"""Above the largest tensor: one that is larger is a bucket of its own."""
CHANGED = 0.005
RATES = (1e-6, 4e-4)
"""What is usual in RL, and the quickstart's own."""
STEPS, WARMUP_STEPS = 12, 60


class Pair:
    """A trainer and a worker."""

    def __init__(self, stack: ExitStack, root: Path, megabytes: int) -> None:
        run = RunDir(root / f"run-{megabytes}")
        run.create()
        run.identity.write_text(json.dumps({"id": f"bench-{megabytes}"}))
        self.root, self.number = run.root, 0
        self.trainer, self.worker = (self._side(stack, name, megabytes) for name in ("trainer", "worker"))
        self.stalls: list[float] = []

    def _side(self, stack: ExitStack, name: str, megabytes: int) -> Child:
        command = [sys.executable, str(SIDES / "weights.py")]
        side = stack.enter_context(Child(name, command, BENCH / "logs" / f"weights-{name}.log", our_environment()))
        side.call("prepare", root=str(self.root), name=name, megabytes=megabytes)
        return side

    def open(self, transport: str, **options: Any) -> None:
        self.worker.call("open_worker", transport=transport, **({"node_cache": f"{MEMORY}/worker"} if options else {}))
        self.trainer.call("open_trainer", transport=transport, options=options)
        self.stalls = []

    def close(self) -> None:
        for side in (self.trainer, self.worker):
            side.call("close")

    def ours(self, share: float = 0.0) -> float:
        """Seconds from the beginning of publishing until the worker holds it."""
        self.number += 1
        self.trainer.call("change", share=share, seed=self.number)
        self.worker.send("hold", number=self.number)
        began, free = self.trainer.call("publish", number=self.number)
        self.stalls.append(free - began)
        return float(self.worker.receive() - began)

    def raw_broadcast(self, verified: bool) -> float:
        self.worker.send("raw_broadcast", verified=verified)
        began, _ = self.trainer.call("raw_broadcast", verified=verified)
        return float(self.worker.receive()[1] - began)

    def raw_file(self, verified: bool) -> float:
        path = str(self.root / "raw")
        began, _ = self.trainer.call("raw_write", path=path, verified=verified)
        asked = self.worker.call("raw_read", path=path, verified=verified)
        return float(asked - began)


def compare(pair: Pair, transport: str, rounds: int, done: Any) -> tuple[Ratio, Ratio, float]:
    """Ours against raw, and against raw with checksums, round by round; and the trainer's stall."""
    pair.open(transport)
    raw = pair.raw_file if transport == "file" else pair.raw_broadcast
    if transport != "file":
        method, store = {"collective": "raw_gloo", "mpi": "raw_mpi"}[transport], str(pair.root / f"raw-{transport}")
        pair.worker.send(method, rank=1, store=store)
        pair.trainer.call(method, rank=0, store=store)
        pair.worker.receive()
    sides = {"ours": lambda _: pair.ours(), "raw": lambda _: raw(False), "verified": lambda _: raw(True)}
    seen = interleave(sides, rounds, 1, done)
    stall = statistics.median(pair.stalls[1:])
    pair.close()
    return ratio(seen["ours"], seen["raw"]), ratio(seen["ours"], seen["verified"]), stall


def changes(pair: Pair, rounds: int, done: Any) -> Ratio:
    """A whole version against one that is mostly the same."""
    seen: dict[str, list[float]] = {}
    for name, full_every in (("whole", 1), ("changed", 1000)):
        pair.open("file", node_cache=f"{MEMORY}/trainer", full_every=full_every)
        seen[name] = [pair.ours(CHANGED) for _ in range(rounds + 1)][1:]
        pair.close()
        done()
    return ratio(seen["changed"], seen["whole"])


def fraction(root: Path, rate: float) -> dict[str, float]:
    """Bytes of a change over those of a whole version, and the share of elements with other bits, in a real run."""
    node_cache = MEMORY / "run"
    name = f"quickstart-{rate:g}"
    sets = [
        f"run.root={root}", f"run.name={name}", f"run.steps={STEPS}", "trainer.dtype=bfloat16", f"trainer.learning_rate={rate}",
        "trainer.schedule=constant", "trainer.lr_warmup_steps=0", f"sft_warm_start.steps={WARMUP_STEPS}", f"weights.node_cache={node_cache}", f"weights.full_every={10 * STEPS}",
    ]  # fmt: skip
    words = [word for value in sets for word in ("--set", value)]
    command = [sys.executable, "-m", "relax_hpc", "run", str(ROOT / "recipes" / "quickstart.toml"), *words]
    subprocess.run(command, check=True, stdout=sys.stderr, env=our_environment())
    sizes = [
        sum(part.stat().st_size for part in folder.iterdir())
        for folder in sorted(RunDir(root / name).weights.glob("v????????.l*.i*"))
    ]
    return {
        "median": statistics.median(sizes[1:]) / sizes[0],
        "most": max(sizes[1:]) / sizes[0],
        "versions": len(sizes),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--rounds", type=int, default=7, help="interleaved rounds of each case, after one that warms up"
    )
    given = parse(arguments)
    root = disk_directory("weights")
    shutil.rmtree(root)
    root.mkdir()
    found: dict[str, list[Ratio]] = {name: [] for name in TRANSPORTS}
    of_verified: dict[str, list[Ratio]] = {name: [] for name in TRANSPORTS}
    stall_s: dict[str, float] = {}
    try:
        with progress("weights: rounds", len(SIZES_MB) * len(TRANSPORTS) * (given.rounds + 1) + 2) as done:
            for megabytes in SIZES_MB:
                with ExitStack() as stack:
                    pair = Pair(stack, root, megabytes)
                    for name in TRANSPORTS:
                        of_raw, verified, stall_s[name] = compare(pair, name, given.rounds, done)
                        found[name].append(of_raw)
                        of_verified[name].append(verified)
                        console.print(
                            f"{name}, {megabytes} MB: {of_raw} of raw, {verified} with checksums, stall {stall_s[name]:.3f} s"
                        )
                    if megabytes == SIZES_MB[-1]:
                        delta = changes(pair, given.rounds, done)
                        pair.open("file")
                        pair.trainer.call("open_trainer", transport="file", options={"bucket_bytes": BUCKET})
                        peak = pair.trainer.call("peak_bytes", number=pair.number + 1) / BUCKET
        by_rate = {f"{rate:g}": fraction(root, rate) for rate in RATES}
    finally:
        shutil.rmtree(MEMORY, ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)
    finish(
        {
            "ratio": {name: round(min(r.median for r in each), 3) for name, each in found.items()},
            "of_verified": {name: round(min(r.median for r in each), 3) for name, each in of_verified.items()},
            "stall_s": {name: round(value, 3) for name, value in stall_s.items()},
            "peak_buckets": round(peak, 2),
            "delta_time_ratio": round(delta.median, 2),
            "delta_bytes_fraction": by_rate,
        },
        given.json,
    )


if __name__ == "__main__":
    main()
