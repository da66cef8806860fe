"""Estimates how much a run will write, and checks that there is room.

An upper bound from the recipe: full-length answers.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal
from safetensors import SafetensorError, safe_open

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch.child import count_rows
from relax_hpc.planning.doctor.checks import Check, failed, note, ok, warning
from relax_hpc.planning.doctor.files import existing_part
from relax_hpc.planning.sizing import model
from relax_hpc.planning.sizing.traffic import prompt_media_bytes
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.algorithm import Ppo
from relax_hpc.recipe.tables.model import PathModel, TinyModel
from relax_hpc.recipe.tables.source import keys_of, left_out
from relax_hpc.spool.layout import SCORE_BYTES

STATE_BYTES = 12
"""Bytes of a parameter in a checkpoint: master weights and two moments of AdamW, in float32."""
TOKEN_BYTES = 16
"""Bytes of a token in a shard, all columns together, rounded up."""
PROMPT_TOKENS = 512
"""Tokens assumed for a prompt, whose length the recipe does not say."""
CHECKPOINT_FILES, VERSION_FILES = 15, 2
"""Files of a checkpoint and of a version, at most: with a reference and a critic."""
SPARSE_VERSIONS = 3
"""Versions that exist at a time where only some are published."""


class Need(NamedTuple):
    """Bytes and files that a run writes, at most."""

    checkpoints: int  # bytes
    weights: int  # bytes
    shards: int  # bytes
    files: int

    @property
    def least(self) -> int:
        return self.checkpoints + self.weights

    @property
    def all(self) -> int:
        return self.least + self.shards


def need(recipe: Recipe) -> Need | None:
    """Compute an upper bound; None when the model's size cannot be read."""
    count = parameters(recipe)
    if count is None:
        return None
    run, rollout = recipe.run, recipe.rollout
    kept = run.keep_checkpoints + 1  # a new one is written before the oldest goes
    replayed = min(run.steps, kept * run.checkpoint_every)
    versions = replayed + recipe.async_.max_staleness + 1
    if recipe.supervised:  # versions that are evaluated, or that a run or an attempt begins with
        versions = SPARSE_VERSIONS * recipe.generates
    width = 4 if recipe.trainer.dtype == "float32" else 2
    steps = run.steps if recipe.spool.keep == "all" else replayed
    longest = PROMPT_TOKENS + rollout.max_new_tokens * rollout.max_turns
    if isinstance(recipe.model, TinyModel):
        longest = min(longest, recipe.model.context)
    requests, token_bytes = recipe.most_requests_per_step, TOKEN_BYTES + SCORE_BYTES * len(recipe.columns)
    shards = steps * requests * rollout.groups_per_request * recipe.algorithm.group_size * longest * token_bytes
    media = prompt_media_bytes(recipe, min(PROMPT_TOKENS, longest))
    shards += steps * requests * rollout.groups_per_request * media
    if recipe.spool.quota_gb is not None:
        shards = min(shards, int(recipe.spool.quota_gb * 1e9))
    files = (
        run.steps + steps * requests * (1 + len(recipe.columns)) + kept * CHECKPOINT_FILES + versions * VERSION_FILES
    )
    critic = isinstance(recipe.algorithm, Ppo)  # about the policy's size
    return Need(kept * count * STATE_BYTES * (1 + critic), versions * count * width, shards, files)


def parameters(recipe: Recipe) -> int | None:
    """Number of parameters of the model; None when they cannot be counted."""
    if isinstance(recipe.model, TinyModel):
        return model.parameters(model.shape_of(recipe.model, Path())[0]).all
    try:
        return sum(map(_in_safetensors, recipe.model.path.glob("*.safetensors"))) or None
    except (OSError, SafetensorError):
        return None


def room(recipe: Recipe) -> list[Check]:
    """Check the space and files that are left against what the run will write."""
    folder = existing_part(recipe.run.root.absolute())
    there = os.statvfs(folder)
    free, wanted = there.f_bavail * there.f_frsize, need(recipe)
    if wanted is None:
        return [note("space", f"{decimal(free)} free; the model's size is not known, so neither is what is needed")]
    words = f"{decimal(free)} free in '{folder}' (quotas do not show here)"
    sizes = (wanted.checkpoints, wanted.weights, wanted.shards)
    parts = "checkpoints {}, weights {}, shards at most {}".format(*map(decimal, sizes))
    mend = (
        "make room, lower run.keep_checkpoints or run.checkpoint_every, or set spool.keep = 'needed' or spool.quota_gb"
    )
    if free < wanted.least:
        space = failed("space", words, parts, mend)
    elif free < wanted.all:
        space = warning("space", words, parts, mend)
    else:
        space = ok("space", f"{words}; {parts}")
    return [space, inodes(folder, wanted.files)]


def inodes(folder: Path, wanted: int) -> Check:
    """Check how many files the file system of `folder` can still hold against how many the run will make."""
    there = os.statvfs(folder)
    # btrfs and many network file systems do not count inodes: they report 0 of 0, or 0 left. If a file can be made, 0 is no real count.
    if there.f_files == 0 or (there.f_favail == 0 and _has_room_for_a_file(folder)):
        return note("inodes", "not counted by this file system")
    if there.f_favail < wanted:
        return failed("inodes", f"{there.f_favail} left", f"about {wanted}", "larger requests (rollout.groups_per_request), or spool.keep = 'needed'")  # fmt: skip
    return ok("inodes", f"{there.f_favail} left, about {wanted} are needed")


def _has_room_for_a_file(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError as error:  # another check reports a folder that cannot be written
        return error.errno not in (errno.ENOSPC, errno.EDQUOT)


def inputs(recipe: Recipe) -> list[Check]:
    """Check that models and prompt files can be read."""
    found = []
    if isinstance(recipe.model, PathModel):
        found.append(_model("model.path", recipe.model.path))
    found += [_model(key, path) for key, path in recipe.models_beside.items()]
    for table, source in zip(keys_of(recipe.sources), recipe.sources, strict=True):
        path = getattr(source, "prompts", None)
        if path is None:
            continue
        key = f"{table}.prompts"
        if Path(path).exists() and os.access(path, os.R_OK):
            found.append(ok(key, str(path)))
        else:
            found.append(failed(key, f"'{path}' cannot be read", "a .jsonl or .parquet file, or a folder", f"--set {key}=FILE, or mend its permissions"))  # fmt: skip
    return found


def rows(recipe: Recipe, run: RunDir | None) -> list[Check]:
    """Count rows of prompt files that are left out or cut: for a run as it counted them, for a recipe as its run would."""
    try:
        counts = read_json(run.rows) or {} if run is not None else count_rows(recipe)
    except RunError as error:
        return [failed("rows of prompts", str(error), "rows that can be used", "mend them, or leave them out: too_long and missing_answer of the source")]  # fmt: skip
    return [note("rows of prompts", line) for line in left_out(counts)]


def _model(key: str, path: Path) -> Check:
    weights = sorted(path.glob("*.safetensors"))
    missing = [name for name, there in (("config.json", (path / "config.json").is_file()), ("*.safetensors", bool(weights))) if not there]  # fmt: skip
    closed = [file.name for file in (path / "config.json", *weights) if file.exists() and not os.access(file, os.R_OK)]
    if missing or closed:
        what = f"'{path}' has no {' and no '.join(missing)}" if missing else f"no permission to read {', '.join(closed[:3])} in '{path}'"  # fmt: skip
        return failed(key, what, "a model directory that `from_pretrained` loads", f"--set {key}=DIR, or mend its permissions")  # fmt: skip
    return ok(key, f"{path}: {len(weights)} files, {decimal(sum(file.stat().st_size for file in weights))}")


def _in_safetensors(path: Path) -> int:
    """Count the numbers in a safetensors file from its header."""
    with safe_open(path, "numpy") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
