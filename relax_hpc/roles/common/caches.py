"""Compiled kernels on a cluster: kept on the node's own disk, and packed into the run once, for nodes that have none yet.

    start                          RUN/caches/ROLE-….json ──► tar ──checksum──► NODE/RUN-ID/ROLE-…/triton, inductor, …
    after the first step or request  NODE/RUN-ID/ROLE-… ──tar──► RUN/caches/   exclusively: the first one counts

Nothing in a tar is unpickled here, but what reads it (Triton, Inductor) runs what it finds: who can write the run's
directory can run code in its processes, by its snapshot or by this. What goes wrong here costs compiling again, never
the run.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
import platform
import tarfile
import uuid
from pathlib import Path

from relax_hpc.files.errors import RunError
from relax_hpc.files.node_disk import fill_once, node_disk
from relax_hpc.files.publish import link_exclusive, publish, read_json, to_json
from relax_hpc.files.run_dir import RunDir

FOLDERS = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUDA_CACHE_PATH": "cuda",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "SGLANG_CACHE_DIR": "sglang",
}
"""Environment variable -> folder where a compiler keeps what it made; a variable that is set already stays as it is."""


class Caches:
    """The compile caches of one role's process; outside of Slurm jobs they stay where they are."""

    def __init__(self, run: RunDir, role: str) -> None:
        self._run, self._log = run, logging.getLogger("caches")
        # Kernels are found by versions and device inside: another kind of GPU finds none of its own and compiles.
        self._name = f"{role}-torch{importlib.metadata.version('torch')}-{platform.machine()}"
        self._folder: Path | None = None

    def warm(self) -> None:
        """Point the compilers to this node's disk, filled from the run's archive; to be called before anything is
        compiled."""
        if "SLURM_JOB_ID" not in os.environ:
            return
        try:
            folder = node_disk() / read_json(self._run.identity)["id"] / self._name
            fill_once(folder, self._unpack)
        except (OSError, RunError, tarfile.TarError) as error:
            self._log.warning("no cache on this node's disk: %s", error)
            return
        self._folder = folder
        for variable, name in FOLDERS.items():
            os.environ.setdefault(variable, str(folder / name))

    def keep(self) -> None:
        """Pack what was compiled on this node into the run, unless somebody did; only the first call does anything."""
        folder, self._folder = self._folder, None
        if folder is None or self._manifest.exists():
            return
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        if files:
            try:
                self._pack(folder, files)
            except OSError as error:
                self._log.warning("the caches in '%s' were not kept: %s", folder, error)

    @property
    def _manifest(self) -> Path:
        return self._run.caches / f"{self._name}.json"

    def _pack(self, folder: Path, files: list[Path]) -> None:
        self._run.caches.mkdir(exist_ok=True)
        temporary = self._run.caches / f".{uuid.uuid4().hex}.tar"
        try:
            with tarfile.open(temporary, "x") as tar:
                for path in files:
                    if path.exists():  # compilers rename what they have finished
                        tar.add(path, str(path.relative_to(folder)))
            packed = self._run.caches / f"{self._name}.{uuid.uuid4().hex[:8]}.tar"
            about = {"file": packed.name, "bytes": temporary.stat().st_size, "checksum": _checksum(temporary)}
            link_exclusive(temporary, packed)
        finally:
            temporary.unlink(missing_ok=True)
        if not publish(self._manifest, to_json(about)):
            packed.unlink()  # another node was faster

    def _unpack(self, folder: Path) -> None:
        about = read_json(self._manifest)
        if about is None:
            return
        packed = self._run.caches / about["file"]
        found = _checksum(packed)
        if found != about["checksum"]:
            self._log.warning("'%s' has checksum %s, its manifest says %s: not used", packed, found, about["checksum"])
            return
        with tarfile.open(packed) as tar:
            for member in tar:
                inside = not Path(member.name).is_absolute() and ".." not in Path(member.name).parts
                if not (member.isreg() and inside):
                    raise tarfile.TarError(f"'{packed}' has '{member.name}', which is no file of a cache")
                member.mode &= 0o755
            tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.3 and older have none
            tar.extractall(folder)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
