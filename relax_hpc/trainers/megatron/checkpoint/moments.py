"""AdamW's state of Megatron's distributed optimizer, parameter by parameter as the model has them.

Each data-parallel process holds a range of every flat buffer. Megatron-core 0.16 has formats of its own for this state;
the one that loads under any plan loses the place of parameters where a buffer has several buckets, as with tied weights
and stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory, is_main_replica
from torch import Tensor

from relax_hpc.files.tensor_files import split

KEYS = ("param", "exp_avg", "exp_avg_sq")
"""State of each parameter: its master weight and AdamW's two moments, float32."""
META = torch.device("meta")


def fresh(optimizer: Any, steps: int = 0) -> None:
    """Set the moments to zero, and the number of steps to `steps`."""
    adam = optimizer.optimizer
    adam.state.clear()
    for group in adam.param_groups:
        for parameter in group["params"]:
            adam.state[parameter] = {key: torch.zeros_like(parameter) for key in KEYS[1:]}
    count_steps(optimizer, steps)


def count_steps(optimizer: Any, steps: int) -> None:
    adam = optimizer.optimizer
    for group in adam.param_groups:
        if isinstance(adam, torch.optim.AdamW):  # counts with every parameter; Transformer Engine's with the group
            for parameter in group["params"]:
                adam.state[parameter]["step"] = torch.tensor(float(steps))
        else:
            group["step"] = steps


def gathered(optimizers: list[Any], model: dict[str, Any]) -> dict[str, Any]:
    """The state as sharded tensors, beside those of the model; collective. The processes that write have the values."""
    found: dict[str, Any] = {}
    for number, optimizer, parameter, place in _parameters(optimizers, model):
        held = _range(optimizer, parameter)
        mine = optimizer._get_main_param_and_optimizer_states(parameter) if held else {}
        group = optimizer.data_parallel_group
        for key in KEYS:
            whole = torch.zeros(parameter.numel(), device=parameter.device)
            if held:
                whole[held] = mine[key].detach().float()
            if group.size() > 1:
                dist.reduce(whole, dist.get_global_rank(group, 0), group=group)
            writes = is_main_replica(place.replica_id)
            data = whole.view(parameter.shape).cpu() if writes else torch.empty(parameter.shape, device=META)
            found[f"{number}/{key}"] = _placed(place, key, data)
    return found


def name_of(key: str, parameter: str) -> str:
    """The name of a parameter's state in a checkpoint."""
    return f"optimizer.{key}.{parameter}"


def expected(optimizers: list[Any], model: dict[str, Any]) -> dict[str, Any]:
    """The state's names and places, without values."""
    return _empty(_parameters(optimizers, model), META)


def to_fill(optimizers: list[Any], model: dict[str, Any], most_bytes: int) -> Iterator[dict[str, Any]]:
    """The state's tensors to load into, in equally many parts on every process: put each into place before the next."""
    parts = list(split(_parameters(optimizers, model), lambda one: 4 * len(KEYS) * one[2].numel(), most_bytes))
    counts = [0] * dist.get_world_size()
    dist.all_gather_object(counts, len(parts))
    for part in parts + [[] for _ in range(max(counts) - len(parts))]:
        yield _empty(part, torch.device("cpu"))


def _empty(parameters: Iterable[tuple[int, Any, Any, Any]], device: torch.device) -> dict[str, Any]:
    return {
        f"{number}/{key}": _placed(place, key, torch.empty(parameter.shape, device=device))
        for number, _, parameter, place in parameters
        for key in KEYS
    }


def put(optimizers: list[Any], model: dict[str, Any], loaded: dict[str, Tensor]) -> None:
    """Copy loaded state into the ranges that this process holds."""
    for number, optimizer, parameter, _ in _parameters(optimizers, model):
        held = _range(optimizer, parameter)
        if held and f"{number}/{KEYS[0]}" in loaded:
            mine = optimizer._get_main_param_and_optimizer_states(parameter)
            for key in KEYS:
                mine[key].data.copy_(loaded[f"{number}/{key}"].flatten()[held])


def _parameters(optimizers: list[Any], model: dict[str, Any]) -> Iterator[tuple[int, Any, Any, Any]]:
    """All parameters as (number, optimizer, parameter, place in the model), in one order on all data-parallel processes."""
    places = {id(place.data): place for place in nested_values(model)}
    every = [(o, parameter) for o in optimizers for buffer in o.buffers for parameter in buffer.param_index_map]
    for number, (optimizer, parameter) in enumerate(every):
        yield number, optimizer, parameter, places[id(parameter)]


def _range(optimizer: Any, parameter: Any) -> slice | None:
    """The part of the flattened parameter that this process optimizes; None where it has none."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                if parameter in bucket["param_map"]:
                    held = bucket["param_map"][parameter]["param"]
                    return slice(held.start, held.end)
    return None


def _placed(place: Any, key: str, data: Tensor) -> Any:
    about: dict[str, Any] = {"key": name_of(key, place.key), "data": data}
    if not isinstance(place, ShardedTensorFactory):
        about["dtype"] = data.dtype
    return replace(place, **about)
