"""What asynchrony gains and what it costs: one recipe colocated, on-policy on devices apart, and at max_staleness 1, 2, 4, 8.

real    two CPU cores are the devices, engines and trainers are real (modes.toml: answers of lognormal length, sigma 0.8).
        colocate has both cores for generation, then both for training; the others have one core for each.
        Every mode goes on from the same weights, by seed, with the same prompts, samples and steps; its held-out score at
        the end against that of on-policy, over paired seeds. The control does not learn (its learning rate is next to 0).
drawn   16 devices that sleep: a request takes a lognormal time (sigma 1) on one device, a training step takes a time that all
        devices share evenly. colocate generates on all 16 and trains on all 16, and its switch costs what it costs here,
        next to nothing; the others generate on --rollout of them and train on the rest. Timing alone; rewards mean nothing.
        --media: every prompt shows a picture, which is decoded, processed, stored and encoded as in any run.

speedup: seconds of a step of colocate over those of the mode, by seed; the median and the range. Higher is better.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.table import Table
from scipy.stats import t as student

from tools.bench.common import BENCH, ROOT, SIDES, Ratio, finish, parse, parser, progress, ratio, show
from tools.bench.omni import FOLDER, make_data
from tools.bench.runs import Finished, run

REAL, DRAWN = (ROOT / "tools" / "bench" / f"{name}.toml" for name in ("modes", "simulate"))
STALENESS = ("0", "1", "2", "4", "8")
COLOCATE, ON_POLICY, CONTROL, WARM = "colocate", "0", "control", "warm"
MARGIN = -0.03
"""A mode whose score may lie below on-policy's by more than this is not as good."""
TOGETHER = {"run.placement": "colocate", "async.max_staleness": 0}
PROMPTS, LONGEST = 20000, 24
DEVICES = 16
SEEN = {
    "model.vision": "{hidden_size=32, intermediate_size=64, layers=1, heads=2}",
    "media.image_tokens": "[4, 16]",
    "source": f'[{{prompts="{FOLDER}/data/omni/image-train.jsonl", media={{image="image"}}, reward="exact", '
    f'environment="{SIDES}/paced.py:LongTail"}}]',
}
"""Keys that give every prompt of DRAWN a picture."""
DROP = 6
"""First steps that are left out of times: the pipeline fills."""


class Paired(NamedTuple):
    """Differences of a mode's score to on-policy's, seed by seed."""

    mean: float
    low: float
    high: float
    """Of the 95% interval of the mean, by Student's t."""


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Paired:
    """Raises ValueError where seeds do not pair up or are fewer than two."""
    each = [a - b for a, b in zip(ours, theirs, strict=True)]
    if len(each) < 2:
        raise ValueError(f"{len(each)} seeds have no spread: use two or more")
    mean, error = statistics.mean(each), statistics.stdev(each) / math.sqrt(len(each))
    wide = float(student.ppf(0.975, len(each) - 1)) * error
    return Paired(mean, mean - wide, mean + wide)


def write_prompts() -> Path:
    """Strings of small letters and themselves backwards, always the same."""
    path, rng = BENCH / "data" / "backwards.jsonl", random.Random(0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for _ in range(PROMPTS):
            length = min(max(round(rng.lognormvariate(math.log(5), 0.8)), 2), LONGEST)
            text = "".join(rng.choices("abcdefgh", k=length))
            file.write(json.dumps({"prompt": f"{text}=", "answer": text[::-1]}) + "\n")
    return path


def step_s(done: Finished) -> float:
    """Mean seconds of a step."""
    ends = [step["time"] for step in done.steps][DROP:]
    return float((ends[-1] - ends[0]) / (len(ends) - 1))


def real(seed: int, steps: int, prompts: Path, done: Callable[[], None]) -> dict[str, Finished]:
    """The runs of one seed, by mode, all from the same warm-up, which is there too. done: called after each."""
    common: dict[str, Any] = {"run.seed": seed, "source.0.prompts": prompts}
    warm = run(REAL, f"modes/warm-{seed}", {**common, "run.steps": 1, "trainer.learning_rate": 1e-12})
    done()
    both = {"trainer.processes": 2, "rollout.workers": 2}
    modes: dict[str, dict[str, Any]] = {COLOCATE: {**TOGETHER, **both}}
    modes |= {bound: {"async.max_staleness": bound} for bound in STALENESS}
    modes[CONTROL] = {"async.max_staleness": 2, "trainer.learning_rate": 1e-12}
    runs = {WARM: warm}
    for mode, sets in modes.items():
        values = {"trainer.learning_rate": 4e-4, **sets, "run.steps": steps}
        runs[mode] = run(REAL, f"modes/{mode}-{seed}", values, fork_of=warm.root)
        done()
    return runs


def drawn(seed: int, given: Any, done: Callable[[], None]) -> dict[str, Finished]:
    """The runs of one seed, by mode. done: called after each."""

    def times(trainer: int) -> dict[str, Any]:
        slow = given.train * DEVICES / trainer
        algorithm = f'{{name="own", factory="{SIDES / "paced.py"}:paced", options={{seconds={slow}}}, group_size=2}}'
        return {
            "algorithm": algorithm,
            "source.0.environment_options": f"{{seconds={given.unit}, sigma=1.0, samples_per_prompt=2}}",
        }

    common = {"run.seed": seed, "run.steps": given.drawn_steps, "trainer.prompts_per_step": given.requests}
    common |= {
        "rollout.code_processes": 1,
        **(SEEN if given.media else {}),
    }  # a prompt's samples sleep one after the other
    # more workers than requests could only be idle
    modes = {COLOCATE: {**TOGETHER, **times(DEVICES), "rollout.workers": min(DEVICES, given.requests)}}
    for bound in STALENESS:
        modes[bound] = {
            "async.max_staleness": bound,
            **times(DEVICES - given.rollout),
            "rollout.workers": given.rollout,
        }
    runs = {}
    for mode, sets in modes.items():
        runs[mode] = run(DRAWN, f"modes/drawn-{mode}-{seed}", {**common, **sets})
        done()
    return runs


def speedups(seeds: Sequence[dict[str, Finished]]) -> dict[str, Ratio]:
    """Of each staleness over colocate."""
    together = [step_s(runs[COLOCATE]) for runs in seeds]
    return {bound: ratio([step_s(runs[bound]) for runs in seeds], together) for bound in STALENESS}


def generating(seeds: Sequence[dict[str, Finished]]) -> float:
    """Share of colocate's steps that is not training: it waits for its workers."""
    steps = [step for runs in seeds for step in runs[COLOCATE].steps[DROP:]]
    return float(sum(s["wait_s"] for s in steps) / sum(s["step_s"] for s in steps))


def rounded(found: dict[str, Ratio]) -> dict[str, float]:
    return {bound: round(each.median, 3) for bound, each in found.items()}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--parts", nargs="+", choices=("real", "drawn"), default=["real", "drawn"])
    arguments.add_argument(
        "--seeds", type=int, default=2, metavar="N", help="real: run.seed = 0 … N-1 (default: %(default)s)"
    )
    arguments.add_argument("--steps", type=int, default=20, help="real: steps of each run (default: %(default)s)")
    arguments.add_argument("--drawn-seeds", type=int, default=1, metavar="N")
    arguments.add_argument("--drawn-steps", type=int, default=10)
    arguments.add_argument("--requests", type=int, default=8, help="drawn: requests of a batch (default: %(default)s)")
    arguments.add_argument(
        "--rollout", type=int, default=4, help="drawn: devices of 16 that generate (default: %(default)s)"
    )
    arguments.add_argument("--unit", type=float, default=0.8, help="drawn: mean seconds of a request")
    arguments.add_argument("--train", type=float, default=1.0, help="drawn: seconds of a step on all devices")
    arguments.add_argument("--media", action="store_true", help="drawn: every prompt shows a picture")
    given = parse(arguments)
    if given.media:
        make_data()
    result: dict[str, Any] = {}
    if "real" in given.parts:
        result |= report_real(given)
    if "drawn" in given.parts:
        result |= report_drawn(given)
    finish(result, given.json)


def report_real(given: Any) -> dict[str, Any]:
    seeds, prompts = [], write_prompts()
    with progress("real: runs", given.seeds * (3 + len(STALENESS))) as done:
        for seed in range(given.seeds):
            seeds.append(real(seed, given.steps, prompts, done))
    final = {mode: [runs[mode].scores[-1][1] for runs in seeds] for mode in (COLOCATE, *STALENESS, CONTROL)}
    against = {mode: paired(final[mode], final[ON_POLICY]) for mode in final if mode != ON_POLICY}
    faster = speedups(seeds)
    table = Table("real engines", "speedup over colocate", "s a step", "held-out", "to on-policy [95%]", "oldest token")
    for mode, scores in final.items():
        low = (
            f"{against[mode].mean:+.3f} [{against[mode].low:+.3f}, {against[mode].high:+.3f}]"
            if mode in against
            else ""
        )
        seconds = statistics.median(step_s(runs[mode]) for runs in seeds)
        age = max(step["age_max"] for runs in seeds for step in runs[mode].steps)
        table.add_row(
            mode, str(faster.get(mode, "")), f"{seconds:.3f}", f"{statistics.mean(scores):.3f}", low, str(age)
        )
    show(table)
    before = [runs[WARM].scores[0][1] for runs in seeds]
    return {
        "speedup_real": rounded(faster),
        "score_before": round(statistics.mean(before), 4),
        "score": {mode: round(statistics.mean(scores), 4) for mode, scores in final.items()},
        "score_ci_low": {mode: round(each.low, 4) for mode, each in against.items()},
        "control_fails": against[CONTROL].low <= MARGIN,
    }


def report_drawn(given: Any) -> dict[str, Any]:
    seeds = []
    with progress("drawn: runs", given.drawn_seeds * (1 + len(STALENESS))) as done:
        for seed in range(given.drawn_seeds):
            seeds.append(drawn(seed, given, done))
    faster, share = speedups(seeds), generating(seeds)
    table = Table("drawn times", "speedup over colocate", "s a step")
    for mode in (COLOCATE, *STALENESS):
        seconds = statistics.median(step_s(runs[mode]) for runs in seeds)
        table.add_row(mode, str(faster.get(mode, "")), f"{seconds:.3f}")
    show(table)
    return {"speedup_drawn": rounded(faster), "colocate_generates": round(share, 3)}


if __name__ == "__main__":
    main()
