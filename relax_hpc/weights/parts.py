"""A version's tensors in a folder: safetensors files of a quarter bucket each, written and read by several threads.

FOLDER/part-0000.safetensors …    some tensors each; any reader of safetensors takes them
FOLDER/index.json                 the version's checksum, the parts with their sizes, and the base of a change
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from relax_hpc.files import tensor_files
from relax_hpc.files.publish import read_json, sync_folder, to_json, write_file
from relax_hpc.records import Progress
from relax_hpc.weights.base import DamagedWeights, WeightsError
from relax_hpc.weights.contents import Contents, compare, entry

THREADS = 4
BUCKET_BYTES = 256 << 20
PROGRESS_S = 1.0

Named = list[tuple[str, Tensor]]
T = TypeVar("T")


def in_threads(
    tensors: Iterable[tuple[str, Tensor]],
    work: Callable[[int, Named], T],
    bucket_bytes: int,
    progress: Progress = lambda: None,
    threads: int = THREADS,
) -> list[T]:
    """Call `work` on each quarter bucket in threads while the next one is gathered; at most two buckets are held."""
    part_bytes = bucket_bytes // 4
    todo: dict[Future[T], int] = {}
    futures: list[Future[T]] = []

    def room_for(size: int) -> None:
        while todo and sum(todo.values()) + size > 2 * bucket_bytes:
            for future in wait(todo, timeout=PROGRESS_S, return_when=FIRST_COMPLETED).done:
                del todo[future]
                future.result()
            progress()

    def let_go(number: int, parts: list[Named]) -> T:
        return work(number, parts.pop())  # the pool holds its arguments past the moment at which a future is done

    with ThreadPoolExecutor(threads, "weights") as pool:
        try:
            for number, part in enumerate(tensor_files.buckets(tensors, part_bytes)):
                size = sum(tensor.nbytes for _, tensor in part)
                room_for(size + 2 * part_bytes)  # this one, the one that is gathered next, and the tensor that ends it
                future = pool.submit(let_go, number, [part])
                todo[future] = size
                futures.append(future)
                del part
                progress()
            room_for(2 * bucket_bytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def part_name(number: int) -> str:
    return f"part-{number:04d}.safetensors"


def read_part(path: Path, size: int) -> dict[str, Tensor]:
    """Read the tensors of a part, mapped privately. Raises DamagedWeights where it is not such a file."""
    try:
        there = os.stat(path).st_size
        if there != size:
            raise DamagedWeights(
                f"'{path}' has {there} bytes, {size} were written (a checksum of it cannot be right): refused"
            )
        return tensor_files.views(torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8))
    except (ValueError, RuntimeError) as error:
        raise DamagedWeights(
            f"'{path}' is no safetensors file ({error}); its checksum cannot be right: refused"
        ) from error


def finish(
    folder: Path, sizes: Mapping[str, int], checksum: str, base: dict[str, Any] | None = None, *, durable: bool
) -> None:
    """Write the index of a folder whose parts are all there."""
    about = {"checksum": checksum, "base": base, "parts": dict(sizes)}
    write_file(folder / "index.json", to_json(about), durable=durable)
    if durable:
        sync_folder(folder)


def read_index(folder: Path, checksum: str) -> dict[str, Any]:
    """Read a folder's index. Raises WeightsError when it is gone, or is of another version than that with `checksum`."""
    try:
        index: dict[str, Any] | None = read_json(folder / "index.json")
    except ValueError as error:
        raise DamagedWeights(f"'{folder / 'index.json'}' is damaged: {error}; its checksum cannot be right") from error
    if index is None:
        raise WeightsError(f"'{folder}' was retired, or was never written: take the newest version")
    if index.get("checksum") != checksum:
        raise DamagedWeights(
            f"'{folder}' holds a version of checksum {index.get('checksum')}, {checksum} is asked for: refused"
        )
    return index


def read_parts(folder: Path, index: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read all tensors of a folder. Raises WeightsError when it is retired meanwhile."""
    found: dict[str, Tensor] = {}
    try:
        for name, size in index["parts"].items():
            found |= read_part(folder / name, size)
    except FileNotFoundError:
        if not folder.exists():
            raise WeightsError(f"'{folder}' was retired while it was read: take the newest version") from None
        raise DamagedWeights(f"'{folder}' lacks a part: no checksum of it can be right") from None
    return found


def digest(
    tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int = BUCKET_BYTES, progress: Progress = lambda: None
) -> Contents:
    """Describe the tensors: their types, shapes and checksums."""
    work: Callable[[int, Named], Contents] = lambda _, part: {name: entry(tensor) for name, tensor in part}
    return {name: e for part in in_threads(tensors, work, bucket_bytes, progress) for name, e in part.items()}


def verify(expected: Contents, tensors: Mapping[str, Tensor], where: str, progress: Progress = lambda: None) -> None:
    """Raise DamagedWeights unless the tensors are what the manifest says, to the bit."""
    compare(expected, digest(tensors.items(), progress=progress), where)
