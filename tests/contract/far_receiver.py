"""A worker's side of a transport in a process of its own: `python far_receiver.py` serves requests (tools/bench/sides/child.py)."""

from __future__ import annotations

import contextlib
import sys
import uuid
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from relax_hpc.run_dir import RunDir
from relax_hpc.weights import MEETINGS, CollectiveReceiver, DamagedWeights, Version, WeightsError
from tools.bench.common import our_environment
from tools.bench.sides.child import Child, serve


class Process:
    """One process for all tests: each opens a receiver of its own in it."""

    def __init__(self, log: Path) -> None:
        self.child = Child("receiver", [sys.executable, __file__], log, our_environment())

    def open(self, run: RunDir, transport: str, timeout_s: float) -> FarReceiver:
        self.child.call("open", root=str(run.root), transport=transport, timeout_s=timeout_s)
        return FarReceiver(self.child, run.root / "fetched")


class FarReceiver:
    """See relax_hpc.weights.base.Receiver."""

    def __init__(self, child: Child, path: Path) -> None:
        self._child, self._path = child, path

    def newest(self) -> Version | None:
        about = self._child.call("newest")
        return None if about is None else Version(**about)

    @contextlib.contextmanager
    def fetch(self, version: Version, progress: Any = None) -> Iterator[Iterator[tuple[str, Tensor]]]:
        said = self._child.call("fetch", version=asdict(version), path=str(self._path))
        if said:
            raise (DamagedWeights if said["damaged"] else WeightsError)(said["error"])
        yield iter(load_file(self._path).items())

    def close(self) -> None:
        self._child.call("close")


class _Side:
    def __init__(self) -> None:
        self.receiver: CollectiveReceiver | None = None

    def open(self, root: str, transport: str, timeout_s: float) -> None:
        run = RunDir(root)
        self.receiver = CollectiveReceiver(run, f"far-{uuid.uuid4().hex}", MEETINGS[transport](run, timeout_s))

    def newest(self) -> dict[str, Any] | None:
        assert self.receiver is not None
        version = self.receiver.newest()
        return None if version is None else asdict(version)

    def fetch(self, version: dict[str, Any], path: str) -> dict[str, Any] | None:
        assert self.receiver is not None
        try:
            with self.receiver.fetch(Version(**version)) as tensors:
                save_file({name: tensor.clone() for name, tensor in tensors}, path)
        except WeightsError as error:
            return {"error": str(error), "damaged": isinstance(error, DamagedWeights)}
        return None

    def close(self) -> None:
        assert self.receiver is not None
        self.receiver.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    side = _Side()
    serve({name: getattr(side, name) for name in ("open", "newest", "fetch", "close")})
