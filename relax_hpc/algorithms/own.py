"""An algorithm of the user's own: checked before a run, and named where it fails in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relax_hpc.algorithms.base import NEEDS, Algorithm, LossInputs
from relax_hpc.recipe.algorithm import OwnAlgorithm
from relax_hpc.records import Rollouts
from relax_hpc.registry import RegistryError, check_call, resolve, users_code
from relax_hpc.run_dir import RunError


class Own:
    """It, as relax_hpc.algorithms.base.Algorithm. Raises RegistryError for one that cannot fill the protocol."""

    def __init__(self, config: OwnAlgorithm) -> None:
        self._name = name = config.factory
        factory = resolve("algorithm", name, {})
        check_call("algorithm", name, factory, **config.options)
        self._own: Algorithm = factory(**config.options)
        missing = [part for part in ("needs", "advantages", "loss") if not hasattr(self._own, part)]
        if missing:
            raise RegistryError(
                f"algorithm '{name}' returned a {type(self._own).__name__} without {missing}: "
                "relax_hpc.algorithms.Algorithm says what it needs to have"
            )
        check_call("algorithm", f"{name}.advantages", self._own.advantages, "rollouts")
        check_call("algorithm", f"{name}.loss", self._own.loss, "inputs")
        needs: Any = self._own.needs
        if not isinstance(needs, (set, frozenset, list, tuple)):
            raise RegistryError(f"algorithm '{name}': needs = {needs!r}, expected a set of names among {sorted(NEEDS)}")
        unknown = sorted(map(str, set(needs) - NEEDS))
        if unknown:
            raise RegistryError(f"algorithm '{name}' needs {unknown}; there are {sorted(NEEDS)}")
        self.needs = frozenset(needs)

    def advantages(self, rollouts: Rollouts) -> Tensor:
        with users_code("algorithm", f"{self._name}.advantages", torch.OutOfMemoryError):
            found: Any = self._own.advantages(rollouts)
        if not isinstance(found, Tensor):
            raise RunError(f"algorithm '{self._name}'.advantages returned {_kind(found)}, expected a tensor [T]")
        return found

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        with users_code("algorithm", f"{self._name}.loss", torch.OutOfMemoryError):
            found: Any = self._own.loss(inputs)
        if not (
            isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor) and isinstance(found[1], dict)
        ):
            raise RunError(
                f"algorithm '{self._name}'.loss returned {_kind(found)}, expected (a tensor [M], a dict of metrics)"
            )
        loss, metrics = found
        wrong = [name for name, value in metrics.items() if not isinstance(value, Tensor)]
        if wrong:
            raise RunError(
                f"algorithm '{self._name}'.loss: its metrics {wrong} are no tensors [M]: one number a token is expected"
            )
        if not loss.requires_grad and inputs.logprobs.requires_grad:
            raise RunError(
                f"algorithm '{self._name}'.loss returned a loss without gradient: nothing would be learned; make it of inputs.logprobs"
            )
        return loss, metrics


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (tuple, list)) else "")
