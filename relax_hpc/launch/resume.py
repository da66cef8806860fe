"""A run that goes on: what may change of its recipe, the user's files as they are now, failed groups made once more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

from relax_hpc.files.errors import RunError
from relax_hpc.files.permissions import keep_private
from relax_hpc.files.publish import read_json, replace, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch import user_code
from relax_hpc.launch.child import check_code
from relax_hpc.recipe import change_on_resume, differences, dump_recipe, load_recipe
from relax_hpc.recipe.schema import Recipe
from relax_hpc.supervise.fork_server import ForkServer
from relax_hpc.telemetry import read_heartbeat

Redo = Literal["score", "generate"]


def resume(
    run: RunDir, overrides: Sequence[str], fork_server: ForkServer, code: str | None = None, redo: str | None = None
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
    if read_json(run.identity).get("debug") == "evaluate":
        raise RunError(
            f"'{run.root}' is an evaluation, no run: `relax-hpc eval` made it, and the same command goes on with it"
        )
    old = load_recipe(run.recipe)
    keep_private(old.run.group_access)
    new = change_on_resume(old, overrides)
    changes = [change._asdict() for change in differences(old, new)]
    if code is not None:
        new, edited = user_code.copy_edited(run, new)
        check_code(run, new, fork_server)
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
