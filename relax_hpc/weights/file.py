"""The file transport: a version is a safetensors file and a manifest, published like a shard.

    WEIGHTS/v00000012.l0.i3.safetensors   the tensors, written by incarnation 3 in lineage 0
    WEIGHTS/v00000012.l0.json             the manifest; it makes the version exist, and is created exclusively
    WEIGHTS/latest.json                   the newest version's name: the one small file that workers poll

A replayed version is compared with the manifest of the one published before. If the checksums differ (another GPU, another
layout), it opens a new lineage and is published whole; workers that hold the old one take the new one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from relax_hpc.run_dir import RunDir, publish, read_json, replace, to_json
from relax_hpc.weights.base import DamagedWeights, Version, WeightsError

KEPT_FILES = 3
"""Newest versions whose tensors stay: one that a worker may just be reading, and the newest for late joiners."""


class FilePublisher:
    """The trainer's side. `via`: the incarnation's folder; when a successor has renamed it, publishing fails."""

    def __init__(self, run: RunDir, via: Path, incarnation: int) -> None:
        self._run, self._via, self._incarnation = run, via, incarnation
        self._checked = False
        self.lineage = 0
        """Of the version published last; until then, the oldest there can be."""

    def publish(self, number: int, tensors: Iterable[tuple[str, Tensor]]) -> Version:
        """Make version `number` the newest, unless the same bits were published before. Raises FileNotFoundError if fenced."""
        image = save(dict(tensors))
        checksum = xxhash.xxh3_128_hexdigest(image)
        lineage = self._last_lineage(number)
        published = _manifest(self._run, number, lineage)
        if published is not None and published["checksum"] == checksum:
            self.lineage = lineage
            self._repair(published, image)
            self._catch_up(published)
            return _version(published)
        if published is not None:
            lineage += 1
        version = Version(number, lineage, self._incarnation, checksum)
        data = self._run.weights / f"v{number:08d}.l{lineage}.i{self._incarnation}.safetensors"
        publish(data, image, via=self._via)
        about = {**asdict(version), "file": data.name, "bytes": len(image)}
        publish(_manifest_path(self._run, number, lineage), to_json(about), via=self._via)
        replace(self._run.weights / "latest.json", to_json(about), via=self._via)
        self.lineage = lineage
        self._retire(number)
        return version

    def _last_lineage(self, number: int) -> int:
        """The newest lineage that has a version `number`; the one we are in when none of it or after it has."""
        found = [int(p.stem.partition(".l")[2]) for p in self._run.weights.glob(f"v{number:08d}.l*.json")]
        return max([self.lineage, *found])

    def _repair(self, published: dict[str, Any], image: bytes) -> None:
        """Write a version's file again where it was damaged; looked at once, at the restart that a damage leads to."""
        data = self._run.weights / published["file"]
        if not self._checked and data.exists() and _checksum(data) != published["checksum"]:
            replace(data, image, via=self._via)
        self._checked = True

    def _catch_up(self, published: dict[str, Any]) -> None:
        """A trainer may have died after it published the manifest and before anybody could learn of it."""
        newest = _newest(self._run)
        if newest is None or (newest.lineage, newest.number) < (published["lineage"], published["number"]):
            replace(self._run.weights / "latest.json", to_json(published), via=self._via)

    def _retire(self, newest: int) -> None:
        """Remove tensors that no receiver takes any more. Moved into our own folder first: a superseded trainer deletes nothing."""
        for path in self._run.weights.glob("v*.safetensors"):
            if int(path.name[1:9]) <= newest - KEPT_FILES:
                _remove_fenced(path, self._via)

    def forget(self, oldest_step: int) -> None:
        """Manifests of versions before the oldest restorable checkpoint are compared with no more."""
        for path in self._run.weights.glob("v*.json"):
            if int(path.name[1:9]) < oldest_step:
                _remove_fenced(path, self._via)


class FileReceiver:
    """A worker's side."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._seen: tuple[tuple[int, int] | None, Version | None] = (None, None)

    def newest(self) -> Version | None:
        """One stat, and a read only when another version was published: each replaces the file by a new one."""
        try:
            stat = os.stat(self._run.weights / "latest.json")
        except FileNotFoundError:
            return None
        if (stat.st_ino, stat.st_mtime_ns) != self._seen[0]:
            self._seen = ((stat.st_ino, stat.st_mtime_ns), _newest(self._run))
        return self._seen[1]

    @contextlib.contextmanager
    def fetch(self, version: Version) -> Iterator[Iterator[tuple[str, Tensor]]]:
        """The tensors of `version`, their file compared with the manifest's checksum first. Raises WeightsError."""
        manifest = _manifest(self._run, version.number, version.lineage)
        if manifest is None:
            raise WeightsError(
                f"version {version.number} (lineage {version.lineage}) has no manifest: it was never published"
            )
        path = self._run.weights / manifest["file"]
        try:
            found = _checksum(path)
            if found != version.checksum:
                raise DamagedWeights(f"'{path}' has checksum {found}, its manifest says {version.checksum}: refused")
            opened = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise WeightsError(f"version {version.number} was retired: take the newest one") from None
        with opened as file:
            yield ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 (not a dict)


def _newest(run: RunDir) -> Version | None:
    latest = read_json(run.weights / "latest.json")
    return None if latest is None else _version(latest)


def _version(about: dict[str, Any]) -> Version:
    return Version(about["number"], about["lineage"], about["incarnation"], about["checksum"])


def _manifest_path(run: RunDir, number: int, lineage: int) -> Path:
    return run.weights / f"v{number:08d}.l{lineage}.json"


def _manifest(run: RunDir, number: int, lineage: int) -> dict[str, Any] | None:
    manifest: dict[str, Any] | None = read_json(_manifest_path(run, number, lineage))
    return manifest


def _checksum(path: Path) -> str:
    if not path.stat().st_size:
        return xxhash.xxh3_128_hexdigest(b"")  # nothing can be mapped
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        return xxhash.xxh3_128_hexdigest(view)


def _remove_fenced(path: Path, via: Path) -> None:
    gone = via / path.name
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, gone)
        gone.unlink()
