"""A run is opened, or made: its directory is prepared under a hidden name and appears whole, or not at all.

recipe ► checks ► ROOT/.NAME.new/ (model, snapshot, recipe.toml, run.json) ──rename──► ROOT/NAME
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import relax_hpc
from relax_hpc.files.errors import RunError, explain_os
from relax_hpc.files.permissions import keep_private, make_private
from relax_hpc.files.publish import to_json, write_file
from relax_hpc.files.run_dir import RunDir, drafted, open_existing
from relax_hpc.launch import making, user_code
from relax_hpc.launch.child import LOADING, prepare
from relax_hpc.launch.fork import copy_state, refuse_misfit
from relax_hpc.launch.resume import refuse_of_new_run, resume
from relax_hpc.recipe import differences, dump_recipe, load_recipe, site_file, without_folders
from relax_hpc.recipe.schema import Recipe
from relax_hpc.supervise.fork_server import ForkServer
from relax_hpc.supervise.lease import refuse_if_held
from relax_hpc.supervise.supervisor import outcome_of

Debug = Literal["rollout-only", "train-only"]
Tell = Callable[[str], None]
"""Called with what is being done to a run that is made, each time that this changes."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A run that is ready to go on."""

    run: RunDir
    recipe: Recipe
    fork_server: ForkServer
    finished: int = 0
    """Steps the run has made, when there is nothing left to do; else 0."""


def open_or_create(
    target: Path,
    overrides: Sequence[str],
    *,
    fork: str | None = None,
    debug: str | None = None,
    shards_from: Path | None = None,
    site: Path | None = None,
    code: str | None = None,
    redo: str | None = None,
    tell: Tell = lambda doing: None,
) -> Opened:
    """Open the run that `target` (a recipe or a run directory) means, or make it. Raises RunError or RecipeError.

    code, redo: for a run that goes on, see `resume`.
    """
    if debug is not None and debug not in get_args(Debug):
        raise RunError(f"--debug {debug}: use one of {list(get_args(Debug))}")
    if (debug == "train-only") != (shards_from is not None):
        raise RunError("--debug train-only and --from RUN go together: it trains on the shards of that run")
    if fork is not None:
        if not target.is_dir():
            raise RunError(f"--fork starts from a checkpoint of a run, and '{target}' is no run directory")
        old = open_existing(target)
        refuse_of_new_run(code, redo)
        recipe = load_recipe(old.recipe, [*overrides, f"run.name={fork}"])
        refuse_misfit(old, place(recipe), recipe)
        return _created(recipe, fork_of=old, tell=tell)
    recipe, run = find(target, overrides, site)
    if run is not None:
        return _go_on(run, overrides if target.is_dir() else (), code, redo)
    if debug is not None and recipe.supervised:
        raise RunError(
            f"--debug {debug} takes a run's two sides apart; algorithm.name = 'sft' has one only: leave it out"
        )
    refuse_of_new_run(code, redo)
    source = open_existing(shards_from).root if shards_from else None
    return _created(recipe, debug=cast(Debug | None, debug), shards_from=source, tell=tell)


def _created(recipe: Recipe, **options: Any) -> Opened:
    fork_server = ForkServer(place(recipe))
    run = create(recipe, fork_server, **options)
    return Opened(run, load_recipe(run.recipe), fork_server)


def _go_on(run: RunDir, overrides: Sequence[str], code: str | None, redo: str | None) -> Opened:
    refuse_if_held(run)
    fork_server = ForkServer(run)
    recipe = resume(run, overrides, fork_server, code, redo)
    return Opened(run, recipe, fork_server, finished(run, recipe))


def finished(run: RunDir, recipe: Recipe) -> int:
    """Return the steps that the run has made, when there is nothing left to do; else 0."""
    made, outcome = run.checkpoint_steps(), outcome_of(run)
    done = outcome is not None and outcome["outcome"] == "done"
    return made[-1] if made and made[-1] >= recipe.run.steps and done else 0


def find(target: Path, sets: Sequence[str], site: Path | None = None) -> tuple[Recipe, RunDir | None]:
    """Return the recipe that `target` (a recipe, or a run directory, whose recipe `sets` does not change yet) holds, and
    the run where it exists. Raises RunError or RecipeError."""
    if target.is_dir():
        run = open_existing(target)
        return load_recipe(run.recipe), run
    if not target.exists():
        raise RunError(f"no recipe and no run at '{target}' (seen from {Path.cwd()})")
    recipe = load_recipe(target, sets, site_file(site))
    return recipe, existing(recipe)


def place(recipe: Recipe) -> RunDir:
    """Return where the run of `recipe` is, or will be."""
    return RunDir(recipe.run.root / recipe.run.name)


def create(
    recipe: Recipe,
    fork_server: ForkServer,
    debug: Debug | None = None,
    shards_from: Path | None = None,
    fork_of: RunDir | None = None,
    tell: Tell = lambda doing: None,
) -> RunDir:
    """Make the run of `recipe`. `fork_of`: begin at that run's newest checkpoint. Raises RunError; then nothing is left
    behind.
    """
    final = place(recipe).root
    try:
        recipe.run.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"run.root = '{recipe.run.root}' cannot be made: {explain_os(error)}; --set run.root=DIR takes another"
        ) from error
    keep_private(recipe.run.group_access)  # after making the root, in which others may have runs
    try:
        with drafted(final) as draft:
            making.say(draft, LOADING)
            tell(LOADING)
            _snapshot(draft)
            write_file(draft.recipe, dump_recipe(user_code.seen_from(draft, user_code.copy(recipe, draft))).encode())
            prepare(draft, fork_server, fork_of=fork_of, tell=tell)
            about = {
                "name": recipe.run.name, "id": uuid.uuid4().hex, "created": time.time(), "version": relax_hpc.__version__,
                "debug": debug, "shards_from": str(shards_from) if shards_from else None, "fork_of": str(fork_of.root) if fork_of else None,
            }  # fmt: skip
            if fork_of is not None:
                about["fork_step"] = copy_state(fork_of, draft, recipe)
            write_file(draft.identity, to_json(about))
            draft.doing.unlink(missing_ok=True)
            make_private(draft.root, recipe.run.group_access)
    except FileExistsError:
        raise RunError(f"'{final}' exists already") from None
    except OSError as error:
        if RunDir(final).exists:
            raise RunError(
                f"'{final}' was made by another command at this moment, which works on it now: `relax-hpc status {final}` shows it, "
                f"`relax-hpc run {final}` goes on with it when that has ended"
            ) from None
        if final.exists():
            raise RunError(
                f"'{final}' exists and is no run of this recipe: choose another with --set run.name=NAME"
            ) from error
        raise RunError(
            f"the run '{final}' cannot be made: {explain_os(error)}; --set run.root=DIR makes it elsewhere; nothing of it is left"
        ) from error
    return RunDir(final)


def existing(recipe: Recipe) -> RunDir | None:
    """Return the run that this recipe made before; None if there is none. Raises RunError if the run of that name
    differs."""
    run = place(recipe)
    if not run.exists:
        return None
    # How a run is sent to a cluster does not make it another run.
    changes = [
        c
        for c in differences(load_recipe(run.recipe), recipe)
        if without_folders(c.old) != without_folders(c.new) and c.key.split(".")[0] != "slurm"
    ]
    if changes:
        listed = "; ".join(f"{c.key}: {c.old!r} there, {c.new!r} here" for c in changes[:5])
        raise RunError(
            f"'{run.root}' is a run of another recipe ({listed}): go on with it by `relax-hpc run {run.root}`, "
            "or start a new one with --set run.name=NAME"
        )
    return run


def _snapshot(run: RunDir) -> None:
    """Keep versions, git state, and our code if it is a source tree."""
    run.snapshot.mkdir()
    versions = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    write_file(
        run.snapshot / "versions.json", to_json({"python": sys.version, "packages": dict(sorted(versions.items()))})
    )
    package = Path(relax_hpc.__file__).parent
    if (package.parent / "setup.cfg").exists():
        shutil.copytree(package, run.snapshot / "code" / "relax_hpc", ignore=shutil.ignore_patterns("__pycache__"))
        for name, *command in (("git-commit", "rev-parse", "HEAD"), ("git-diff", "diff", "HEAD")):
            git = subprocess.run(["git", "-C", str(package.parent), *command], capture_output=True, check=False)
            if git.returncode == 0:
                write_file(run.snapshot / name, git.stdout)
