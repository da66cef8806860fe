"""Safetensors files, written straight from tensors' memory and read without a copy; any reader of the format takes them."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from relax_hpc.files.publish import write_file

ALIGNMENT = 8
"""Alignment in bytes of the data in a safetensors file, by the format's specification."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "BOOL": torch.bool,
}  # fmt: skip
"""Name of a type in safetensors -> the type in torch."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SHOWN = 3
"""Differences that one error names at most."""
T = TypeVar("T")


def as_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """View the tensor's bytes, without a copy where it is contiguous and on the CPU."""
    flat: NDArray[np.uint8] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def write(path: Path, tensors: Iterable[tuple[str, Tensor]], *, durable: bool) -> int:
    """Write a safetensors file, which must not exist; returns its size in bytes."""
    data = pieces(tensors)
    write_file(path, data, durable=durable)
    return sum(map(len, data))


def pieces(tensors: Iterable[tuple[str, Tensor]]) -> list[bytes | memoryview]:
    """Lay out a safetensors file as pieces: its header, then each tensor's memory."""
    # Wide types first: every tensor is aligned to its own width then.
    arranged = sorted(tensors, key=lambda pair: (-pair[1].dtype.itemsize, pair[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    begin = 0
    for name, tensor in arranged:
        end = begin + tensor.nbytes
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return [struct.pack("<Q", len(text)) + text, *(as_bytes(t).data for _, t in arranged)]


def views(data: Tensor) -> dict[str, Tensor]:
    """View the tensors of a safetensors file where they lie in `data`, [bytes] uint8. Raises ValueError if it is none."""
    found = {}
    try:
        (length,) = struct.unpack("<Q", bytes(data[:8].tolist()))
        header = json.loads(as_bytes(data[8 : 8 + length]).tobytes())
        header.pop("__metadata__", None)
        for name, about in header.items():
            dtype, (begin, end) = DTYPES[about["dtype"]], about["data_offsets"]
            if end - begin != math.prod(about["shape"]) * dtype.itemsize:
                raise ValueError(f"tensor '{name}'")
            found[name] = data[8 + length + begin : 8 + length + end].view(dtype).reshape(about["shape"])
    except (KeyError, TypeError, AttributeError, RuntimeError, IndexError, struct.error) as error:
        raise ValueError(str(error)) from error
    return found


def shapes(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Sequence[int]]:
    return {name: tensor.shape for name, tensor in tensors}


def differences(
    found: Mapping[str, Sequence[int]], model: Mapping[str, Sequence[int]], optional: Collection[str] = ()
) -> str:
    """Say how tensors differ from a model's, by names and shapes: "" where they do not. optional: names that may lack."""
    said = [f"'{n}' is missing" for n in model if n not in found and n not in optional]
    said += [f"'{n}' is not in the model" for n in found if n not in model]
    both = [(n, list(found[n]), list(shape)) for n, shape in model.items() if n in found]
    said += [f"'{n}' is {has}, expected {wanted}" for n, has, wanted in both if has != wanted]
    more = f"; {len(said) - SHOWN} more" if len(said) > SHOWN else ""
    return "; ".join(said[:SHOWN]) + more


def buckets(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    return split(tensors, lambda named: named[1].nbytes, bucket_bytes)


def split(items: Iterable[T], nbytes: Callable[[T], int], bucket_bytes: int) -> Iterator[list[T]]:
    """Split items, in order, into lists of at most `bucket_bytes`; a larger item is a list of its own."""
    bucket: list[T] = []
    size = 0
    for item in items:
        if bucket and size + nbytes(item) > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += nbytes(item)
    if bucket:
        yield bucket
