"""Versions in folders: on the shared disk, whole or as a change, and whole in the memory of a node.

shared disk:  v10 whole ◄── v11 change ◄── v12 change      v12 = v10 + both, compared with the manifest of v12
NODE_CACHE/relax_hpc-RUN/weights/v00000012.l0.i3/          a node's own copy, which all its processes map
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

import relax_hpc.weights.delta as delta
from relax_hpc.files import tensor_files
from relax_hpc.files.node_cache import of_run
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.records import Progress
from relax_hpc.weights.base import DamagedWeights, Version, WeightsError
from relax_hpc.weights.contents import Contents
from relax_hpc.weights.parts import BUCKET_BYTES, finish, in_threads, part_name, read_index, read_parts, verify
from relax_hpc.weights.versions import expected, name_of, named, number_of, tensors_path

KEPT_COPIES = 2
"""Copies kept on a node: the newest, and the one that the next change is against."""
POLL_S = 0.01


def base_of(index: Mapping[str, Any]) -> Version | None:
    """The version that a change is against; None where the tensors are whole."""
    return None if index["base"] is None else Version(**index["base"])


def chain(run: RunDir, version: Version) -> list[Version]:
    """The version, and all that it is read through, in order; the last one is whole. Raises WeightsError."""
    found = [version]
    while (base := base_of(read_index(tensors_path(run, found[-1]), found[-1].checksum))) is not None:
        found.append(base)
    return found


def bases(folder: Path) -> list[str]:
    """Names of the folders that `folder` is read through; the list ends at one that is gone or damaged."""
    names: list[str] = []
    with contextlib.suppress(ValueError):
        while (about := read_json(folder / "index.json")) and about.get("base"):
            names.append(name_of(Version(**about["base"])))
            folder = folder.parent / names[-1]
    return names


def on_disk(run: RunDir, version: Version, copies: NodeCopies | None = None) -> dict[str, Tensor]:
    """Read the tensors of `version` from the shared disk, a change's base from `copies` where they have it; not yet
    compared. Raises WeightsError."""
    path = tensors_path(run, version)
    index = read_index(path, version.checksum)
    tensors, base = read_parts(path, index), base_of(index)
    if base is None:
        return tensors
    held = copies.find(base) if copies else None
    try:
        return delta.apply(on_disk(run, base, copies) if held is None else held, tensors)
    except (ValueError, KeyError, IndexError, RuntimeError) as error:
        raise DamagedWeights(
            f"'{path}' does not fit version {base.number}; no checksum of it can be right: {error}"
        ) from error


def read(
    run: RunDir, version: Version, copies: NodeCopies | None, progress: Progress = lambda: None
) -> dict[str, Tensor]:
    """Read the tensors of `version`, verified whole. The first reader on a node copies them, the others map its copy."""
    contents = expected(run, version)
    if copies is None:
        tensors = on_disk(run, version)
        verify(contents, tensors, f"'{tensors_path(run, version)}'", progress)
        return tensors
    if (held := copies.verified(version, contents, progress)) is not None:
        return held
    with copies.lock(progress):
        held = copies.verified(version, contents, progress)  # somebody copied it while we waited
        return _copied(run, version, contents, copies, progress) if held is None else held


def can_be_had(run: RunDir, number: int, lineage: int) -> bool:
    """Return True if a version's tensors are on the shared disk and are what its manifest says. Reads all of them."""
    try:
        read(run, named(run, number, lineage), None)
    except WeightsError:
        return False
    return True


def files(run: RunDir, version: Version, copies: NodeCopies | None) -> tuple[Path, ...]:
    """The files in which `read` found the tensors; empty where these are put together from changes."""
    for folder in ([copies.folder / name_of(version)] if copies else []) + [tensors_path(run, version)]:
        with contextlib.suppress(WeightsError):  # no such copy; or retired since
            index = read_index(folder, version.checksum)
            return tuple(folder / name for name in index["parts"]) if base_of(index) is None else ()
    return ()


def _copied(
    run: RunDir, version: Version, contents: Contents, copies: NodeCopies, progress: Progress
) -> dict[str, Tensor]:
    where = f"'{tensors_path(run, version)}'"
    for base_copies in (copies, None):
        tensors = on_disk(run, version, base_copies)
        try:
            tensors = copies.put(version, tensors, contents, progress)
        except OSError:  # no room in memory
            verify(contents, tensors, where, progress)
        except DamagedWeights:
            if base_copies is None:
                raise
            copies.clear()  # the copy that the change was applied to may be wrong
            continue
        return tensors
    raise AssertionError("the second try returns or raises")


class NodeCopies:
    """Versions in the memory of this node. They are compared with the manifest like any others."""

    def __init__(self, run: RunDir, node_cache: Path) -> None:
        self.folder = of_run(run, node_cache) / "weights"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def find(self, version: Version) -> dict[str, Tensor] | None:
        folder = self.folder / name_of(version)
        try:
            return read_parts(folder, read_index(folder, version.checksum))
        except WeightsError:
            return None

    def verified(
        self, version: Version, contents: Contents, progress: Progress = lambda: None
    ) -> dict[str, Tensor] | None:
        """Read and verify this node's copy; None where there is none, or a damaged one (it is then removed)."""
        tensors = self.find(version)
        try:
            if tensors is not None:
                verify(contents, tensors, f"'{self.folder / name_of(version)}'", progress)
            return tensors
        except DamagedWeights:
            self._remove(self.folder / name_of(version))
            return None

    @contextlib.contextmanager
    def lock(self, progress: Progress = lambda: None) -> Iterator[None]:
        """Hold the node's lock: one process at a time; a dead one's lock is gone with it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.folder / "lock", os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                progress()
                time.sleep(POLL_S)
            yield
        finally:
            os.close(handle)

    def stage(self) -> Path:
        folder = self.folder / f".{uuid.uuid4().hex}"
        folder.mkdir(parents=True)  # another process of the run may have left this node, and cleared its memory
        return folder

    def name(self, staged: Path, version: Version) -> None:
        """Give a finished copy its name, and remove the oldest ones."""
        final = self.folder / name_of(version)
        try:
            os.rename(staged, final)
        except OSError:  # somebody made the same one
            shutil.rmtree(staged)
        os.utime(final)
        for old in sorted(self.folder.glob("v*"), key=lambda p: (p.stat().st_mtime_ns, number_of(p)))[:-KEPT_COPIES]:
            self._remove(old)

    def put(
        self, version: Version, tensors: Mapping[str, Tensor], contents: Contents, progress: Progress = lambda: None
    ) -> dict[str, Tensor]:
        """Copy a version here; returns the copy, verified. Raises OSError where there is no room."""
        staged = self.stage()
        try:
            work = lambda number, part: tensor_files.write(staged / part_name(number), part, durable=False)
            sizes = in_threads(tensors.items(), work, BUCKET_BYTES, progress)
            finish(staged, {part_name(i): size for i, size in enumerate(sizes)}, version.checksum, durable=False)
            copy = read_parts(staged, read_index(staged, version.checksum))  # a mapping outlives the name
            verify(contents, copy, f"'{staged}', a copy of {name_of(version)}", progress)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        self.name(staged, version)
        return copy

    def clear(self) -> None:
        for path in self.folder.glob("v*"):
            self._remove(path)

    def _remove(self, path: Path) -> None:
        gone = self.folder / f".{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, gone)
            shutil.rmtree(gone)
