"""How much goes wrong without harm: kills, stops and errors at single calls of the file system, counted.

    schedules    every call of every kind of commit, in real runs on the fault file system (tools/faults/scenes.py)
    supervisor   every call of a supervisor outside a commit, made to fail in each way (tools/faults/supervisor_errors.py)
    model        a state machine of the protocol over the real code, and mutants with one step removed (tools/faults/model)
    caches       real runs on three hosts whose clients cache (tools/faults/hosts.py)

points, errors      kills and stops that were met; errors that were given. What was armed and never met is in `missed`.
lost, twice, torn   what the audits of all runs found; bit_identical: whether each run ended with the bits of an undisturbed one
control_differs     whether one bit of one token that is trained on ends in other weights: else the bits would say nothing
unknown             changes in a run's folder that no kind of commit names
mutants_killed      the fraction of the mutants that a schedule or a test finds out; states, violations: of the protocol itself
step_wait_s         the median wait of a step at max_staleness 0, by what the hosts cache
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.table import Table

from tools.bench import common
from tools.bench.chaos import control_differs
from tools.faults import faultfs
from tools.faults.hosts import step_waits
from tools.faults.model.killing import mutants
from tools.faults.scenes import SCENES, Found, first_points_of, lost_replies_of, play, points_of
from tools.faults.supervisor_errors import supervisor_errors

STORM = {"plain": 300, "scored": 60, "critic": 40, "partial": 60}
"""Errors by chance in each scene."""
SUPERVISOR_S = 120.0
PARTS = ["schedules", "supervisor", "model", "caches"]


def schedules(scenes: Sequence[str], share: float, folder: Path) -> dict[str, Any]:
    """Play the scenes with this share of their points; return the sums of what came of them."""
    found: dict[str, Found] = {}
    for scene in scenes:
        kills, replies = ([*_thinned(each, share)] for each in (points_of(scene), lost_replies_of(scene)))
        total = len(first_points_of(scene)) + sum(map(len, [*kills, *replies]))
        place = folder / scene
        place.mkdir()
        with common.progress(f"{scene}: {total} points, {round(share * STORM[scene])} errors by chance", total) as done:
            found[scene] = play(scene, place, kills, replies, round(share * STORM[scene]), done)
    return summed(found)


def _thinned(batches: Sequence[Sequence[Any]], share: float) -> Sequence[Sequence[Any]]:
    """An even part of the batches."""
    return [batch for i, batch in enumerate(batches) if int((i + 1) * share) > int(i * share)]


def summed(found: dict[str, Found]) -> dict[str, Any]:
    """Add the scenes up, and show a table of them."""
    table = Table("run", "steps", "kills and stops", "errors", "missed", "lost", "twice", "torn", "same bits")
    for scene, each in found.items():
        bits = {None: "not compared", True: "yes", False: "no"}[each.bit_identical]
        counts = (
            each.steps,
            each.points,
            each.errors,
            len(each.missed),
            len(each.lost),
            len(each.twice),
            len(each.torn),
        )
        table.add_row(scene, *map(str, counts), bits)
    common.show(table)
    numbers = {key: sum(getattr(each, key) for each in found.values()) for key in ("points", "errors")}
    faults = {key: sum(len(getattr(each, key)) for each in found.values()) for key in ("lost", "twice", "torn")}
    return {
        **numbers,
        **faults,
        "bit_identical": all(each.bit_identical is not False for each in found.values()),
        "missed": [f"{scene}: {point}" for scene, each in found.items() for point in each.missed],
        "unknown": sorted({change for each in found.values() for change in each.unknown}),
        "command_ends": {scene: each.ends for scene, each in found.items()},
    }


def model() -> dict[str, Any]:
    """Try the mutants, and show a table of what finds each of them out."""
    found, table = mutants(), Table("mutant", "found out by", "broken promise")
    for row in found.pop("table"):
        killer = row["killed_by"]
        table.add_row(
            row["mutant"], f"schedule {killer}" if isinstance(killer, int) else str(killer), row["broken_promise"]
        )
    common.show(table)
    return found


def caches() -> dict[str, Any]:
    """Measure what a step waits on hosts whose clients cache, and show a table of it."""
    waits, table = step_waits(), Table("clients' caches", "median wait of a step (s)")
    for profile, wait_s in waits.items():
        table.add_row(profile, f"{wait_s:.2f}")
    common.show(table)
    return {"step_wait_s": waits}


def main() -> None:
    arguments = common.parser(__doc__)
    arguments.add_argument(
        "--share", type=float, default=1.0, help="of all points and errors, evenly picked (default: %(default)s)"
    )
    arguments.add_argument("--scenes", nargs="+", choices=SCENES, default=[*SCENES], help="the runs (default: all)")
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="(default: all)")
    given = arguments.parse_args()
    if reason := faultfs.why_not():
        raise SystemExit(reason)
    folder = common.disk_directory("faults") / time.strftime("%H%M%S")
    folder.mkdir()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "schedules": lambda: (
            schedules(given.scenes, given.share, folder) | {"control_differs": control_differs(folder, 0)}
        ),
        "supervisor": lambda: dict(supervisor_errors(SUPERVISOR_S)),
        "model": model,
        "caches": caches,
    }
    result: dict[str, Any] = {"errors": 0}
    for name in given.parts:
        part = parts[name]()
        result |= part | {"errors": part.get("errors", 0) + result["errors"]}
    common.finish(result, given.json)


if __name__ == "__main__":
    main()
