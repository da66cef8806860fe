"""A new run: its directory is prepared under a hidden name and appears whole, or not at all.

recipe ► checks ► ROOT/.NAME.new/ (model, snapshot, recipe.toml, run.json) ──rename──► ROOT/NAME
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

import relax_hpc
from relax_hpc.files import folder_checksums
from relax_hpc.files.errors import RunError, explain_os
from relax_hpc.files.permissions import keep_private, make_private
from relax_hpc.files.publish import read_json, replace, to_json, write_file
from relax_hpc.files.run_dir import RunDir, drafted
from relax_hpc.launch import making, user_code
from relax_hpc.recipe import change_on_resume, differences, dump_recipe, load_recipe, without_folders
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.source import FilePrompts
from relax_hpc.supervise.fork_server import PREPARE, ForkedProcess, ForkServer
from relax_hpc.supervise.processes import PIPE_BYTES, how_it_ended
from relax_hpc.telemetry import read_heartbeat

LOADING = "copying the code, loading torch and transformers (some seconds; more the first time)"
LOOK_S = 0.2
"""Seconds between looks at the progress of a run's preparation."""
Debug = Literal["rollout-only", "train-only"]
Redo = Literal["score", "generate"]


class PrepareError(Exception):
    """An unforeseen error while a run was prepared; its first line is short, the traceback follows."""


def place(recipe: Recipe) -> RunDir:
    """Return where the run of `recipe` is, or will be."""
    return RunDir(recipe.run.root / recipe.run.name)


def create(
    recipe: Recipe,
    fork_server: ForkServer,
    debug: Debug | None = None,
    shards_from: Path | None = None,
    fork_of: RunDir | None = None,
    tell: Callable[[str], None] = lambda doing: None,
) -> RunDir:
    """Make the run of `recipe`. `fork_of`: begin at that run's newest checkpoint. Raises RunError; then nothing is left
    behind.

    tell: called with what is being done, each time that this changes.
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
            _prepare(draft, fork_server, fork_of=fork_of, tell=tell)
            about = {
                "name": recipe.run.name, "id": uuid.uuid4().hex, "created": time.time(), "version": relax_hpc.__version__,
                "debug": debug, "shards_from": str(shards_from) if shards_from else None, "fork_of": str(fork_of.root) if fork_of else None,
            }  # fmt: skip
            if fork_of is not None:
                about["fork_step"] = _fork(fork_of, draft, recipe)
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


def resume(
    run: RunDir, overrides: list[str], fork_server: ForkServer, code: str | None = None, redo: str | None = None
) -> Recipe:
    """Return the recipe of a run that goes on, with `overrides` of keys that may change. Each change is written down
    with its step.

    code: "new" takes the user's files as they are now, once a child of `fork_server` has seen that they load.
    redo: how failed groups that no step took are made once more; with new code, they are scored. Raises RunError or
    RecipeError.
    """
    if code not in (None, "new"):
        raise RunError(f"--code {code}: use 'new', or leave it out to go on with the run's own copies")
    if redo is not None and redo not in get_args(Redo):
        raise RunError(f"--redo {redo}: use one of {list(get_args(Redo))}")
    if identity(run).get("debug") == "evaluate":
        raise RunError(
            f"'{run.root}' is an evaluation, no run: `relax-hpc eval` made it, and the same command goes on with it"
        )
    old = load_recipe(run.recipe)
    keep_private(old.run.group_access)
    new = change_on_resume(old, overrides)
    changes = [change._asdict() for change in differences(old, new)]
    if code is not None:
        new, edited = user_code.take_new(run, new)
        _check_code(run, new, fork_server)
        changes += [{"key": "code", **one._asdict()} for one in edited]
    if changes:
        _write_down(run, changes)
        replace(run.recipe, dump_recipe(user_code.seen_from(run, new)).encode())
    if redo is not None or code is not None:
        from relax_hpc.launch.redo import redo_failed  # reads shards with h5py, which a supervisor must not import

        how = cast(Redo, redo or "score")
        redone = redo_failed(run, new, how)
        _write_down(run, [{"key": "redo", "how": how, "requests": redone}])
    return new


def _write_down(run: RunDir, changes: list[dict[str, Any]]) -> None:
    """Add to RUN/changes.jsonl: a line each, with step and time."""
    step = (read_heartbeat(run, "trainer-0") or {}).get("step", 0)
    before = run.changes.read_bytes() if run.changes.exists() else b""
    lines = [to_json({"step": step, "time": time.time(), **change}).replace(b"\n", b"") + b"\n" for change in changes]
    replace(run.changes, before + b"".join(lines))


def refuse_of_new_run(code: str | None, redo: str | None) -> None:
    """Raise RunError if options for going on with a run are given for a run that is still to be made."""
    for option, value in {"--code": code, "--redo": redo}.items():
        if value is not None:
            raise RunError(f"{option} {value} is for a run that goes on, and this one is to be made: leave it out")


def note_of_edited(run: RunDir) -> str | None:
    """Return a note that the user's files changed since the run copied them, with what can be done; None if they have
    not."""
    files = [one.file for one in user_code.edited(run, load_recipe(run.recipe))]
    if not files:
        return None
    return (
        f"{', '.join(files)} changed since the run copied {'it' if len(files) == 1 else 'them'}: it goes on with its own "
        f"{'copy' if len(files) == 1 else 'copies'}; --code new takes what is there now"
    )


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


def identity(run: RunDir) -> dict[str, Any]:
    about: dict[str, Any] = read_json(run.identity)
    return about


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
        _prepare(scratch, fork_server, "rows")
        counts: dict[str, dict[str, int]] = read_json(scratch.rows)
        return counts


def _prepare(
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
    reading, writing = os.pipe()
    try:
        child = fork_server.spawn(
            [PREPARE, str(run.root), what, *([str(fork_of.root)] if fork_of else [])], log, writing
        )
        os.close(writing)
        try:
            code = _wait(child, run, tell)
        except BaseException:
            child.kill()
            raise
        if code == 0:
            return
        said = os.read(reading, PIPE_BYTES) if select.select([reading], [], [], 0)[0] else b""
    finally:
        os.close(reading)
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


def _check_code(run: RunDir, recipe: Recipe, fork_server: ForkServer) -> None:
    """Raise RunError for code that does not load, or does not fit."""
    with tempfile.TemporaryDirectory(prefix=".code.", dir=run.root) as folder:
        scratch = RunDir(folder)
        scratch.logs.mkdir()
        write_file(scratch.recipe, dump_recipe(recipe).encode())
        _prepare(scratch, fork_server, "code")


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


def _fork(old: RunDir, new: RunDir, recipe: Recipe) -> int:
    """Copy the newest checkpoint of `old`, its scorers' reference and its critic of that time, into `new`; return the
    step."""
    before = load_recipe(old.recipe)
    if before.trains_critic != recipe.trains_critic and (before.critic or recipe.critic):
        has, gets = ("with" if of.critic else "without" for of in (before, recipe))
        raise RunError(
            f"'{old.root}' is a run {has} [critic], the fork one {gets}: the critic does not move between the trainer and processes of "
            "its own; leave the table as it is there"
        )
    if not old.checkpoint_steps():
        raise RunError(
            f"'{old.root}' has no checkpoint to fork from: let it train until one is written (run.checkpoint_every)"
        )
    step = _copied(old, new, old.checkpoint_steps()[::-1])
    if "reference" in before.scored and "reference" in recipe.scored:
        shutil.copytree(old.reference, new.reference)
    if before.critic and recipe.critic:
        _fork_critic(RunDir(old.critic), RunDir(new.critic), step)
    return step


def _copied(old: RunDir, new: RunDir, steps: Sequence[int], to: int | None = None) -> int:
    """Copy the first whole checkpoint of these steps, as that of step `to` or of its own; return its step. Raises
    RunError if none is whole."""
    damage = []
    for step in steps:
        copy = new.checkpoint(step if to is None else to)
        shutil.copytree(old.checkpoint(step), copy)
        try:
            folder_checksums.compare_all(copy)
        except folder_checksums.DamagedCheckpoint as error:
            shutil.rmtree(copy)
            damage.append(str(error).replace(str(copy), str(old.checkpoint(step))))
            logging.getLogger("fork").warning("an older checkpoint is taken: %s", damage[-1])
            continue
        return step
    raise RunError(f"no checkpoint of '{old.root}' is whole: {'; '.join(damage)}; put one back from a copy")


def _fork_critic(old: RunDir, new: RunDir, step: int) -> None:
    """Copy the critic's checkpoint nearest to `step`, as that of `step`. If there is none yet, the fork's critic begins
    anew."""
    nearest = sorted(old.checkpoint_steps(), key=lambda one: abs(one - step))
    if nearest:
        _copied(old, new, nearest, to=step)
        copy = new.checkpoint(step)
        known = folder_checksums.expected(copy)
        replace(copy / "state.json", to_json({"step": step}))
        (copy / folder_checksums.SEAL).unlink()
        folder_checksums.write(copy, {name: checksum for name, checksum in known.items() if name != "state.json"})
