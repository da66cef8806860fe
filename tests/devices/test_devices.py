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

import relax_hpc
import relax_hpc.engines.sampling as sampling
import relax_hpc.engines.torch as torch_engine
from relax_hpc.trainers import BACKENDS
from relax_hpc.trainers.trees import attention
from tests.devices import gpu
from tests.devices.mutants import MUTANTS, Mutant, mutated, unlisted
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
    """Work on the CPU, with what is chosen otherwise on a GPU: how the engine draws, when it looks who has ended, and how a
    tree attends."""
    drawn, shared = sampling._sample, lambda weights, random: torch.multinomial(weights, 1, generator=random)
    draw = lambda weights, random: (drawn if isinstance(random, torch.Tensor) else shared)(weights, random)
    looks = {"cpu": torch_engine.LOOK_EVERY["cuda"]}
    with (
        mock.patch.object(sampling, "_sample", draw),
        mock.patch.dict(torch_engine.LOOK_EVERY, looks),
        mock.patch.object(attention, "_fast", lambda *ignored: False),
        ending_groups(),
    ):
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


SAYING = ("trainers", "engines", "algorithms", "weights", "huggingface", "files.tensor_files")
"""Modules and packages that say devices; SGLang's engine is a server of its own, megatron.cpu stands in for CUDA."""


def test_every_place_that_says_a_device_is_mutated() -> None:
    root = Path(relax_hpc.__file__).parent
    files = [file for name in SAYING for file in (root / name.replace(".", "/")).rglob("*.py")]
    files += [file for name in SAYING if (file := root / f"{name.replace('.', '/')}.py").exists()]
    assert len(files) > 60
    found = {}
    for file in files:
        parts = file.relative_to(root).with_suffix("").parts
        module = ".".join(("relax_hpc", *parts)).removesuffix(".__init__")
        if "sglang" not in module and module != "relax_hpc.trainers.megatron.cpu":
            found[module] = unlisted(module, file.read_text())
    assert {module: lines for module, lines in found.items() if lines} == {}


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_a_trainer_stays_on_the_gpu_that_its_role_chose(backend: str, made: Path, tmp_path: Path) -> None:
    place = Place("cuda", made, tmp_path, backend)
    chosen = {"device_count": lambda: 4, "current_device": lambda: 2}
    with gpu.simulated(), ending_groups(), mock.patch.multiple(torch.cuda, **chosen):
        assert place.trainer(place.recipe()).device == torch.device("cuda", 2)  # type: ignore[attr-defined]
