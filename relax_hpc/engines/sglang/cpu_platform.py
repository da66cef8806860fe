"""SGLang's server on a machine without a GPU: an out-of-tree platform for its own plugin point, plain PyTorch throughout.

SGLang's built-in CPU platform needs compiled kernels of its own; this one takes the PyTorch implementation that every
operator of SGLang has. It is for tests and tiny models: attention goes through the sequences one by one.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

NAME = "relax_hpc_cpu"
"""Value of SGLANG_PLATFORM that selects this platform, and its entry point in the group `sglang.srt.platforms`."""


def activate() -> str | None:
    """Name the platform's class where SGLANG_PLATFORM selects it, else None. SGLang asks every installed platform."""
    return f"{__name__}:CpuPlatform" if os.environ.get("SGLANG_PLATFORM") == NAME else None


def __getattr__(name: str) -> Any:
    """Make CpuPlatform when SGLang asks for it: this module is also imported where SGLang is not installed."""
    if name != "CpuPlatform":
        raise AttributeError(name)
    globals()[name] = _make()
    return globals()[name]


def _make() -> type:
    import torch
    from psutil import virtual_memory as memory
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class CpuPlatform(SRTPlatform):  # type: ignore[misc]
        """The platform interface of SGLang, filled for a CPU: each method's answer."""

        _enum = PlatformEnum.OOT
        device_name = device_type = "cpu"
        capabilities = PlatformCapabilities()
        get_device_total_memory = lambda self, device_id=0: memory().total
        get_current_memory_usage = lambda self, device=None: float(memory().total - memory().available)
        get_available_memory = lambda self, device_id=0: (memory().available, memory().total)
        get_device = lambda self, device_id=0: torch.device("cpu")
        set_device = lambda self, device: None
        get_device_name = lambda self, device_id=0: "cpu"
        get_device_uuid = lambda self, device_id=0: f"cpu-{device_id}"
        get_device_capability = lambda self, device_id=0: None
        get_torch_distributed_backend_str = lambda self: "gloo"
        get_default_attention_backend = lambda self: "torch_native"
        get_torch_profiler_activity_str = lambda self: "CPU"
        get_torch_profiler_activity = lambda self: torch.profiler.ProfilerActivity.CPU
        get_dispatch_key_name = lambda self: "native"
        apply_server_args_defaults = lambda self, server_args: _allocate_without_cuda()
        init_backend = lambda self: _allocate_without_cuda()

    return CpuPlatform


def _allocate_without_cuda() -> None:
    """Allocate the buffers for routed experts plainly: SGLang would register them with CUDA, which is not there."""
    from sglang.srt.mem_cache.pool_host import common

    def allocate(
        dims: Any, dtype: Any, device: Any, pin_memory: bool = False, allocator: Any = None, **offload: Any
    ) -> Any:
        return allocator.allocate(dims, dtype=dtype, device="cpu")

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
    _pin_nothing()


@functools.cache
def _pin_nothing() -> None:
    """Have torch leave out the pinning of memory, which it refuses without a GPU: SGLang's adapters ask for it everywhere."""
    import torch

    def plain(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, pin_memory=False, **how: make(*args, **how)

    for name in ("tensor", "empty", "zeros", "arange"):
        setattr(torch, name, plain(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **how: self  # type: ignore[method-assign]
