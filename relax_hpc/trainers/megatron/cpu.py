"""Support for Megatron-core without a GPU: stands in for all that it presumes of CUDA, while one of our calls runs.

`support()` is entered around the import of Megatron and around every call that ends in it; outside of it, torch is as
it was. Where there is a GPU it does nothing.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
import torch._dynamo  # it looks through torch as it is imported: before anything stands in
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

P = ParamSpec("P")
R = TypeVar("R")
CPU = torch.device("cpu")
_active = False


class _CudaMeansCpu(TorchFunctionMode):
    """Redirects device="cuda", .cuda() and pinned memory to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # gradients are told apart by names such as torch.cuda.FloatTensor
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return str(device).startswith("cuda") if isinstance(device, (str, torch.device)) else False


class _Nothing:
    """A stream or an event: work on the CPU is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self  # record_event() gives an event


def _stand_ins() -> list[tuple[Any, str, Any]]:
    """Stand-ins for torch.cuda, as (object, attribute, replacement)."""
    cuda = torch.cuda
    nothing, null = _Nothing(), lambda *args, **kwargs: None
    get_state = lambda device=None: torch.get_rng_state()
    set_state = lambda state, device=None: torch.set_rng_state(state)
    return [
        (torch, "compile", lambda function, **options: function),  # fusions, compiled for a GPU as Megatron is imported
        (cuda, "current_device", lambda: CPU),  # only ever used as device=…
        (cuda, "current_stream", lambda *args: nothing),
        (cuda, "default_stream", lambda *args: nothing),
        (cuda, "stream", lambda stream=None: contextlib.nullcontext()),
        (cuda, "Stream", _Nothing),
        (cuda, "Event", _Nothing),
        (cuda, "device_count", lambda: 1),
        *((cuda, name, null) for name in ("synchronize", "set_device", "set_stream", "empty_cache")),
        (cuda, "manual_seed", torch.default_generator.manual_seed),
        (cuda, "get_rng_state", get_state),
        (cuda, "set_rng_state", set_state),
        (cuda.random, "get_rng_state", get_state),
        (cuda.random, "set_rng_state", set_state),
        *((cuda, name, lambda *args: 0) for name in ("memory_allocated", "max_memory_allocated", "memory_reserved")),
        *((cuda.nvtx, name, null) for name in ("range_push", "range_pop", "mark")),
    ]


@functools.cache
def _megatron_stand_ins() -> list[tuple[Any, str, Any]]:
    """Stand-ins for parts of Megatron-core 0.16 itself, as (object, attribute, replacement)."""
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor  # left out for tensors on the CPU

    return [
        (random, "_set_cuda_rng_state", lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)),
        (moe_utils, "te_general_gemm", None),  # undefined without Transformer Engine
        (moe_utils, "maybe_move_tensor_to_cpu", to_numpy),
        (token_dispatcher, "maybe_move_tensor_to_cpu", to_numpy),
        (mappings, "_gather_along_first_dim", _uneven_gather(mappings._gather_along_first_dim)),
        (mappings, "_reduce_scatter_along_first_dim", _uneven_scatter(mappings._reduce_scatter_along_first_dim)),
    ]


def _uneven_gather(even: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Gather unequal parts, as tokens on their way to split experts are; gloo gathers equal parts only."""

    def gather(x: Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even(x, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = x.new_zeros((max(sizes), *x.shape[1:]))
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    return gather


def _uneven_scatter(even: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def scatter(x: Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even(x, group, input_split_sizes, use_global_buffer)
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        parts: list[Tensor] = list(torch.split(x, [int(size) for size in input_split_sizes]))
        mine: Tensor = parts[group.rank()].contiguous()
        return mine

    return scatter


@contextlib.contextmanager
def support(megatron: bool = True) -> Iterator[None]:
    """Stand in for CUDA within this block. megatron: in Megatron's modules too, once imported under support(False)."""
    global _active
    if torch.cuda.is_available() or _active:
        yield
        return
    _active = True
    try:
        with contextlib.ExitStack() as undo:
            for where, name, stand_in in [*_stand_ins(), *(_megatron_stand_ins() if megatron else [])]:
                if hasattr(where, name):
                    undo.callback(setattr, where, name, getattr(where, name))
                setattr(where, name, stand_in)
            undo.enter_context(_CudaMeansCpu())  # of this thread: the one that trains
            yield
    finally:
        _active = False


def supported(method: Callable[P, R]) -> Callable[P, R]:
    """Wrap a method so that it runs under support()."""

    @functools.wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with support():
            return method(*args, **kwargs)

    return wrapped
