"""A second copy of shards in the memory of this node, in front of the shared file system.

Only what is published counts: a copy is made by the worker that won the publishing, after it, under the run's own folder.
Readers on the same node take it, others do not see it; where memory is full there is none, and nothing else changes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from relax_hpc.files.publish import Data, replace
from relax_hpc.files.run_dir import RunDir


def of_run(run: RunDir, folder: Path) -> Path:
    """The run's own folder in `folder`, which several runs of a node may share."""
    return folder / f"relax_hpc-{run.read_id()}"


class NodeCache:
    """The copies of one run on this node; without a folder there are none."""

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
        """The copy of a published shard; None where there is none here, or one of another file that had this name before."""
        if self._folder is None:
            return None
        try:
            copy = self._path(self._folder, request_id)
        except FileNotFoundError:  # nothing is published
            return None
        return copy if copy.exists() else None

    def _path(self, folder: Path, request_id: str) -> Path:
        """Named by the published file's inode: a request that is generated again, its shard quarantined, has another one."""
        return folder / f"{request_id}.{os.stat(self.run.shard(request_id)).st_ino}.h5"

    def remove(self, request_id: str) -> None:
        """The shard was consumed."""
        if self._folder is not None:
            for copy in self._folder.glob(f"{request_id}.*.h5"):
                copy.unlink(missing_ok=True)

    def clear(self) -> None:
        """The run ended on this node."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
