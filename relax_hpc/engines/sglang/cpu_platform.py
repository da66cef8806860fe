"""SGLang's server on a machine without a GPU: an out-of-tree platform for its own plugin point, plain PyTorch throughout.

SGLang's built-in CPU platform needs compiled kernels of its own; this one takes the PyTorch implementation that every
operator of SGLang has. It is for tests and tiny models: attention goes through the sequences one by one.
"""

from __future__ import annotations

import os
from typing import Any

NAME = "relax_hpc_cpu"
"""Value of SGLANG_PLATFORM that selects this platform; its entry point in the group `sglang.srt.platforms` has this
name too."""


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
    import psutil
    import torch
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    class CpuPlatform(SRTPlatform):  # type: ignore[misc]
        """The platform interface of SGLang, filled for a CPU."""

        _enum = PlatformEnum.OOT
        device_name = "cpu"
        device_type = "cpu"
        capabilities = PlatformCapabilities()

        def get_device_total_memory(self, device_id: int = 0) -> int:
            return int(psutil.virtual_memory().total)

        def get_current_memory_usage(self, device: Any = None) -> float:
            memory = psutil.virtual_memory()
            return float(memory.total - memory.available)

        def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
            memory = psutil.virtual_memory()
            return memory.available, memory.total

        def get_device(self, device_id: int = 0) -> torch.device:
            return torch.device("cpu")

        def set_device(self, device: Any) -> None: ...

        def get_device_name(self, device_id: int = 0) -> str:
            return "cpu"

        def get_device_uuid(self, device_id: int = 0) -> str:
            return f"cpu-{device_id}"

        def get_device_capability(self, device_id: int = 0) -> None:
            return None

        def get_torch_distributed_backend_str(self) -> str:
            return "gloo"

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_torch_profiler_activity_str(self) -> str:
            return "CPU"

        def get_torch_profiler_activity(self) -> Any:
            return torch.profiler.ProfilerActivity.CPU

        def get_dispatch_key_name(self) -> str:
            return "native"

        def apply_server_args_defaults(self, server_args: Any) -> None:
            _allocate_without_cuda()

        def init_backend(self) -> None:
            _allocate_without_cuda()

    return CpuPlatform


def _allocate_without_cuda() -> None:
    """Allocate the buffers for routed experts plainly: SGLang would register them with CUDA, which is not there."""
    from sglang.srt.mem_cache.pool_host import common

    def allocate(
        dims: Any, dtype: Any, device: Any, pin_memory: bool = False, allocator: Any = None, **offload: Any
    ) -> Any:
        return allocator.allocate(dims, dtype=dtype, device="cpu")

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate
