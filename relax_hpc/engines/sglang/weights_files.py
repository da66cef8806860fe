"""A version as safetensors files in memory alone: SGLang reads weights from a folder, and a kill must leave nothing
behind.

tensors ──buckets──► anonymous memory files ◄──links── a folder that the server is told of
a version's own files ◄──links── the same, without a copy
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

from safetensors.torch import save
from torch import Tensor

from relax_hpc.files.tensor_files import buckets, shapes

BUCKET_BYTES = 1 << 30
"""The most bytes of a file, if no tensor has more: while it is written, they are in memory twice."""


class WeightsFiles:
    """The files of a version, which exist within a `with` block. parent: where their folder is made, as real files, for
    a server on another machine; by default they are in memory alone."""

    def __init__(self, parent: Path | None = None) -> None:
        self._parent, self._files = parent, list[int]()
        self.shapes: dict[str, Sequence[int]] = {}
        """Shapes of all tensors that were written or linked, by name."""

    def __enter__(self) -> WeightsFiles:
        self._folder = tempfile.TemporaryDirectory(prefix="relax-hpc-weights-", dir=self._parent)
        self.folder = Path(self._folder.name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()
        for file in self._files:
            os.close(file)

    def link(self, files: Sequence[Path], tensors: Iterable[tuple[str, Tensor]]) -> bool:
        """Link files that hold exactly these tensors. Returns False where one is gone: its version was retired."""
        if not all(file.exists() for file in files):
            return False
        self.shapes = shapes(tensors)
        for number, file in enumerate(files):
            self._path(number).symlink_to(file.resolve())
        return True

    def write(self, tensors: Iterable[tuple[str, Tensor]], leave_out: set[str]) -> None:
        """Write all tensors except those in `leave_out`, whose shapes are noted all the same."""

        def served() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors:
                self.shapes[name] = tensor.shape
                if name not in leave_out:
                    yield name, tensor.detach().contiguous().cpu()

        for number, bucket in enumerate(buckets(served(), BUCKET_BYTES)):
            path = self._path(number)
            if self._parent is None:
                self._files.append(os.memfd_create(path.name))
                path.symlink_to(f"/proc/{os.getpid()}/fd/{self._files[-1]}")
            path.write_bytes(save(dict(bucket)))

    def _path(self, number: int) -> Path:
        return self.folder / f"model-{number:05d}.safetensors"
