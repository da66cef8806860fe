"""The file transport: a version is a folder of safetensors files and a manifest, published like a shard.

    trainer: export ──quarter buckets──► threads: checksum, write, fsync ──► folder renamed into place ──► manifest ──► latest
    worker:  latest ──► manifest ──► parts mapped by threads, compared ──► engine

With a folder in memory (`node_cache`) the first worker of a node copies a version there and the others map that copy.
With `full_every` above 1 the shared disk gets only the changes since the version before, and every so often a whole
version.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import relax_hpc.weights.delta as delta
from relax_hpc.files import tensor_files
from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.files.watch import FolderWatch
from relax_hpc.records import Progress
from relax_hpc.weights.base import DamagedWeights, Export, Fetched, Version, WeightsError
from relax_hpc.weights.contents import Contents, checksum, entry
from relax_hpc.weights.parts import BUCKET_BYTES, Named, digest, finish, in_threads, part_name
from relax_hpc.weights.stored import NodeCopies, bases, chain, files, read
from relax_hpc.weights.versions import Manifest, Versions, expected, latest, name_of, number_of, tensors_path

READ_AGAIN_S = 1.0
"""Seconds after which latest.json is read again whatever its file's time says."""
KEPT_FILES = 3
"""Newest versions whose tensors stay: one that a worker may just be reading, and the newest for late joiners."""


class FilePublisher:
    """The trainer's side. Publishing fails once a successor has renamed `commit_dir`, the incarnation's folder."""

    def __init__(
        self,
        run: RunDir,
        commit_dir: Path,
        incarnation: int,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        node_cache: Path | None = None,
        full_every: int = 1,
    ) -> None:
        self._run, self._versions = run, Versions(run, commit_dir, incarnation)
        self._bucket_bytes, self._full_every = bucket_bytes, full_every
        self._copies = NodeCopies(run, node_cache) if node_cache else None
        self._asks = FolderWatch(run.weights / "wanted")
        self._checked = False

    @property
    def lineage(self) -> int:
        return self._versions.lineage

    def publish(
        self, number: int, export: Export, progress: Progress = lambda: None, pinned: Collection[int] = ()
    ) -> Version:
        """Make version `number` the newest, as Publisher.publish says. Raises FileNotFoundError if fenced."""
        asked, published = self._asks.names(), self._versions.find(number)
        if published and checksum(digest(export(), self._bucket_bytes, progress)) == published.version.checksum:
            self._repair(published.version, export, progress, number in pinned)
            version = self._versions.catch_up(published)
        else:
            version = self._bring(number, export, published, progress)
            if number in pinned and not tensors_path(self._run, version).exists():  # it was broadcast
                self._write(version, export, progress)
            self._retire(number, pinned)
        for name in asked:
            self._versions.remove(self._run.weights / "wanted" / name)
        return version

    def wanted(self) -> bool:
        return bool(self._asks.names())

    def forget(self, oldest_step: int, pinned: Collection[int] = ()) -> None:
        self._versions.forget(oldest_step, pinned)

    def close(self) -> None:
        """Free this node's memory: the run continues elsewhere, or not at all."""
        if self._copies:
            self._copies.clear()

    def _bring(self, number: int, export: Export, replayed: Manifest | None, progress: Progress) -> Version:
        """Publish a version that does not exist yet: its bytes first, then its manifest."""
        staged = self._stage(export, self._base(), progress)
        version = self._versions.new(number, staged.contents, replayed)
        self._name(staged, version)
        self._versions.announce(version, staged.contents)
        return version

    def _write(self, version: Version, export: Export, progress: Progress = lambda: None) -> None:
        """Write the tensors of a published version to disk, whole."""
        staged = self._stage(export, None, progress)
        if checksum(staged.contents) != version.checksum:
            raise AssertionError(f"version {version.number} was exported twice, with different bits")
        self._name(staged, version)

    def _repair(self, published: Version, export: Export, progress: Progress, pinned: bool) -> None:
        """Write a newest or pinned version again where it is missing or, looked at once after the restart, damaged."""
        newest, there = self._versions.newest(), tensors_path(self._run, published).exists()
        if there and not self._checked:
            try:
                read(self._run, published, None, progress)
            except WeightsError:
                there = False
        self._checked = True
        if not there and (newest is None or newest == published or pinned):
            self._write(published, export, progress)

    def _base(self) -> Version | None:
        """The version that the next one may be a change against; None when the next one is to be whole."""
        newest = self._versions.newest() if self._copies and self._full_every > 1 else None
        try:
            return newest if newest and len(chain(self._run, newest)) < self._full_every else None
        except WeightsError:
            return None

    def _stage(self, export: Export, base: Version | None, progress: Progress) -> _Staged:
        """Write the tensors, or their changes since `base`, into a folder without a name, and a copy for this node."""
        held = self._copies.find(base) if self._copies and base else None
        staged = _Staged(self._versions.stage(), self._copies.stage() if self._copies else None, {})
        sizes: dict[str, int] = {}
        copied: dict[str, int] = {}

        def work(number: int, part: Named) -> None:
            name = part_name(number)
            staged.contents.update({key: entry(tensor) for key, tensor in part})
            out = part if held is None else [c for key, t in part for c in delta.encode(key, held.get(key), t)]
            if out:
                sizes[name] = tensor_files.write(staged.folder / name, out, durable=True)
            if staged.copy:
                with contextlib.suppress(OSError):  # no room in memory: the copy lacks a part, and gets no name
                    copied[name] = tensor_files.write(staged.copy / name, part, durable=False)

        try:
            parts = len(in_threads(export(), work, self._bucket_bytes, progress))
            whole = checksum(staged.contents)
            finish(staged.folder, sizes, whole, asdict(base) if base and held is not None else None, durable=True)
            if staged.copy and len(copied) == parts:
                finish(staged.copy, copied, whole, durable=False)
        except BaseException:
            staged.remove()
            raise
        return staged

    def _name(self, staged: _Staged, version: Version) -> None:
        """Give a staged folder its name, as the tensors of `version`."""
        try:
            self._versions.put(staged.folder, version)
            if self._copies and staged.copy and (staged.copy / "index.json").exists():
                self._copies.name(staged.copy, version)
        finally:
            staged.remove()

    def _retire(self, newest: int, pinned: Collection[int]) -> None:
        """Remove tensors that no receiver reads any more, neither for themselves nor as the base of a change."""
        there = self._versions.on_disk()
        kept = [path for path in there if number_of(path) > newest - KEPT_FILES or number_of(path) in pinned]
        if len(kept) == len(there):
            return
        needed = {path.name for path in kept} | {name for path in kept for name in bases(path)}
        for path in there:
            if path.name not in needed:
                self._versions.remove(path)


@dataclass(frozen=True, slots=True)
class _Staged:
    """Folders with a version's tensors that have no name yet: on the shared disk, and this node's copy."""

    folder: Path
    copy: Path | None
    contents: Contents

    def remove(self) -> None:
        """Remove the folders; one that was given its name stays."""
        for path in filter(None, (self.folder, self.copy)):
            shutil.rmtree(path, ignore_errors=True)


class FileReceiver:
    """A worker's side of the file transport."""

    def __init__(self, run: RunDir, node_cache: Path | None = None) -> None:
        self._run = run
        self._copies = NodeCopies(run, node_cache) if node_cache else None
        self._seen: tuple[tuple[int, int] | None, Version | None] = (None, None)
        self._read_at = float("-inf")

    def newest(self) -> Version | None:
        """The newest version published; None before the first. It costs one stat, and a read where that differs: each
        version replaces the file. NFS may answer a stat from its cache, so the file is opened once a second at least.
        """
        try:
            stat = os.stat(self._run.weights / "latest.json")
        except FileNotFoundError:
            return None
        now = time.monotonic()
        if (stat.st_ino, stat.st_mtime_ns) != self._seen[0] or now - self._read_at > READ_AGAIN_S:
            try:
                self._seen, self._read_at = ((stat.st_ino, stat.st_mtime_ns), latest(self._run)), now
            except DamagedWeights as error:
                raise RunError(
                    f"{error}: resume with `relax-hpc run {self._run.root}`, the trainer says it again"
                ) from error
        return self._seen[1]

    @contextlib.contextmanager
    def fetch(self, version: Version, progress: Progress = lambda: None) -> Iterator[Fetched]:
        """Fetch the tensors of `version`, compared with the manifest's checksums first. Raises WeightsError."""
        expected(self._run, version)
        if not tensors_path(self._run, version).exists():
            raise self._missing(version)
        # An older version, which an evaluation names, would push the copy out that the next change is against.
        copies = self._copies if version == self.newest() else None
        yield Fetched(read(self._run, version, copies, progress).items(), files(self._run, version, copies))

    def _missing(self, version: Version) -> WeightsError:
        """Make the error for a version that is not on disk; if it is the newest one, ask the trainer to write it."""
        if version != latest(self._run):
            return WeightsError(f"version {version.number} (lineage {version.lineage}) is not on disk: it was retired")
        asks = self._run.weights / "wanted"
        asks.mkdir(exist_ok=True)
        (asks / name_of(version)).touch()
        return WeightsError(f"version {version.number} is not on disk yet: the trainer is asked for it")

    def close(self) -> None:
        pass
