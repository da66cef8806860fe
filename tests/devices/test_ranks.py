"""Two processes on simulated GPUs, with gloo in NCCL's place: they compute what two processes on the CPU do, and a tensor
on the host is refused by each collective operation."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from relax_hpc.trainers import BACKENDS
from tests import processes
from tests.devices import gpu
from tests.devices.mutants import FOR_RANKS, mutated
from tests.devices.work import WORK, Place, models, same

WORLD = 2
LIMIT_S = 240
WORKS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "torch": [("grpo, recomputed", {}), ("checkpoint", {})],
    "megatron": [("grpo, recomputed", {"tensor": 2, "sequence": True}), ("checkpoint", {})],
}
"""Work of each backend, with the split of its model."""


@contextlib.contextmanager
def group(backend: str, folder: Path, rank: int) -> Iterator[None]:
    dist.init_process_group(backend, init_method=f"file://{folder}/meet-{backend}", rank=rank, world_size=WORLD)
    try:
        yield
    finally:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def work(rank: int, backend: str, made: Path, folder: Path, results: Any) -> None:
    """One process: says of each work whether both devices gave the same, or what was raised."""
    try:
        results.put((rank, compared(rank, backend, made, folder)))
    except BaseException:
        results.put((rank, traceback.format_exc()))


def compared(rank: int, backend: str, made: Path, folder: Path) -> dict[str, bool]:
    """Do each work on both devices; also checks that the mutant for ranks is noticed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    said = {}
    for number, (name, parallel) in enumerate(WORKS[backend]):
        found = []
        for device in ("cpu", "cuda"):
            shared = folder / f"{number}-{device}"
            shared.mkdir(exist_ok=True)
            place = Place(device, made, shared, backend, rank, WORLD, parallel)
            there = gpu.simulated if device == "cuda" else contextlib.nullcontext
            with there(), group("nccl" if device == "cuda" else "gloo", shared, rank):
                found.append(WORK[name](place))
        said[name] = same(*found)
    if backend == FOR_RANKS.backend:
        (shared := folder / "mutant").mkdir(exist_ok=True)
        place = Place("cuda", made, shared, backend, rank, WORLD)
        refused = pytest.raises(gpu.DeviceError, match="c10d::reduce_: NCCL moves tensors on cuda:0 only")
        with gpu.simulated(), group("nccl", shared, rank), mutated(FOR_RANKS), refused:
            WORK[FOR_RANKS.work](place)
    return said


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_ranks_compute_what_they_do_on_the_cpu(backend: str, tmp_path: Path) -> None:
    made, context = models(tmp_path / "models"), processes.context()
    results = context.Queue()
    ranks = [context.Process(target=work, args=(rank, backend, made, tmp_path, results)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    try:
        said = [results.get(timeout=LIMIT_S)]
        if isinstance(said[0][1], dict):  # else the others wait for it
            said += [results.get(timeout=LIMIT_S) for _ in ranks[1:]]
    finally:
        for process in ranks:
            process.kill()
    assert all(isinstance(found, dict) for _, found in said), said[0][1]
    assert sorted(said) == [(rank, {name: True for name, _ in WORKS[backend]}) for rank in range(WORLD)]
