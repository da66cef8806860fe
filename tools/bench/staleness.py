"""The quickstart task at max_staleness 0, 1 and 4: final held-out scores over seeds, greatest age, seconds per step.

Every run makes the same number of steps. The runs of one seed follow one another, so that noise of the machine hits all bounds.
seconds_per_step is the median of a run's steps. The age of a token is the step that trains on it minus the version that made it.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from rich.table import Table

from tools.bench.common import finish, parse, parser, progress, show
from tools.bench.runs import QUICKSTART, run


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="runs of each bound, with run.seed = 0 … N-1"
    )
    arguments.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 4], help="values of async.max_staleness")
    arguments.add_argument("--steps", type=int, default=300, help="run.steps (default: %(default)s)")
    given = parse(arguments)
    sets = {"run.steps": given.steps}
    score, max_age, seconds = (
        defaultdict[str, list[float]](list),
        defaultdict[str, list[int]](list),
        defaultdict[str, list[float]](list),
    )
    ages: dict[int, np.ndarray] = {bound: np.zeros(bound + 1, np.int64) for bound in given.bounds}
    with progress("staleness: runs", given.seeds * len(given.bounds)) as step:
        for seed in range(given.seeds):
            for bound in given.bounds:
                done = run(
                    QUICKSTART, f"staleness-{bound}-{seed}", {**sets, "run.seed": seed, "async.max_staleness": bound}
                )
                score[str(bound)].append(done.scores[-1][1])
                max_age[str(bound)].append(max(s["age_max"] for s in done.steps))
                seconds[str(bound)].append(round(statistics.median(s["step_s"] for s in done.steps), 4))
                for line in done.steps:
                    ages[bound] += np.array(line["age_histogram"])[: bound + 1]
                step()
    table = Table(
        "max_staleness", "score, mean", "score, each seed", "share of tokens of age 0, 1, …", "seconds per step"
    )
    for bound in given.bounds:
        key = str(bound)
        shares = " ".join(f"{share:.2f}" for share in ages[bound] / max(1, ages[bound].sum()))
        each = " ".join(f"{s:.3f}" for s in score[key])
        table.add_row(
            key, f"{statistics.mean(score[key]):.3f}", each, shares, " ".join(f"{s:.3f}" for s in seconds[key])
        )
    show(table)
    finish(
        {"score": dict(score), "max_age": {k: max(v) for k, v in max_age.items()}, "seconds_per_step": dict(seconds)},
        given.json,
    )


if __name__ == "__main__":
    main()
