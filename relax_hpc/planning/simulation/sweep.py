"""Simulates many setups and recommends one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from relax_hpc.files.errors import RunError
from relax_hpc.planning.simulation.assume import Asked, assumed
from relax_hpc.planning.simulation.model import Simulation
from relax_hpc.planning.simulation.outcome import Outcome, summarize
from relax_hpc.planning.simulation.setup import Setup
from relax_hpc.planning.simulation.times import Times
from relax_hpc.recipe import Recipe
from relax_hpc.recipe.problems import explain
from relax_hpc.spool.request import OnStale

ENOUGH = 0.95
"""Share of the greatest throughput that is enough: the cheapest setup that reaches it is recommended."""
BIAS = 0.02
"""Share of dropped requests from which answers count as biased towards short ones: such a setup is not recommended."""
ON_STALE: tuple[OnStale, ...] = get_args(OnStale)
TimesFor = Callable[[int], tuple[Times, list[str]]]
"""Number of workers -> (times, what they come from)."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The values to try, in every combination."""

    workers: Sequence[int]
    staleness: Sequence[int]
    on_stale: Sequence[OnStale]
    mtbf_h: Sequence[float | None]
    """Mean hours between faults of a node; None: no faults."""
    steps: int
    seed: int

    @property
    def points(self) -> int:
        return len(self.workers) * len(self.staleness) * len(self.on_stale) * len(self.mtbf_h)


def times_of_recipe(recipe: Recipe, path: Path, config: Path | None, asked: Asked) -> TimesFor:
    """Assume times; weights travel longer to more workers. Raises RunError for a model of unknown size."""
    from relax_hpc.planning.sizing.model import shape_of

    shape, _ = shape_of(recipe.model, path, config)

    def times(workers: int) -> tuple[Times, list[str]]:
        rollout = recipe.rollout.model_copy(update={"workers": workers})
        return assumed(recipe.model_copy(update={"rollout": rollout}), shape, asked)

    return times


def times_of_run(recipe: Recipe, path: Path, asked: Asked) -> TimesFor:
    """Measure times. Raises RunError where the run's metrics say too little."""
    from relax_hpc.monitor.analysis import RunView
    from relax_hpc.planning.simulation.calibrate import calibrated

    found = calibrated(RunView(path), recipe, asked)
    return lambda workers: found


def sweep(recipe: Recipe, grid: Grid, times: TimesFor, done: Callable[[], None] = lambda: None) -> list[Outcome]:
    """Simulate each point; `done` is called after each. Raises RecipeError for an impossible recipe."""
    for staleness, on_stale in itertools.product(grid.staleness, grid.on_stale):
        check(recipe, staleness, on_stale)
    found = []
    points = itertools.product(grid.mtbf_h, grid.workers, grid.staleness, grid.on_stale)
    for mtbf_h, workers, staleness, on_stale in points:
        setup = setup_of(recipe, workers, staleness, on_stale, mtbf_h, grid.steps, grid.seed)
        found.append(summarize(setup, mtbf_h, Simulation(setup, times(workers)[0]).run()))
        done()
    return found


def setup_of(
    recipe: Recipe, workers: int, staleness: int, on_stale: OnStale, mtbf_h: float | None, steps: int, seed: int
) -> Setup:
    hour_s = float("inf") if mtbf_h is None else mtbf_h * 3600
    return Setup(
        workers=workers,
        workers_per_node=recipe.rollout.workers // recipe.rollout.nodes,
        max_staleness=staleness,
        on_stale=on_stale,
        requests_per_step=recipe.requests_per_step,
        groups_per_request=recipe.rollout.groups_per_request,
        samples_per_prompt=recipe.algorithm.group_size,
        steps=steps,
        checkpoint_every=recipe.run.checkpoint_every,
        trainer_mtbf_s=hour_s / recipe.trainer.nodes,
        node_mtbf_s=hour_s,
        seed=seed,
    )


def check(recipe: Recipe, staleness: int, on_stale: OnStale) -> None:
    """Raise RecipeError where the recipe cannot have this [async]."""
    data: dict[str, Any] = recipe.model_dump(by_alias=True)
    data["async"] = {"max_staleness": staleness, "on_stale": on_stale}
    try:
        Recipe.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        raise explain(error, "the recipe with this async.max_staleness and async.on_stale") from None


def recommend(outcomes: Sequence[Outcome]) -> tuple[Outcome, str]:
    """(the cheapest of the fast setups, why), under the most frequent faults that were asked for."""
    worst = min((o.mtbf_h for o in outcomes if o.mtbf_h is not None), default=None)
    there = [o for o in outcomes if o.mtbf_h == worst]
    fair = [o for o in there if o.dropped <= BIAS] or there
    most = max(fair, key=lambda o: o.samples_s)
    enough = [o for o in fair if o.samples_s >= ENOUGH * most.samples_s]
    best = min(enough, key=lambda o: (o.workers, o.max_staleness, ("wait", "mask", "drop").index(o.on_stale)))
    why = f"{best.samples_s:,.0f} samples/s"
    if best is most and len(there) > len(fair):
        why += ", more than any other that is not biased towards short answers"
    elif best is most:
        why += ", the most of all"
    else:
        why += (
            f", {best.samples_s / most.samples_s:.0%} of the most ({most.workers} workers, max_staleness {most.max_staleness}, "
            f"{most.on_stale}), with the fewest workers, then the freshest tokens, that reach {ENOUGH:.0%} of it"
        )
    under = f" at a fault each {worst:g} h of a node" if worst is not None else ""
    bound = "the trainer waits" if best.trainer_waits > best.workers_idle else "workers wait"
    share = max(best.trainer_waits, best.workers_idle)
    return best, (
        f'{best.workers} workers on {best.nodes} nodes, async.max_staleness = {best.max_staleness}, async.on_stale = "{best.on_stale}"{under}: '
        f"{why}; {bound} {share:.0%} of the time"
    )


def on_stale_of(words: Sequence[str]) -> list[OnStale]:
    """Parse names of staleness policies. Raises RunError for one that does not exist."""
    unknown = [w for w in words if w not in ON_STALE]
    if unknown:
        raise RunError(
            f"--on-stale {unknown[0]}: there is no such policy; use any of {', '.join(ON_STALE)}, with commas between them"
        )
    return [on_stale for on_stale in ON_STALE if on_stale in words]
