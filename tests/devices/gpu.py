"""A GPU that is none: tensors lie in host memory, say that they are on `cuda:0`, and refuse what a GPU's tensors refuse.

    torch.zeros(3, device="cuda") ──function mode──► made on the CPU, its storage marked ──► .device says cuda:0
    any operation, of a backward pass too ──dispatch mode──► marked and other tensors together? an error
                                                          └► its results are marked as its arguments are

Everything is computed for real, by the CPU's kernels, so that numbers can be compared with a run on the CPU to the bit, and
code that looks at numbers goes on as it would. Inside `simulated()` torch sees one GPU, in all threads that begin there.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
HOST_ONLY = ("numpy", "__array__", "__dlpack__", "share_memory_", "pin_memory")
"""Methods of a tensor that a GPU's does not have: its memory is not the host's."""
COPIES = ("aten::copy_", "aten::_foreach_copy_")
"""Operations whose tensors may be on different devices."""
METADATA = ("aten::set_", "aten::resize_", "aten::detach", "aten::view", "aten::alias")
"""Operations that read no tensor's memory."""
INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
"""Operations whose second argument says where; torch moves it to the device of the first by itself, and waits for that."""
_nccl: list[bool] = []
"""Not empty while a process group stands for one over NCCL."""


class DeviceError(RuntimeError):
    """A GPU would refuse this, or do it slowly."""


def on_gpu(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "on_gpu", False)


def mark(tensor: Tensor, gpu: bool) -> Tensor:
    """Say where a tensor's memory is: every view of it says the same."""
    tensor.untyped_storage().on_gpu = gpu  # type: ignore[attr-defined]
    return tensor


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Have torch see one GPU within this block."""
    begin = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        with _Checked(), _Told():
            begin(thread)

    with contextlib.ExitStack() as undo:
        for where, name, stand_in in _stand_ins():
            undo.enter_context(mock.patch.object(where, name, stand_in))
        undo.enter_context(mock.patch.object(threading.Thread, "run", run))
        undo.enter_context(_Checked())
        undo.enter_context(_Told())
        yield


class _Told(TorchFunctionMode):
    """What Python sees and asks for: devices of tensors, copies between devices, tensors made on one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in SPECIAL:
            return SPECIAL[func](*args, **kwargs)
        if getattr(func, "__name__", "") in HOST_ONLY and on_gpu(args[0]):
            raise DeviceError(f"{func.__name__}() of a tensor on {GPU}: use .cpu() first")
        if kwargs.pop("pin_memory", False) and _is_gpu(kwargs.get("device")):
            raise DeviceError(f"memory on {GPU} cannot be pinned")
        asked = kwargs.get("device")
        real = asked is not None and str(asked) != "meta"
        if real:
            kwargs["device"] = CPU
        _compare_generator(kwargs.get("generator"), asked, args)
        made = func(*args, **kwargs)
        if real:
            for tensor in _tensors([made]):
                mark(tensor, _is_gpu(asked))
        return made


class _Checked(TorchDispatchMode):
    """What is computed: arguments must be on one device, and so are the results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = list(_tensors([*args, *(kwargs or {}).values()]))
        storages = [tensor.untyped_storage() for tensor in given]
        marked = [getattr(storage, "on_gpu", False) for storage in storages]
        if func.namespace == "c10d" and _nccl and not all(marked) and func.name() != "c10d::barrier":
            raise DeviceError(f"{func.name()}: NCCL moves tensors on {GPU} only")
        if func.overloadpacket is torch.ops.aten.set_ and isinstance(args[1], torch.UntypedStorage):
            marked.append(getattr(args[1], "on_gpu", False))
            if marked[0] != marked[1]:
                raise DeviceError(f"set_: the tensor is on {_name(marked[0])}, its storage on {_name(marked[1])}")
            return func(*args)
        if not any(marked):
            made = func(*args, **(kwargs or {}))
            if not given and _derivative():  # made for a gradient, by its options, which tell of the host's memory
                for tensor in _tensors([made]):
                    tensor.untyped_storage().anywhere = True  # type: ignore[attr-defined]
            return made
        _compare(func, given, storages, marked, _moved_by_torch(func, args))
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors([made]):
            if not any(tensor.untyped_storage() is storage for storage in storages):
                mark(tensor, True)
        return made


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _name(gpu: bool) -> torch.device:
    return GPU if gpu else CPU


def _is_gpu(device: Any) -> bool:
    """Return True for a GPU by any of its names, a number too."""
    return type(device) is int or str(device).startswith("cuda")


def _derivative() -> bool:
    """Return True in a derivative of torch's own, within a backward pass."""
    node = torch._C._current_autograd_node()
    return node is not None and not isinstance(node, torch.autograd.function.BackwardCFunction)


def _moved_by_torch(func: Any, args: Any) -> list[Tensor]:
    """Find the host's tensors that say where in a tensor on the GPU: of transformers, and of derivatives of its indexing.

    Our own code brings them to the device itself.
    """
    if func.name().split(".")[0] not in INDEXED or not on_gpu(args[0]):
        return []
    frame = inspect.currentframe()
    while frame is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    foreign = frame is not None and "/transformers/" in frame.f_code.co_filename
    return [tensor for tensor in _tensors([args[1]]) if not on_gpu(tensor)] if foreign or _derivative() else []


def _compare(func: Any, given: list[Tensor], storages: list[Any], marked: list[bool], moved: list[Tensor]) -> None:
    """Refuse tensors of both devices, but for copies, for single numbers from the host, and for what torch moves; and
    memory that was given back."""
    name = func.name().split(".")[0]
    if name not in METADATA:
        for tensor, storage in zip(given, storages, strict=True):
            if not storage.nbytes() and tensor.numel():
                raise DeviceError(f"{name} of a tensor {list(tensor.shape)} whose memory was given back")
    single = torch.Tag.pointwise in func.tags or name in ("aten::index_put", "aten::index_put_")
    known = [is_marked or getattr(s, "anywhere", False) for is_marked, s in zip(marked, storages, strict=True)]
    known = [fits or any(t is one for one in moved) for fits, t in zip(known, given, strict=True)]
    left = [t for t, fits in zip(given, known, strict=True) if not fits and not (single and t.ndim == 0)]
    if left and name not in COPIES:
        shapes = [list(tensor.shape) for tensor in left]
        raise DeviceError(f"expected all tensors on one device: {name} is on {GPU}, and tensors {shapes} on {CPU}")


def _compare_generator(generator: Any, asked: Any, args: Any) -> None:
    if isinstance(generator, torch.Generator):
        gpu = _is_gpu(asked) if asked is not None else any(map(on_gpu, _tensors(args)))
        if gpu != _is_gpu(generator.device):
            raise DeviceError(f"expected a generator on {_name(gpu)}, found one on {generator.device}")


def _to(tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    """Tensor.to: a copy where the device is another one."""
    here = on_gpu(tensor)
    if isinstance(args[0] if args else kwargs.get("other"), Tensor):
        other = args[0] if args else kwargs["other"]
        device, dtype, memory_format = _name(on_gpu(other)), other.dtype, None
    else:
        args = tuple(GPU if type(arg) is int else arg for arg in args)
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if device is not None and device.type == "meta":
        return tensor.to(device, dtype)
    there = here if device is None else _is_gpu(device)
    layout = {"memory_format": memory_format or torch.preserve_format}
    moved = tensor.to(dtype or tensor.dtype, copy=copy or there != here, **layout)
    return moved if there == here else mark(moved, there)


def _set_gradient(descriptor: Tensor, gradient: Tensor | None) -> None:
    if gradient is not None and on_gpu(descriptor) != on_gpu(gradient):
        raise DeviceError("a gradient lies on its parameter's device")
    torch.Tensor.grad.__set__(descriptor, gradient)  # type: ignore[attr-defined]


def _type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    found = tensor.type(*args, **kwargs)
    return found.replace("torch.", "torch.cuda.") if isinstance(found, str) and on_gpu(tensor) else found


def _indexed(func: Any) -> Callable[..., Any]:
    """Indexing by a list of numbers: torch makes it a tensor on the device of what is indexed."""

    def index(tensor: Tensor, where: Any, *value: Any) -> Any:
        if isinstance(where, list):
            where = mark(torch.tensor(where, dtype=None if where else torch.long), on_gpu(tensor))
        return func(tensor, where, *value)

    return index


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


def _counts(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch.histc, which counts whole numbers on a GPU alone."""
    return torch.histc(values.float(), *args, **kwargs).to(values.dtype)


SPECIAL: dict[Any, Callable[..., Any]] = {
    _getter("device"): lambda t, *_: GPU if on_gpu(t) else _getter("device")(t),
    _getter("is_cuda"): lambda t, *_: on_gpu(t),
    _getter("is_cpu"): lambda t, *_: not on_gpu(t) and _getter("is_cpu")(t),
    torch.Tensor.grad.__set__: _set_gradient,  # type: ignore[attr-defined]
    torch.Tensor.__getitem__: _indexed(torch.Tensor.__getitem__),
    torch.Tensor.__setitem__: _indexed(torch.Tensor.__setitem__),
    torch.Tensor.get_device: lambda t: 0 if on_gpu(t) else -1,
    torch.Tensor.to: _to,
    torch.histc: _counts,
    torch._C._nn.pad_sequence: lambda each, *args: mark(torch._C._nn.pad_sequence(each, *args), on_gpu(each[0])),
    torch.Tensor.cpu: lambda t, **kwargs: _to(t, CPU, **kwargs),
    torch.Tensor.cuda: lambda t, *args, **kwargs: _to(t, GPU, **kwargs),
    torch.Tensor.type: _type,
}
"""Functions that mean something else where there is a GPU; properties by what gets and sets them."""


class _Generator(torch.Generator):
    """A generator that says which device it is for; its numbers are the CPU's."""

    device = CPU  # type: ignore[assignment]

    def __new__(cls, device: Any = "cpu") -> _Generator:
        made: _Generator = super().__new__(cls)
        made.device = GPU if _is_gpu(device) else CPU  # type: ignore[misc, assignment]
        return made

    def __init__(self, device: Any = "cpu") -> None: ...


class _Autocast(torch.autocast):
    """Autocast for the GPU, by the CPU's list of operations; that for the CPU changes nothing on a GPU."""

    def __init__(self, device_type: str, dtype: Any = None, enabled: bool = True, **kwargs: Any) -> None:
        if device_type == "cpu":
            dtype, enabled = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")
        super().__init__("cpu", dtype, enabled, **kwargs)


class _Nothing:
    """A stream or an event: work is done when the call returns."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


def _join(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """dist.init_process_group, with gloo in NCCL's place."""
    _nccl[:] = [True] if backend == "nccl" else []
    _BEGIN_GROUP("gloo" if _nccl else backend, *args, **kwargs)


_RUN_BACKWARD = torch.autograd._engine_run_backward
_BEGIN_GROUP, _OBJECTS_ON = dist.init_process_group, dist.distributed_c10d._get_object_coll_device


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """UntypedStorage.clone, as a deep copy of a tensor calls it."""
    with _disable_current_modes():
        made = torch.UntypedStorage(storage.nbytes()).copy_(storage)
    made.on_gpu = getattr(storage, "on_gpu", False)  # type: ignore[attr-defined]
    return made


def _backward(*args: Any, **kwargs: Any) -> Any:
    """Run a backward pass: torch hands `backward` itself to the mode, so that functions in it would be told nothing."""
    with _Told():
        return _RUN_BACKWARD(*args, **kwargs)


def _stand_ins() -> list[tuple[Any, str, Any]]:
    """Stand-ins for what a torch built without CUDA lacks, as (object, attribute, replacement)."""
    cuda, own, storage = torch.cuda, torch.Generator(), torch.UntypedStorage
    nothing, null = _Nothing(), lambda *args, **kwargs: None
    get_state, set_state = lambda device=None: own.get_state(), lambda state, device=None: own.set_state(state)
    return [
        (storage, "device", property(lambda self: GPU if getattr(self, "on_gpu", False) else CPU)),
        (storage, "clone", _clone),
        (torch, "Generator", _Generator),
        (torch.autograd, "_engine_run_backward", _backward),
        *((where, "autocast", _Autocast) for where in (torch, torch.amp, torch.amp.autocast_mode)),
        (torch, "is_autocast_enabled", lambda *_, ask=torch.is_autocast_enabled: ask("cpu")),
        (torch, "get_autocast_dtype", lambda *_, ask=torch.get_autocast_dtype: ask("cpu")),
        (dist, "init_process_group", _join),
        (dist.distributed_c10d, "_get_object_coll_device", lambda group=None: "cuda" if _nccl else _OBJECTS_ON(group)),
        (torch.accelerator, "current_accelerator", null),  # a build with CUDA would ask the driver for a stream
        (cuda, "is_available", lambda: True),
        *((cuda, name, lambda *args: 1) for name in ("device_count",)),
        (cuda, "current_device", lambda: 0),
        (cuda, "get_device_capability", lambda device=None: (9, 0)),
        *((cuda, name, lambda *args: nothing) for name in ("current_stream", "default_stream")),
        (cuda, "stream", lambda stream=None: contextlib.nullcontext()),
        (cuda, "Stream", _Nothing),
        (cuda, "Event", _Nothing),
        *((cuda, name, null) for name in ("synchronize", "set_device", "set_stream", "empty_cache", "manual_seed_all")),
        (cuda, "manual_seed", own.manual_seed),
        *((where, "get_rng_state", get_state) for where in (cuda, cuda.random)),
        *((where, "set_rng_state", set_state) for where in (cuda, cuda.random)),
        *((cuda, name, lambda *args: 0) for name in ("memory_allocated", "max_memory_allocated", "memory_reserved")),
        *((cuda.nvtx, name, null) for name in ("range_push", "range_pop", "mark")),
    ]  # fmt: skip
