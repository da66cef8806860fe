"""A user's own algorithm: checked before a run, and named in the error where it fails during one."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from relax_hpc.algorithms.base import NEEDS, TEACHER, Algorithm, LossInputs
from relax_hpc.files.errors import RunError
from relax_hpc.recipe.tables.algorithm import OwnAlgorithm
from relax_hpc.records import Rollouts
from relax_hpc.registry import MEND, RegistryError, check_call, resolve, shown, users_code

TRAINERS = frozenset({"loss", "tokens", "skipped", "grad_norm", "learning_rate"})
"""Metrics that the trainer makes itself; an algorithm's own may not have these names."""


class Own:
    """A user's own algorithm, wrapped as relax_hpc.algorithms.base.Algorithm. Raises RegistryError for one that does
    not fit the protocol."""

    def __init__(self, config: OwnAlgorithm) -> None:
        self._name = name = config.factory
        factory = resolve("algorithm", name, {})
        check_call("algorithm", name, factory, **config.options)
        try:
            self._own: Algorithm = factory(**config.options)
        except Exception as error:
            raise RegistryError(
                f"algorithm '{name}' called with algorithm.options = {config.options} raised {type(error).__name__}: {error}"
            ) from error
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
        if (TEACHER in self.needs) != (config.teacher is not None):
            raise RegistryError(
                f"algorithm '{name}' needs {sorted(self.needs) or 'nothing'}, and algorithm.teacher = {shown(config.teacher and str(config.teacher))}: "
                f"give both the need '{TEACHER}' and algorithm.teacher, a model directory, or neither"
            )
        self.whole_groups = bool(getattr(self._own, "whole_groups", False))

    def advantages(self, rollouts: Rollouts) -> Tensor:
        with users_code("algorithm", f"{self._name}.advantages", torch.OutOfMemoryError):
            found: Any = self._own.advantages(rollouts)
        shape = rollouts.tokens.shape
        if not isinstance(found, Tensor) or found.shape != shape or found.is_complex():
            self._refuse("advantages", _kind(found), f"a float tensor [{shape[0]}], one number a token")
        numbers: Tensor = found.detach().float()
        odd = np.flatnonzero(~numbers.isfinite().cpu().numpy() & (rollouts.loss_mask == 1))
        if len(odd):
            sample = int(np.searchsorted(rollouts.offsets, odd[0], side="right")) - 1
            self._refuse(
                "advantages",
                f"{float(numbers[odd[0]])} for token {odd[0] - rollouts.offsets[sample]} of sample {rollouts.ids[sample]} ({len(odd)} such tokens)",
                "finite numbers where the loss mask is 1",
            )
        return numbers

    def loss(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        with users_code("algorithm", f"{self._name}.loss", torch.OutOfMemoryError):
            found: Any = self._own.loss(inputs)
        shape = inputs.logprobs.shape
        a_tensor = f"a tensor [{shape[0]}], one number a token"
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
            self._refuse("loss", _kind(found), f"({a_tensor}, a dict of metrics)")
        loss, metrics = found
        if not isinstance(loss, Tensor) or loss.shape != shape:
            self._refuse("loss", f"{_kind(loss)} as the loss", a_tensor)
        for name, value in metrics.items():
            if not isinstance(name, str) or not name.isprintable() or name in TRAINERS:
                self._refuse(
                    "loss",
                    f"a metric called {shown(name)}",
                    f"a name in text, other than the trainer's own {sorted(TRAINERS)}",
                )
            if not isinstance(value, Tensor) or value.shape != shape:
                self._refuse("loss", f"{_kind(value)} as the metric '{name}'", a_tensor)
        if not loss.requires_grad and inputs.logprobs.requires_grad:
            self._refuse(
                "loss", "a loss without gradient", "one that is made of inputs.logprobs; else nothing would be learned"
            )
        return loss, metrics

    def _refuse(self, part: str, returned: str, expected: str) -> NoReturn:
        raise RunError(f"algorithm '{self._name}'.{part} returned {returned}, expected {expected}; {MEND}")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list, dict)) else shown(value)
