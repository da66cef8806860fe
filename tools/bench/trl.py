"""Against TRL's GRPOTrainer on the CPU: samples per second, end to end, in interleaved rounds of fresh processes.

Both sides: the same randomly initialized Qwen3 weights in fp32, 4 prompts × 8 samples a step, the same prompts, reward function,
learning rate, clip range and token denominator, and both have two cores. Every answer has exactly the length asked for (see
sides/tiny_model.py); the mean lengths seen are printed. TRL: one process, run with two threads and with one in every round; the
faster of the two is compared. Ours: `relax-hpc run` on a generated recipe, a trainer and rollout workers of one thread each,
max_staleness 1 by default. `--sizes vl`: the same with a Qwen3-VL and a picture in each prompt (sides/tiny_vl.py).

samples/s of a round = samples of the steps after the first few / the time from the end of the last dropped step to the last one's
end: start-up and import are in neither. ratio = ours / TRL's, the median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.table import Table

from tools.bench.common import (
    BENCH,
    SIDES,
    Ratio,
    console,
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
from tools.bench.runs import Finished, read_lines, run, samples_per_second

PROMPTS, GROUP, LEARNING_RATE, DROP = 4, 8, 1e-4, 5
BATCH = PROMPTS * GROUP
NEW_TOKENS = {"164k": 64, "2.2M": 128, "vl": 64}
PICTURES = "vl"
"""The size that is a Qwen3-VL of 1.2 M parameters; its prompts show a picture of 36 tokens each."""
RECIPE = """[run]
steps = {steps}
checkpoint_every = 1000000

[model]
path = "{model}"

[algorithm]
name = "grpo"
group_size = {group}
clip = [0.2, 0.28]

[async]
max_staleness = {staleness}

[trainer]
prompts_per_step = {prompts_per_step}
learning_rate = {learning_rate}

[rollout]
workers = {workers}
groups_per_request = {groups_per_request}
max_new_tokens = {new_tokens}

[[source]]
prompts = "{prompts}"
reward = "{reward}"
"""
SHOWN = """media = {image = "image"}

[media]
image_tokens = [4, 64]
"""


def prepare(folder: Path, size: str) -> None:
    """The model, its tokenizer and the prompts of both sides."""
    folder.mkdir(parents=True, exist_ok=True)
    if size == PICTURES:
        command = [sys.executable, str(SIDES / "tiny_vl.py"), str(folder), "256"]
        subprocess.run(command, check=True, env=our_environment(), capture_output=True)
        return
    command = [sys.executable, str(SIDES / "tiny_model.py"), str(folder / "model"), size]
    subprocess.run(command, check=True, env=our_environment(), capture_output=True)
    rows = [{"prompt": f"hello world {i} the quick brown fox", "answer": ""} for i in range(256)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def theirs(folder: Path, size: str, steps: int, threads: int) -> dict[str, Any]:
    """One run of TRL: rate in samples/s, mean length, seconds a step by part, threads."""
    script = [
        str(peer_environment("trl")),
        str(SIDES / "trl_peer.py"),
        str(folder / "model"),
        str(folder / "prompts.jsonl"),
    ]
    log = BENCH / "logs" / "trl-peer.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as stderr:
        done = subprocess.run(
            [*script, str(NEW_TOKENS[size]), str(steps)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        )
    if done.returncode:
        raise SystemExit(f"TRL's side ended with {done.returncode}; the end of {log}:\n{log.read_text()[-3000:]}")
    seen = json.loads(done.stdout.splitlines()[-1])
    parts = {name: statistics.mean(s.get(name, 0.0) for s in seen["spent"][DROP:]) for name in seen["spent"][-1]}
    return {
        "rate": samples_per_second(seen["ends"], BATCH, DROP),
        "length": statistics.mean(seen["lengths"]),
        "parts": parts,
        "threads": threads,
    }


def ours(folder: Path, size: str, steps: int, sets: dict[str, int]) -> dict[str, Any]:
    """One run of relax-hpc: the same."""
    recipe = folder / "recipe.toml"
    recipe.write_text(
        RECIPE.format(
            steps=steps,
            model=folder / "model",
            group=GROUP,
            prompts_per_step=PROMPTS,
            learning_rate=LEARNING_RATE,
            new_tokens=NEW_TOKENS[size],
            prompts=folder / "prompts.jsonl",
            reward=f"{SIDES / 'reward.py'}:vowels",
            **sets,
        )
        + (SHOWN if size == PICTURES else "")
    )
    done = run(recipe, f"trl-{size}", {})
    return {
        "rate": samples_per_second([s["time"] for s in done.steps], BATCH, DROP),
        "length": statistics.mean(s["length_mean"] for s in done.steps),
        "parts": parts_of(done),
    }


def parts_of(done: Finished) -> dict[str, float]:
    """Mean seconds: of a trainer's step by part, and of a worker's request by part."""
    requests = [
        line
        for path in sorted((done.root / "metrics").glob("rollout-*.jsonl"))
        for line in read_lines(path)
        if line.get("kind") == "request"
    ]
    trainer = {
        f"trainer {k[:-2]}": statistics.mean(s[k] for s in done.steps[DROP:])
        for k in ("step_s", "wait_s", "train_s", "publish_s")
    }
    return trainer | {
        f"request {k[:-2]}": statistics.mean(o[k] for o in requests[DROP:])
        for k in ("wait_s", "generate_s", "score_s", "publish_s")
    }


def compare(size: str, given: argparse.Namespace, done: Callable[[], None]) -> dict[str, list[dict[str, Any]]]:
    """What both sides saw in each round."""
    folder = BENCH / "trl" / size
    prepare(folder, size)
    sets = {"workers": given.workers, "groups_per_request": given.groups_per_request, "staleness": given.staleness}

    def fastest(_: int) -> dict[str, Any]:
        """TRL with each number of threads."""
        seen = []
        for threads in given.peer_threads:
            seen.append(theirs(folder, size, given.steps, threads))
            done()
        return max(seen, key=lambda one: one["rate"])

    def we(_: int) -> dict[str, Any]:
        seen = ours(folder, size, given.steps, sets)
        done()
        return seen

    return interleave({"theirs": fastest, "ours": we}, given.rounds)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument(
        "--steps", type=int, default=12, help=f"steps of a run, of which the first {DROP} are dropped"
    )
    arguments.add_argument("--sizes", nargs="+", choices=NEW_TOKENS, default=["164k", "2.2M"])
    arguments.add_argument(
        "--peer-threads", type=int, nargs="+", default=[2, 1], help="values of OMP_NUM_THREADS that TRL is run with"
    )
    arguments.add_argument("--workers", type=int, default=1, help="rollout.workers")
    arguments.add_argument("--groups-per-request", type=int, default=4, help="rollout.groups_per_request")
    arguments.add_argument("--staleness", type=int, default=1, help="async.max_staleness")
    given = parse(arguments)
    found: dict[str, Ratio] = {}
    parts: dict[str, dict[str, float]] = {}
    table = Table("model", "ratio", "samples/s ours", "samples/s TRL (threads)", "mean length ours · TRL")
    with progress("trl: runs", given.rounds * len(given.sizes) * (1 + len(given.peer_threads))) as step:
        for size in given.sizes:
            seen = compare(size, given, step)
            rates = {side: [r["rate"] for r in results] for side, results in seen.items()}
            found[size] = ratio([1 / r for r in rates["ours"]], [1 / r for r in rates["theirs"]])
            each = [
                " ".join(f"{rate:.1f}" for rate in rates["ours"]),
                " ".join(f"{r['rate']:.1f} ({r['threads']})" for r in seen["theirs"]),
            ]
            table.add_row(
                size, str(found[size]), *each, f"{seen['ours'][-1]['length']:.1f} · {seen['theirs'][-1]['length']:.1f}"
            )
            parts |= {f"{size} {side}": results[-1]["parts"] for side, results in seen.items()}
    show(table)
    for side, seconds in parts.items():
        console.print(f"{side}, ms: " + ", ".join(f"{name} {1e3 * s:.0f}" for name, s in seconds.items()))
    finish({"ratio": {size: round(r.median, 3) for size, r in found.items()}}, given.json)


if __name__ == "__main__":
    main()
