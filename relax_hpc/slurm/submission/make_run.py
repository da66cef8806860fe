"""`python -m relax_hpc.slurm.submission.make_run KIND RECIPE [--set KEY=VALUE …] [--site FILE]`: make a run if missing.

For scripts that are sent by hand: all jobs of a run may call this at the same time, and the first one makes the run.
The calling job is recorded as one of kind KIND.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch.create import create, existing, place
from relax_hpc.recipe import Recipe, RecipeError, load_recipe, site_file
from relax_hpc.slurm.client import own_job
from relax_hpc.slurm.plan import KINDS, make_plan
from relax_hpc.slurm.submission.sbatch import forget_end, record, script, write_scripts
from relax_hpc.supervise.fork_server import ForkServer


def make(recipe: Recipe) -> RunDir:
    """Make the run of a recipe; leave an existing one as it is. Raises RunError."""
    run = existing(recipe)
    if run is None:
        make_plan(recipe)
        try:
            with ForkServer(place(recipe)) as fork_server:
                run = create(recipe, fork_server)
        except RunError:
            run = existing(recipe)
            if run is None:
                raise
    if not all(script(run, kind).exists() for kind in KINDS):
        write_scripts(run, make_plan(load_recipe(run.recipe)))
    return run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m relax_hpc.slurm.submission.make_run", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--site", type=Path)
    given = parser.parse_args(arguments)
    try:
        run = make(load_recipe(given.recipe, given.sets, site_file(given.site)))
    except (RunError, RecipeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if job := own_job():
        record(run, job, given.kind)
        if given.kind == "leader" and "SLURM_RESTART_COUNT" not in os.environ:
            forget_end(run)
    print(run.root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
