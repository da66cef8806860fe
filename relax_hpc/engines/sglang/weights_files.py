"""A version as safetensors files in memory alone: SGLang reads weights from a folder, and a kill must leave nothing
behind.

tensors ──buckets──► anonymous memory files ◄──links── a folder that the server is told of
a version's own files ◄──links── the same, without a copy
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import torch
from safetensors.torch import save
from torch import Tensor

BUCKET_BYTES = 1 << 30
"""A file is written when this many bytes have come: during the write they are in memory twice."""


class WeightsFiles:
    """The files of a version, which exist within a `with` block. `parent`: where their folder is made; the system's own
    place by default.

    With a parent the files are real ones, for a server on another machine.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self._parent, self._files = parent, list[int]()
        self.shapes: dict[str, torch.Size] = {}
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
        """Link files that hold exactly these tensors into the folder. Returns False where one is gone: a version may be
        retired meanwhile."""
        if not all(file.exists() for file in files):
            return False
        self.shapes = {name: tensor.shape for name, tensor in tensors}
        for number, file in enumerate(files):
            self._path(number).symlink_to(file.resolve())
        return True

    def write(self, tensors: Iterable[tuple[str, Tensor]], leave_out: set[str]) -> None:
        """Write all tensors except those in `leave_out`, whose shapes are noted all the same."""
        bucket: dict[str, Tensor] = {}
        held = count = 0
        for name, tensor in tensors:
            self.shapes[name] = tensor.shape
            if name in leave_out:
                continue
            bucket[name] = tensor.detach().contiguous().cpu()
            held += tensor.nbytes
            if held >= BUCKET_BYTES:
                self._write(bucket, count)
                bucket, held, count = {}, 0, count + 1
        if bucket:
            self._write(bucket, count)

    def _write(self, bucket: dict[str, Tensor], number: int) -> None:
        path = self._path(number)
        if self._parent is not None:
            path.write_bytes(save(bucket))
            return
        file = os.memfd_create(path.name)
        self._files.append(file)
        with os.fdopen(file, "wb", closefd=False) as writer:
            writer.write(save(bucket))
        path.symlink_to(f"/proc/{os.getpid()}/fd/{file}")

    def _path(self, number: int) -> Path:
        return self.folder / f"model-{number:05d}.safetensors"
