"""Memory of an engine: weights, and the tokens that its key/value cache has room for."""

from __future__ import annotations

from dataclasses import dataclass

from relax_hpc.planning.sizing.model import Cut, Shape, parameters
from relax_hpc.planning.sizing.trainer import ELEMENT
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.weights import FileWeights

MEM_FRACTION = 0.85
"""Share of a GPU's memory for weights and cache, assumed where rollout.sglang.mem_fraction leaves it to SGLang."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of an engine: bytes on one of its devices, and tokens for one copy of the weights."""

    devices: int
    """Devices of one engine."""
    parameters: int
    weights: float
    cache: float
    """Bytes of the cache: for SGLang, all that mem_fraction leaves; for the torch engine, what a request needs."""
    token: int
    """Bytes of the cache for a token."""
    wanted: int
    """Tokens of a request whose answers all have full length."""
    longest: int
    """Tokens of the longest sequence."""
    host: float
    """Bytes of host memory while a version is taken, for each worker."""

    @property
    def room(self) -> int:
        """Tokens that the cache holds."""
        return max(0, int(self.cache / self.token))

    @property
    def total(self) -> float:
        return self.weights + max(self.cache, 0)


def engine_memory(recipe: Recipe, shape: Shape, device_bytes: float, prompt: int, answer: int) -> EngineMemory:
    """Compute the memory of an engine. `prompt`, `answer`: tokens of a sample; `device_bytes`: memory of a device."""
    asked, element = recipe.rollout.sglang, ELEMENT[recipe.trainer.dtype]
    ours = recipe.rollout.engine == "torch"
    tensor = 1 if ours else asked.tensor_parallel
    experts = Cut(tensor) if ours else Cut(tensor, asked.expert_parallel, tensor // asked.expert_parallel)
    count = parameters(shape, experts)
    longest = min(prompt + answer, shape.context)
    samples = recipe.rollout.groups_per_request * recipe.algorithm.group_size
    token, whole = shape.kv_bytes(element, tensor), parameters(shape).all * element
    weights = float(count.all * element)
    cache = float(samples * longest * token)
    if not ours:
        cache = (asked.mem_fraction or MEM_FRACTION) * device_bytes - weights
    arrives = 0 if isinstance(recipe.weights, FileWeights) else whole  # a broadcast is received whole
    return EngineMemory(
        devices=recipe.rollout.devices_each,
        parameters=count.all,
        weights=weights,
        cache=cache,
        token=token,
        wanted=-(-samples // (1 if ours else asked.copies)) * longest,
        longest=longest,
        host=float(arrives + (0 if ours else whole)),  # SGLang reads files that memory holds
    )
