"""Second copies of shards in the memory of this node, in front of the shared file system.

Only the published shard counts: its copy is made afterwards, by the worker that published it, in a folder of the run's
own. Readers on this node use the copy, readers elsewhere do not see it. Where memory is full no copy is made, and
nothing else changes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from relax_hpc.files.publish import Data, replace
from relax_hpc.files.run_dir import RunDir


def of_run(run: RunDir, folder: Path) -> Path:
    """The run's own folder below `folder`, which several runs of a node may share."""
    return folder / f"relax_hpc-{run.read_id()}"


class NodeCache:
    """Copies of one run's shards on this node. Where `folder` is None nothing is kept."""

    def __init__(self, run: RunDir, folder: Path | None, most: int | None = None) -> None:
        """most: copies that `put` leaves, the newest: as many as readers may still want. None keeps all."""
        self.run, self._most = run, most
        self._folder = of_run(run, folder) if folder else None

    def put(self, request_id: str, image: Data) -> None:
        """Keep a copy of a shard that was just published."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):  # no room in memory: readers take the published file
            self._folder.mkdir(parents=True, exist_ok=True)
            self.remove(request_id)
            replace(self._path(self._folder, request_id), image, durable=False)
            self._forget_oldest(self._folder)

    def _forget_oldest(self, folder: Path) -> None:
        """Remove all but the newest copies. Whoever was about to open one takes the published file."""
        with os.scandir(folder) as entries:
            aged = sorted((entry.stat().st_mtime_ns, entry.path) for entry in entries)
        for _, path in aged[: -self._most] if self._most else ():
            Path(path).unlink(missing_ok=True)

    def copy(self, request_id: str) -> Path | None:
        """The path of a published shard's copy on this node, if there is one of that very file."""
        if self._folder is None:
            return None
        try:
            copy = self._path(self._folder, request_id)
        except FileNotFoundError:  # nothing is published
            return None
        return copy if copy.exists() else None

    def _path(self, folder: Path, request_id: str) -> Path:
        """The path of a copy, named by the published file's inode: a request that is generated again has another one."""
        return folder / f"{request_id}.{os.stat(self.run.shard(request_id)).st_ino}.h5"

    def remove(self, request_id: str) -> None:
        """Remove a shard's copies, once it was consumed."""
        if self._folder is not None:
            for copy in self._folder.glob(f"{request_id}.*.h5"):
                copy.unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove all copies, once the run ended on this node."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
