"""The simulated GPU itself: what it refuses, what it lets pass, and that nothing of it is left."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.devices import gpu


def given_back(there: Tensor) -> Tensor:
    there.untyped_storage().resize_(0)
    return there + 1


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Do `work` in a thread of its own; raises what it raises."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except gpu.DeviceError as error:
            found.append(error)

    (thread := threading.Thread(target=run)).start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def backward(here: Tensor, there: Tensor) -> None:
    """A hook of a backward pass that forgets the device."""
    weight = torch.nn.Parameter(there)
    weight.register_hook(lambda gradient: gradient + here)
    weight.sum().backward()


REFUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a sum": lambda here, there: here + there,
    "an index on the host": lambda here, there: there[torch.tensor([0])],
    "a result on the host": lambda here, there: here.index_copy_(0, torch.tensor([0, 1], device="cuda"), there),
    "a list": lambda here, there: torch.stack([here, there]),
    "a single number in a list": lambda here, there: torch.stack([here[0], there[0]]),
    "numpy": lambda here, there: there.numpy(),
    "an array": lambda here, there: np.asarray(there),
    "a gradient": lambda here, there: setattr(torch.nn.Parameter(there), "grad", here),
    "a storage": lambda here, there: torch.empty(0).set_(there.untyped_storage()),
    "a generator": lambda here, there: torch.multinomial(there, 1, generator=torch.Generator()),
    "a generator for the host": lambda here, there: torch.rand(2, generator=torch.Generator("cuda")),
    "pinned memory": lambda here, there: torch.empty(2, device="cuda", pin_memory=True),
    "memory that was given back": lambda here, there: given_back(there),
    "a thread": lambda here, there: in_a_thread(lambda: here + there),
    "a backward pass": backward,
    "a deep copy": lambda here, there: copy.deepcopy(there) + here,
}
ALLOWED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copies": lambda here, there: there.copy_(here),
    "moved": lambda here, there: here.to("cuda") + there,
    "moved to another tensor's": lambda here, there: here.to(there) * there.to(torch.float64).float(),
    "a single number": lambda here, there: there + torch.tensor(2.0),
    "a list of places": lambda here, there: there[[1, 0]],
    "a block": lambda here, there: there + made_in_a_block(),
    "a module": lambda here, there: torch.nn.Linear(2, 2).requires_grad_(False).to("cuda")(there),
}


def made_in_a_block() -> Tensor:
    with torch.device("cuda"):
        return torch.ones(2)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_gpu_refuses_is_refused(name: str) -> None:
    with gpu.simulated(), pytest.raises(gpu.DeviceError):
        REFUSED[name](torch.ones(2), torch.ones(2, device="cuda"))


@pytest.mark.parametrize("name", ALLOWED)
def test_what_a_gpu_lets_pass_passes(name: str) -> None:
    with gpu.simulated():
        found = ALLOWED[name](torch.ones(2), torch.ones(2, device="cuda"))
        assert found.device == torch.device("cuda", 0) and found.is_cuda and found.cpu().device.type == "cpu"
        assert found.cpu().numpy().shape == (2,)


def test_nothing_is_left_of_it() -> None:
    before = torch.cuda.is_available(), torch.Generator, torch.autocast, threading.Thread.run
    with gpu.simulated():
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1
    assert before == (torch.cuda.is_available(), torch.Generator, torch.autocast, threading.Thread.run)
