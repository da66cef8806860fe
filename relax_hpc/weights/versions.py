"""The versions of a run: their manifests, and the name of the newest; the same files for every transport.

    WEIGHTS/v00000012.l0.json        the manifest; it makes the version exist, and is created exclusively
    WEIGHTS/v00000012.l0.i3/         its tensors, where they are on disk (see parts.py); written by incarnation 3
    WEIGHTS/latest.json              the newest version's name: the one small file that workers poll
    WEIGHTS/wanted/                  made by a worker that needs the newest version on disk

A replayed version is compared with the manifest of the one published before. If the checksums differ (another GPU,
another layout), it opens a new lineage and is published whole; workers that hold the old one take the new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from relax_hpc.files.publish import discard, names, publish, read_json, replace, sync_folder, to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.weights.base import DamagedWeights, Version, WeightsError
from relax_hpc.weights.contents import Contents, checksum, from_json

_MANIFEST = re.compile(r"v(\d{8})\.l(\d+)\.json")
_TENSORS = re.compile(r"v\d{8}\.l\d+\.i\d+")


@dataclass(frozen=True, slots=True)
class Manifest:
    """A published version and its contents."""

    version: Version
    contents: Contents


class Versions:
    """The trainer's access to the versions. Every change fails once a successor has renamed `commit_dir`."""

    def __init__(self, run: RunDir, commit_dir: Path, incarnation: int) -> None:
        self.run, self.commit_dir, self._incarnation = run, commit_dir, incarnation
        self.lineage = 0

    def find(self, number: int) -> Manifest | None:
        """Look up version `number` in the newest lineage that has one."""
        return manifest(self.run, number, self._lineage(number))

    def _lineage(self, number: int) -> int:
        """The newest lineage that has a version of this number; the current one when none has."""
        found = (_MANIFEST.fullmatch(name) for name in names(self.run.weights))
        return max([self.lineage, *(int(match[2]) for match in found if match and int(match[1]) == number)])

    def new(self, number: int, contents: Contents, replayed: Manifest | None) -> Version:
        """Name a new version, in a new lineage where it differs from `replayed`, the one published before."""
        lineage = replayed.version.lineage + 1 if replayed else self._lineage(number)
        return Version(number, lineage, self._incarnation, checksum(contents))

    def announce(self, version: Version, contents: Contents) -> None:
        """Make a version exist, and make it the newest. Raises FileNotFoundError if fenced."""
        about = {**asdict(version), "tensors": dict(sorted(contents.items()))}
        text = (json.dumps(about, separators=(",", ":")) + "\n").encode()
        publish(manifest_path(self.run, version.number, version.lineage), text, commit_dir=self.commit_dir)
        self._say_newest(version)
        self.lineage = version.lineage

    def catch_up(self, published: Manifest) -> Version:
        """Take up a version that was published before; its trainer may have died before it could call it the newest."""
        version, newest = published.version, self.newest()
        if newest is None or (newest.lineage, newest.number) < (version.lineage, version.number):
            self._say_newest(version)
        self.lineage = version.lineage
        return version

    def newest(self) -> Version | None:
        """The newest version; None before the first, and where latest.json is damaged: it is written anew."""
        try:
            return latest(self.run)
        except DamagedWeights:
            return None

    def _say_newest(self, version: Version) -> None:
        """Write latest.json, without fsync: after a loss of power the trainer writes it again when it restarts."""
        replace(self.run.weights / "latest.json", to_json(asdict(version)), commit_dir=self.commit_dir, durable=False)

    def stage(self) -> Path:
        """Make an empty folder to write tensors into."""
        folder = self.commit_dir / f"weights-{uuid.uuid4().hex}"
        folder.mkdir()
        return folder

    def put(self, staged: Path, version: Version) -> None:
        """Give a finished folder its name; one that has the name already is removed."""
        final = tensors_path(self.run, version)
        if final.exists():
            self.remove(final)
        os.rename(staged, final)
        sync_folder(final.parent)

    def remove(self, path: Path) -> None:
        """Remove a file or folder by way of our own folder, so that a superseded trainer deletes nothing."""
        gone = self.commit_dir / f"{path.name}.{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, gone)
            discard(gone) if gone.is_dir() else gone.unlink()

    def on_disk(self) -> list[Path]:
        """The folders of versions, oldest first."""
        found = [self.run.weights / name for name in names(self.run.weights) if _TENSORS.fullmatch(name)]
        return sorted(found, key=number_of)

    def forget(self, oldest_step: int, pinned: Collection[int]) -> None:
        """Remove manifests that no replay is compared with any more (see Publisher.forget)."""
        for match in map(_MANIFEST.fullmatch, names(self.run.weights)):
            if match and int(match[1]) < oldest_step and int(match[1]) not in pinned:
                self.remove(self.run.weights / match[0])


def number_of(path: Path) -> int:
    return int(path.name[1:9])


def manifest_path(run: RunDir, number: int, lineage: int) -> Path:
    return run.weights / f"v{number:08d}.l{lineage}.json"


def tensors_path(run: RunDir, version: Version) -> Path:
    return run.weights / name_of(version)


def name_of(version: Version) -> str:
    return f"v{version.number:08d}.l{version.lineage}.i{version.incarnation}"


def manifest(run: RunDir, number: int, lineage: int) -> Manifest | None:
    """Read a version's manifest; None when it was never published."""
    path = manifest_path(run, number, lineage)
    try:
        about = read_json(path)
        return None if about is None else Manifest(_version(about), from_json(about["tensors"]))
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedWeights(f"the manifest '{path}' is damaged: {error!r}: refused") from error


def named(run: RunDir, number: int, lineage: int) -> Version:
    """Look up the full name of a published version. Raises WeightsError where there is no such version."""
    return _known(run, number, lineage).version


def expected(run: RunDir, version: Version) -> Contents:
    """The contents that `version` must have. Raises WeightsError when there is no such version."""
    found = _known(run, version.number, version.lineage)
    if found.version != version or checksum(found.contents) != version.checksum:
        raise DamagedWeights(
            f"version {version.number} (lineage {version.lineage}) has checksum {checksum(found.contents)} in its manifest, "
            f"{version.checksum} is asked for: refused"
        )
    return found.contents


def _known(run: RunDir, number: int, lineage: int) -> Manifest:
    """Read a version's manifest. Raises WeightsError when there is none."""
    found = manifest(run, number, lineage)
    if found is None:
        raise WeightsError(
            f"version {number} (lineage {lineage}) has no manifest: it was never published, or is older than every checkpoint"
        )
    return found


def latest(run: RunDir) -> Version | None:
    """The newest version; None before the first. Raises DamagedWeights where latest.json is damaged."""
    path = run.weights / "latest.json"
    try:
        about = read_json(path)
        return None if about is None else _version(about)
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedWeights(f"'{path}', which names the newest weights, is damaged ({error!r})") from error


def _version(about: dict[str, Any]) -> Version:
    return Version(about["number"], about["lineage"], about["incarnation"], about["checksum"])
