"""Trainers, engines and scorers compute on a simulated GPU what they compute on the CPU, and a forgotten device is an error.

See tests/devices/gpu.py; docs/verified.md says what this cannot see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import relax_hpc.engines.sampling as sampling
import relax_hpc.engines.torch as torch_engine
from tests.devices import gpu
from tests.devices.mutants import MUTANTS, Mutant, mutated
from tests.devices.work import MEGATRON, WORK, Place, models, same


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return models(tmp_path_factory.mktemp("models"))


def on_gpu(name: str, place: Place) -> dict[str, Any]:
    with gpu.simulated(), ending_groups():
        return WORK[name](place)


@contextlib.contextmanager
def ending_groups() -> Iterator[None]:
    """End the process group that a Megatron trainer of one process makes: it is of one device."""
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def on_cpu(name: str, place: Place) -> dict[str, Any]:
    """Work on the CPU, with what the engine chooses otherwise on a GPU: how it draws, and when it looks who has ended."""
    draw = lambda weights, generator: torch.multinomial(weights, 1, generator=generator)
    looks = {"cpu": torch_engine.LOOK_EVERY["cuda"]}
    with mock.patch.object(sampling, "_sample", draw), mock.patch.dict(torch_engine.LOOK_EVERY, looks), ending_groups():
        return WORK[name](place)


CASES = [("torch", name) for name in WORK] + [("megatron", name) for name in MEGATRON]


@pytest.mark.parametrize(("backend", "name"), CASES, ids=lambda value: str(value))
def test_a_gpu_computes_what_the_cpu_computes(backend: str, name: str, made: Path, tmp_path: Path) -> None:
    found = []
    for device, work in (("cpu", on_cpu), ("cuda", on_gpu)):
        (folder := tmp_path / device).mkdir()
        found.append(work(name, Place(device, made, folder, backend)))
    assert same(*found)


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda mutant: f"{mutant.module}: {mutant.text.encode('ascii', 'ignore').decode()[:50]}"
)
def test_a_forgotten_device_is_an_error(mutant: Mutant, made: Path, tmp_path: Path) -> None:
    place = Place("cuda", made, tmp_path, mutant.backend)
    with mutated(mutant):
        try:
            found = on_gpu(mutant.work, place)
        except (RuntimeError, TypeError, AssertionError, NotImplementedError):
            return
    (there := tmp_path / "cpu").mkdir()
    assert not same(found, on_cpu(mutant.work, Place("cpu", made, there, mutant.backend)))
