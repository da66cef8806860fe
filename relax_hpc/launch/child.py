"""Runs launch/prepare.py in a child of the fork server, for whoever makes a run: its own process never imports torch."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Callable

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch import making
from relax_hpc.recipe import dump_recipe
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.source import FilePrompts
from relax_hpc.supervise.fork_server import PREPARE, ForkedProcess, ForkServer
from relax_hpc.supervise.processes import how_it_ended

LOADING = "copying the code, loading torch and transformers (some seconds; more the first time)"
LOOK_S = 0.2
"""Seconds between looks at the progress of a run's preparation."""


class PrepareError(Exception):
    """An unforeseen error while a run was prepared; its first line is short, the traceback follows."""


def prepare(
    run: RunDir,
    fork_server: ForkServer,
    what: str = "all",
    fork_of: RunDir | None = None,
    tell: Callable[[str], None] = lambda doing: None,
) -> None:
    """Build the model's folder and check everything that needs torch. what = "code" or "rows": check the user's code or
    the prompts alone.

    tell: called with what is being done, each time that this changes.
    """
    log = run.logs / "prepare.log"
    child = fork_server.spawn([PREPARE, str(run.root), what, *([str(fork_of.root)] if fork_of else [])], log)
    try:
        code = _wait(child, run, tell)
    except BaseException:
        child.kill()
        raise
    if code == 0:
        return
    said = child.final_message
    ours, text = json.loads(said) if said else (False, f"{how_it_ended(code)}\n{log.read_text(errors='replace')}")
    if ours:
        raise RunError(text)
    raise PrepareError(f"the run could not be prepared: {text.strip().splitlines()[-1]}\n{text}")


def _wait(child: ForkedProcess, run: RunDir, tell: Callable[[str], None]) -> int:
    """Wait for the child to end; return its exit code."""
    said = LOADING
    while True:
        if (doing := making.read(run)) and doing != said:
            tell(said := doing)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(LOOK_S)


def check_code(run: RunDir, recipe: Recipe, fork_server: ForkServer) -> None:
    """Raise RunError for code that does not load, or does not fit."""
    with tempfile.TemporaryDirectory(prefix=".code.", dir=run.root) as folder:
        scratch = RunDir(folder)
        scratch.logs.mkdir()
        write_file(scratch.recipe, dump_recipe(recipe).encode())
        prepare(scratch, fork_server, "code")


def count_rows(recipe: Recipe) -> dict[str, dict[str, int]]:
    """Count the rows that a run of `recipe` would leave out or cut, as making the run does; by the keys of their
    sources. Raises RunError."""
    if not any(isinstance(source, FilePrompts) and source.counted for source in recipe.sources):
        return {}
    with (
        tempfile.TemporaryDirectory(prefix="relax-hpc-") as folder,
        ForkServer(scratch := RunDir(folder)) as fork_server,
    ):
        scratch.logs.mkdir()
        write_file(scratch.recipe, dump_recipe(recipe).encode())
        prepare(scratch, fork_server, "rows")
        counts: dict[str, dict[str, int]] = read_json(scratch.rows)
        return counts
