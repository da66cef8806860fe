"""`relax-hpc simulate`: how many workers, how much staleness, what faults cost, in simulated time."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from relax_hpc.cli.errors import friendly
from relax_hpc.cli.options import Sets, Site, option, path_argument, path_option

if TYPE_CHECKING:
    from relax_hpc.planning.simulation.assume import Asked
    from relax_hpc.planning.simulation.sweep import TimesFor
    from relax_hpc.recipe import Recipe

STEPS = 300
SHARES = (0.5, 1, 2, 4)
"""Shares of the recipe's workers that are tried when nobody says how many."""


time = partial(option, rich_help_panel="Times")
seconds = partial(time, metavar="S", min=0.0)
"""An option for a time that is otherwise assumed or measured."""
Workers = Annotated[
    Optional[str],
    option(metavar="N,N,…", help="Rollout workers. [dim]default: half, all, 2 and 4 times the recipe's[/dim]"),
]
Staleness = Annotated[
    Optional[str], option(metavar="N,N,…", help="async.max_staleness. [dim]default: the recipe's[/dim]")
]
OnStale = Annotated[
    Optional[str],
    option(metavar="POLICY,…", help="async.on_stale: wait, drop, mask. [dim]default: the recipe's[/dim]"),
]
Mtbf = Annotated[
    str, typer.Option(metavar="HOURS,…", help="Mean time between failures of a node, trainer nodes as well; or none.")
]
Config = Annotated[
    Optional[Path],
    path_option(help="The model's config.json, where model.path is on another machine, as for `plan`."),
]
Sigma = Annotated[
    Optional[float], time(help="How long the tail of answers is: sigma of a lognormal; for a recipe.", min=0)
]
Bandwidth = Annotated[
    Optional[float], time(metavar="GB/S", help="Of weights and checkpoints; for a recipe.", min=0.001)
]


def simulate(
    target: Annotated[Path, path_argument(metavar="RECIPE|RUN", help="A recipe (TOML) or a run's directory.")],
    workers: Workers = None,
    staleness: Staleness = None,
    on_stale: OnStale = None,
    mtbf: Mtbf = "none",
    steps: Annotated[int, typer.Option(help="Training steps of each simulation.", min=20)] = STEPS,
    seed: Annotated[int, typer.Option(help="Same seed, same result.", min=0)] = 0,
    sets: Sets = [],  # noqa: B006
    site: Site = None,
    config: Config = None,
    answer_tokens: Annotated[Optional[float], time(help="Mean tokens of an answer; for a recipe.", min=1)] = None,
    sigma: Sigma = None,
    token_s: Annotated[Optional[float], seconds(help="From one token of an answer to the next; for a recipe.")] = None,
    bandwidth: Bandwidth = None,
    train_s: Annotated[Optional[float], seconds(help="A training step.")] = None,
    publish_s: Annotated[Optional[float], seconds(help="The trainer publishes a version of the weights.")] = None,
    fetch_s: Annotated[Optional[float], seconds(help="A worker takes a version of the weights.")] = None,
    checkpoint_s: Annotated[Optional[float], seconds(help="The trainer stands still for a checkpoint.")] = None,
    restart_s: Annotated[Optional[float], seconds(help="From a fault until the trainer, or a node, is back.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON: seconds, shares.")] = False,
) -> None:
    """Simulate a run: how many rollout workers, which max_staleness, what becomes of stale requests, what faults and file systems cost.

    The run's own rules decide (which requests are asked for, what a step may take, what is stale), in simulated time; every combination is a row. A RUN is simulated with the times that its metrics tell, a RECIPE with assumed ones, which are printed. Nothing is started; a row of two thousand workers takes about ten seconds.

    [dim]relax-hpc simulate recipe.toml --answer-tokens 3000 --sigma 1 --workers 8,16,32,64[/dim]
    [dim]relax-hpc simulate runs/countdown --staleness 0,1,2,4 --on-stale wait,drop[/dim]
    [dim]relax-hpc simulate recipe.toml --workers 2048 --set trainer.prompts_per_step=4096 --mtbf none,2000,500[/dim]
    """
    from rich.console import Console
    from rich.progress import Progress

    from relax_hpc.cli.tables import wide_console
    from relax_hpc.cli.tables.simulate_table import show
    from relax_hpc.planning.simulation.assume import Asked
    from relax_hpc.planning.simulation.sweep import Grid, on_stale_of, recommend, sweep

    asked = Asked(
        answer_tokens, sigma, token_s, train_s, publish_s, fetch_s, checkpoint_s, restart_s,
        None if bandwidth is None else bandwidth * 1e9,
    )  # fmt: skip
    with friendly():
        recipe, times = _recipe_and_times(target, sets, site, config, asked)
        grid = Grid(
            _numbers("--workers", workers, 1) if workers else _some_workers(recipe),
            _numbers("--staleness", staleness, 0) if staleness else [recipe.async_.max_staleness],
            on_stale_of(on_stale.split(",")) if on_stale else [recipe.async_.on_stale],
            _hours(mtbf), steps, seed,
        )  # fmt: skip
        with Progress(console=Console(stderr=True), transient=True) as bar:
            rows = bar.add_task("simulated", total=grid.points)
            outcomes = sweep(recipe, grid, times, lambda: bar.advance(rows))
        best, why = recommend(outcomes)
        notes = [*_notes(recipe, steps), *times(grid.workers[0])[1]]
    if not as_json:
        return show(outcomes, best, why, notes, wide_console())
    about = [outcome.to_json() for outcome in outcomes]
    typer.echo(json.dumps({"from": notes, "rows": about, "recommended": best.to_json(), "why": why}, indent=1))


def _recipe_and_times(
    target: Path, sets: list[str], site: Path | None, config: Path | None, asked: Asked
) -> tuple[Recipe, TimesFor]:
    """The recipe of a file or a run, and its times, assumed or measured. Raises RunError if its trainer waits for
    nobody."""
    from relax_hpc.files.errors import RunError
    from relax_hpc.files.run_dir import open_existing
    from relax_hpc.planning.simulation.sweep import times_of_recipe, times_of_run
    from relax_hpc.recipe import change_on_resume, load_recipe, site_file

    is_run = target.is_dir()
    if is_run:
        run = open_existing(target)
        if site or config:
            raise RunError(
                f"--site and --config are for a recipe: '{target}' is a run, whose recipe and metrics say all"
            )
        recipe = change_on_resume(load_recipe(run.recipe), sets)
    else:
        recipe = load_recipe(target, sets, site_file(site))
    if recipe.supervised:
        raise RunError(
            f"'{target}' is supervised fine-tuning: no worker generates for its trainer, so there is nothing to simulate"
        )
    return recipe, times_of_run(recipe, target, asked) if is_run else times_of_recipe(recipe, target, config, asked)


def _notes(recipe: Recipe, steps: int) -> list[str]:
    requests = recipe.requests_per_step
    return [
        f"{steps} steps (--steps) of {requests} requests (trainer.prompts_per_step / rollout.groups_per_request), so {requests} workers "
        "and as many for each version of max_staleness have something to do at most",
        "requests that are given back, or replace a dropped one, last as long again",
    ]


def _numbers(option: str, text: str, least: int) -> list[int]:
    """Raises RunError for what is no list of whole numbers from `least` on."""
    from relax_hpc.files.errors import RunError

    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise RunError(
            f"{option} {text}: expected whole numbers from {least} on with commas between them, such as 1,2,4"
        )
    return sorted({int(word) for word in words})


def _hours(text: str) -> list[float | None]:
    """Raises RunError for what is no list of hours above 0."""
    from relax_hpc.files.errors import RunError

    found: list[float | None] = []
    for word in (word.strip() for word in text.split(",")):
        try:
            hours = None if word == "none" else float(word)
        except ValueError:
            hours = math.nan
        if hours is not None and not 0 < hours < math.inf:
            raise RunError(
                f"--mtbf {text}: expected hours above 0, or none, with commas between them, such as none,2000,500"
            )
        found.append(hours)
    return list(dict.fromkeys(found))


def _some_workers(recipe: Recipe) -> list[int]:
    return sorted({max(1, int(share * recipe.rollout.workers)) for share in SHARES})
