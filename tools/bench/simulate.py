"""Does the simulation say what runs do? Real runs of several setups; one of them calibrates, the others are predicted.

A setup is max_staleness:workers:on_stale. Training and generation are sleeps (sides/paced.py: a step of a second, requests of a
lognormal second), so that two cores carry trainer and workers; requests, shards, weights and files are those of any run.
The mean time of a step, without the first ones, predicted over measured: 1 is exact, above 1 the run was faster than said.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.table import Table

from relax_hpc.planning.simulation.assume import Asked
from relax_hpc.planning.simulation.sweep import Grid, on_stale_of, sweep, times_of_run
from relax_hpc.recipe import load_recipe
from tools.bench.common import ROOT, finish, parse, parser, progress, show
from tools.bench.runs import Finished, run

RECIPE = ROOT / "tools" / "bench" / "simulate.toml"
POINTS = ("1:3:wait", "0:3:wait", "2:3:wait", "4:3:wait", "1:2:wait", "1:3:drop")
"""The first one calibrates."""
SIMULATED_STEPS = 2000
DROP = 6
"""First steps that are left out: the pipeline fills, every process does things for the first time."""


def step_s(done: Finished) -> float:
    """Mean seconds of a step."""
    ends = [step["time"] for step in done.steps][DROP:]
    return float((ends[-1] - ends[0]) / (len(ends) - 1))


def predicted_s(calibration: Finished, point: str) -> float:
    """The same of a setup, from another one's run."""
    recipe = load_recipe(calibration.root / "recipe.toml")
    staleness, workers, on_stale = point.split(":")
    grid = Grid([int(workers)], [int(staleness)], on_stale_of([on_stale]), [None], SIMULATED_STEPS, seed=0)
    outcome = sweep(recipe, grid, times_of_run(recipe, calibration.root, Asked()))[0]
    return recipe.trainer.prompts_per_step * recipe.algorithm.group_size / outcome.samples_s


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--points", nargs="+", default=list(POINTS[:3]), help="setups; the first one calibrates")
    arguments.add_argument("--steps", type=int, default=40, help="run.steps (default: %(default)s)")
    given = parse(arguments)
    if given.steps < DROP + 10:
        arguments.error(f"--steps {given.steps}: at least {DROP + 10}, since the first {DROP} are left out")
    runs: dict[str, Finished] = {}
    with progress("simulate: runs", len(given.points)) as step:
        for point in given.points:
            staleness, workers, on_stale = point.split(":")
            sets = {"async.max_staleness": staleness, "rollout.workers": workers, "async.on_stale": on_stale}
            runs[point] = run(RECIPE, f"simulate-{point.replace(':', '-')}", {"run.steps": given.steps, **sets})
            step()
    measured = {point: step_s(done) for point, done in runs.items()}
    predicted = {point: predicted_s(runs[given.points[0]], point) for point in given.points}
    ratio = {point: predicted[point] / measured[point] for point in given.points}
    table = Table("max_staleness:workers:on_stale", "measured s a step", "predicted", "predicted / measured")
    for point in given.points:
        said = f"{ratio[point]:.3f}" + (" (calibrates)" if point == given.points[0] else "")
        table.add_row(point, f"{measured[point]:.3f}", f"{predicted[point]:.3f}", said)
    show(table)
    rounded = {
        name: {point: round(value, 4) for point, value in found.items()}
        for name, found in (("measured_s", measured), ("predicted_s", predicted), ("ratio", ratio))
    }
    finish({**rounded, "calibrated_from": given.points[0]}, given.json)


if __name__ == "__main__":
    main()
