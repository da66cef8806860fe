"""Does the simulation say what runs do? Real runs at several max_staleness; one calibrates, the others are predicted.

Training and generation are sleeps (sides/paced.py: a step of a second, orders of a lognormal second), so that two cores carry
trainer and three workers; orders, shards, weights and files are those of any run. The mean time of a step, without the first
ones, predicted over measured: 1 is exact, above 1 the run was faster than was said.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.table import Table

from relax_hpc.launch.simulation.assume import Asked
from relax_hpc.launch.simulation.sweep import Grid, sweep, times_of_run
from relax_hpc.recipe import load_recipe
from tools.bench.common import ROOT, console, finish, parse, parser, progress
from tools.bench.runs import Finished, run

RECIPE = ROOT / "tools" / "bench" / "simulate.toml"
SIMULATED_STEPS = 2000
DROP = 6
"""First steps that are left out: the pipeline fills, every process does things for the first time."""


def step_s(done: Finished) -> float:
    """Mean seconds of a step."""
    ends = [step["time"] for step in done.steps][DROP:]
    return float((ends[-1] - ends[0]) / (len(ends) - 1))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4], help="values of async.max_staleness")
    arguments.add_argument(
        "--calibrate", type=int, default=1, help="the one whose run is looked at (default: %(default)s)"
    )
    arguments.add_argument("--steps", type=int, default=60, help="run.steps (default: %(default)s)")
    given = parse(arguments)
    if given.calibrate not in given.bounds or given.steps < DROP + 10:
        arguments.error(f"--calibrate must be one of --bounds, --steps at least {DROP + 10}")
    runs: dict[int, Finished] = {}
    with progress("simulate: runs", len(given.bounds)) as step:
        for bound in given.bounds:
            runs[bound] = run(RECIPE, f"simulate-{bound}", {"run.steps": given.steps, "async.max_staleness": bound})
            step()
    root = runs[given.calibrate].root
    recipe = load_recipe(root / "recipe.toml")
    grid = Grid([recipe.rollout.workers], given.bounds, ["wait"], [None], SIMULATED_STEPS, seed=0)
    samples = recipe.trainer.prompts_per_step * recipe.algorithm.group_size
    measured = {bound: step_s(runs[bound]) for bound in given.bounds}
    outcomes = sweep(recipe, grid, times_of_run(recipe, root, Asked()))
    predicted = {outcome.max_staleness: samples / outcome.samples_s for outcome in outcomes}
    table = Table("max_staleness", "measured s a step", "predicted", "predicted / measured")
    for bound in given.bounds:
        ratio = f"{predicted[bound] / measured[bound]:.3f}"
        said = ratio + (" (calibrated from it)" if bound == given.calibrate else "")
        table.add_row(str(bound), f"{measured[bound]:.3f}", f"{predicted[bound]:.3f}", said)
    console.print(table)
    finish(
        {
            "measured_s": {str(b): round(measured[b], 4) for b in given.bounds},
            "predicted_s": {str(b): round(predicted[b], 4) for b in given.bounds},
            "ratio": {str(b): round(predicted[b] / measured[b], 4) for b in given.bounds},
            "calibrated_from": given.calibrate,
        },
        given.json,
    )


if __name__ == "__main__":
    main()
