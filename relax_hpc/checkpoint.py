"""Checkpoints: a folder that is renamed into place when everything in it is on disk; the DONE marker is its last file.

CHECKPOINTS/step-00000100/
  model.safetensors optimizer-N.safetensors rng.safetensors   the trainer's (no pickle: the directory is shared), or
  .metadata __RANK_N.distcp common.pt rng.safetensors         Megatron's (an index that is read as data alone)
  state.json                                                  step, lineage, the book of orders, the prompt cursor
  DONE
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from relax_hpc import read_ahead
from relax_hpc.run_dir import RunDir, sync_folder, to_json, write_file


def unfinished(via: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written, in the incarnation's own folder."""
    return via / f"checkpoint-{step}"


def begin(via: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of `step` into. One process makes it; what others write comes after."""
    folder = unfinished(via, step)
    shutil.rmtree(folder, ignore_errors=True)  # what an attempt left that found the disk full
    folder.mkdir()
    return folder


def commit(run: RunDir, folder: Path, step: int, state: dict[str, Any]) -> None:
    """Make `folder` the checkpoint of `step`. One that is there already is kept. Raises FileNotFoundError if fenced."""
    write_file(folder / "state.json", to_json({"step": step, **state}))
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    write_file(folder / "DONE", b"")
    sync_folder(folder)
    final = run.checkpoint(step)
    if (final / "DONE").exists():
        shutil.rmtree(folder)
        return
    if final.exists():  # a folder that somebody copied or removed half
        os.rename(final, folder.with_name(f"torn-{step}"))
    os.rename(folder, final)
    sync_folder(final.parent)


def newest(run: RunDir) -> tuple[Path, dict[str, Any]] | None:
    """The newest complete checkpoint and its state; None before the first."""
    done = run.checkpoint_steps()
    if not done:
        return None
    folder = run.checkpoint(done[-1])
    return folder, json.loads((folder / "state.json").read_bytes())


def begin_reading(run: RunDir, optimizer: str) -> None:
    """Read this optimizer of the newest checkpoint in threads, for a process that is still importing what will load it."""
    done = run.checkpoint_steps()
    if done:
        read_ahead.begin(list(run.checkpoint(done[-1]).glob(f"{optimizer}-*.safetensors")))


def rotate(run: RunDir, via: Path, keep: int) -> int:
    """Remove all but the newest `keep`; the step of the oldest that is left. Moved away first: half a checkpoint is none."""
    done = run.checkpoint_steps()
    for step in done[:-keep]:
        gone = via / f"old-{step}"
        os.rename(run.checkpoint(step), gone)
        shutil.rmtree(gone)
    return done[-keep:][0]
