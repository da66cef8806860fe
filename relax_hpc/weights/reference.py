"""The reference weights: the policy before step 0, kept once for the whole run, so that scorers can hold them.

    trainer, before step 0: export ──threads: checksum, write, fsync──► INCARNATION/reference ──rename──► RUN/reference
    scorer:                 RUN/reference ──parts mapped, compared with their checksums──► model

A trainer that begins anew (it died before its first checkpoint) replaces them where its weights differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from pathlib import Path

from torch import Tensor

import relax_hpc.weights.parts as parts
from relax_hpc.files import tensor_files
from relax_hpc.files.publish import read_json, sync_folder, write_file
from relax_hpc.files.run_dir import RunDir
from relax_hpc.records import Progress
from relax_hpc.weights.base import DamagedWeights, Export, WeightsError
from relax_hpc.weights.contents import Contents, checksum, entry, from_json

CONTENTS = "contents.json"


def keep(run: RunDir, commit_dir: Path, export: Export, progress: Progress = lambda: None) -> str:
    """Make the current weights the run's reference; returns their checksum. Raises FileNotFoundError if fenced."""
    if (held := held_checksum(run)) is not None and held == checksum(parts.digest(export(), progress=progress)):
        return held
    staged, contents = commit_dir / f"reference-{uuid.uuid4().hex}", Contents()
    staged.mkdir()

    def work(number: int, part: parts.Named) -> int:
        contents.update({name: entry(tensor) for name, tensor in part})
        return tensor_files.write(staged / parts.part_name(number), part, durable=True)

    try:
        sizes = parts.in_threads(export(), work, parts.BUCKET_BYTES, progress)
        whole = checksum(contents)
        write_file(staged / CONTENTS, json.dumps(dict(sorted(contents.items()))).encode())
        parts.finish(staged, {parts.part_name(i): size for i, size in enumerate(sizes)}, whole, durable=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(run.reference, staged.with_suffix(".old"))
        os.rename(staged, run.reference)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        shutil.rmtree(staged.with_suffix(".old"), ignore_errors=True)
    sync_folder(run.root)
    return whole


def held_checksum(run: RunDir) -> str | None:
    """The checksum of the run's reference; None before it has one."""
    about = read_json(run.reference / "index.json")
    return None if about is None else str(about["checksum"])


def read(run: RunDir, progress: Progress = lambda: None) -> tuple[str, dict[str, Tensor]]:
    """Read the reference's checksum and tensors, verified whole. Raises WeightsError for none, or a damaged one."""
    held = held_checksum(run)
    if held is None:
        raise WeightsError(f"'{run.reference}' is not there yet: the trainer keeps it before step 0")
    index = parts.read_index(run.reference, held)
    try:
        contents = from_json(json.loads((run.reference / CONTENTS).read_bytes()))
    except FileNotFoundError as error:
        raise WeightsError(f"'{run.reference}' was just taken away: {error}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedWeights(
            f"'{run.reference / CONTENTS}' is damaged: {error!r}; no checksum of it can be right"
        ) from error
    if checksum(contents) != held:
        raise DamagedWeights(f"'{run.reference}' has checksum {checksum(contents)}, its index says {held}: refused")
    tensors = parts.read_parts(run.reference, index)
    parts.verify(contents, tensors, f"'{run.reference}'", progress)
    return held, tensors
