"""Checkpoints: a folder that is renamed into place when everything in it is on disk; the DONE marker is its last file.

CHECKPOINTS/step-00000100/
  model.safetensors optimizer-N.safetensors rng.safetensors   the trainer's (no pickle: the directory is shared), or
  .metadata __RANK_N.distcp common.pt rng.safetensors         Megatron's (an index that is read as data alone)
  state.json                                                  step, lineage, the request planner, the prompt cursor
  DONE                                                        checksums of all of these (see folder_checksums.py)

Every file is compared with its checksum as it is read; where one is damaged, the next older checkpoint is taken.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from relax_hpc.files import folder_checksums, read_ahead
from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import discard, open_handle, sync_folder, to_json, write_file
from relax_hpc.files.run_dir import RunDir

T = TypeVar("T")


def unfinished(commit_dir: Path, step: int) -> Path:
    """The path in the incarnation's own folder where the checkpoint of `step` is written."""
    return commit_dir / f"checkpoint-{step}"


def begin(commit_dir: Path, step: int) -> Path:
    """Make an empty folder to write the checkpoint of `step` into. One process makes it before the others write."""
    folder = unfinished(commit_dir, step)
    shutil.rmtree(folder, ignore_errors=True)  # left by an attempt that found the disk full
    folder.mkdir()
    return folder


def commit(
    run: RunDir, folder: Path, step: int, state: dict[str, Any], checksums: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Make `folder` the checkpoint of `step`; one that exists already is kept. checksums: by file name, known ones; the
    other files are read back. Raises FileNotFoundError if fenced."""
    write_file(folder / "state.json", to_json({"step": step, **state}))
    for path in folder.iterdir():
        with open_handle(path, os.O_RDONLY) as handle:
            os.fsync(handle)
    folder_checksums.write(folder, checksums)
    final = run.checkpoint(step)
    if (final / "DONE").exists():
        shutil.rmtree(folder)
        return
    if final.exists():  # a folder that somebody copied or removed half
        os.rename(final, folder.with_name(f"torn-{step}"))
    os.rename(folder, final)
    sync_folder(final.parent)


def read_state(folder: Path) -> dict[str, Any]:
    """Read the state in a checkpoint. Raises DamagedCheckpoint."""
    path = folder / "state.json"
    try:
        text = path.read_bytes()
        folder_checksums.compare(path, folder_checksums.of_pieces([text]))
        state: dict[str, Any] = json.loads(text)
    except (OSError, ValueError) as error:
        raise folder_checksums.DamagedCheckpoint(f"'{path}' cannot be read: {error}") from error
    return state


def restore(
    run: RunDir,
    take: Callable[[Path], None],
    agree: Callable[[str], str],
    move_to_quarantine: Callable[[int, str], None],
) -> dict[str, Any] | None:
    """Load the newest checkpoint that is whole with `take`, and return its state; None before the first checkpoint.

    Collective: all processes take the same one. `agree` is given the damage that this process found, or "", and returns
    what any process found. A damaged checkpoint is passed to `move_to_quarantine` (its step, the damage) and the next
    older one is tried. Raises RunError where none is whole.
    """
    damage = []
    for step in reversed(run.checkpoint_steps()):
        folder = run.checkpoint(step)
        state, said = _tried(partial(read_state, folder), agree)
        if not said:  # on no process: all of them begin to take, or none does
            _, said = _tried(partial(take, folder), agree)
        if not said:
            return state
        damage.append(said)
        move_to_quarantine(step, said)
    if damage:
        raise RunError(
            f"no checkpoint of '{run.root}' is whole: {'; '.join(damage)}. Put one back from a copy into '{run.checkpoints}' (damaged ones "
            "were moved to quarantine/), or begin a new run"
        )
    return None


def _tried(read: Callable[[], T], agree: Callable[[str], str]) -> tuple[T | None, str]:
    """Call `read`; returns its result (None if damaged) and the damage that any process found, "" for none."""
    found, said = None, ""
    try:
        found = read()
    except folder_checksums.DamagedCheckpoint as error:
        said = str(error)
    return found, agree(said)


def move_to_quarantine(run: RunDir, commit_dir: Path, quarantine: Path, step: int, damage: str) -> None:
    """Move a damaged checkpoint to `quarantine`, by way of the commit directory; a person may still mend it."""
    name = f"checkpoint-{step:08d}.{uuid.uuid4().hex[:6]}.damaged"
    os.rename(run.checkpoint(step), commit_dir / name)
    sync_folder(run.checkpoints)
    os.rename(commit_dir / name, quarantine / name)
    logging.getLogger("checkpoint").warning(
        "the checkpoint of step %d is damaged, the next older one is taken, and the ledger's steps from there are replayed: %s. It is in '%s'",
        step, damage, quarantine / name,
    )  # fmt: skip


def begin_reading(run: RunDir, optimizer: str) -> None:
    """Start reading an optimizer's files of the newest checkpoint in threads, while the code that loads them is imported."""
    done = run.checkpoint_steps()
    if done:
        read_ahead.begin(list(run.checkpoint(done[-1]).glob(f"{optimizer}-*.safetensors")))


def rotate(run: RunDir, commit_dir: Path, keep: int) -> int:
    """Remove all checkpoints but the newest `keep`, each renamed away first; returns the step of the oldest left."""
    done = run.checkpoint_steps()
    for step in done[:-keep]:
        gone = commit_dir / f"old-{step}"
        os.rename(run.checkpoint(step), gone)
        discard(gone)
    return done[-keep:][0]
