"""How a version goes through a group: parts with a description each, checksums on both sides.

size of the description · the description (names, types, shapes) · segments of bytes · … · END
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from relax_hpc.tensor_files import DTYPES, NAMES, as_bytes
from relax_hpc.weights.base import Export, Progress
from relax_hpc.weights.contents import Contents, Entry, entry
from relax_hpc.weights.parts import Named, in_threads

SEGMENT_BYTES = 2 << 20
"""Smaller tensors are put together to so many bytes, since each message costs a fraction of a millisecond; larger ones are sent from where they
are, and received where they stay."""
PART_BYTES = 32 << 20
"""Is described together; while it is on its way, checksums of the next one are made, and its small tensors put together."""
END, OVER = 0, -1
"""In place of a size: the version is whole; the group is given up."""
ALIGNMENT = 16
IDLE_S = 24 * 3600.0
"""Between two versions; a sender that dies is noticed at once, one whose host is lost when a new group is formed."""


class GroupError(Exception):
    """The group did not come about, or broke: a member is gone, or did not take part in time."""


class Group(Protocol):
    """Connected processes, of which the first one sends."""

    def broadcast(self, tensors: Sequence[Tensor], timeout_s: float | None = None) -> None:
        """Send these bytes, or receive into them; nobody waits longer than `timeout_s` for another. Raises GroupError."""
        ...

    def close(self) -> None: ...


def send(
    group: Group, export: Export, bucket_bytes: int, room: Room, progress: Progress
) -> tuple[Contents, GroupError | None]:
    """Export a version into the group; what it is, and how the group broke, if it did. room: to put small tensors together in."""
    contents: Contents = {}
    broken: list[GroupError] = []
    line = threading.Lock()

    def work(_: int, part: Named) -> None:
        contents.update({name: entry(tensor) for name, tensor in part})
        segments, used = _packed(part, room)
        with line:
            if not broken:
                try:
                    _send_part(group, part, segments)
                except GroupError as error:
                    broken.append(error)
        room.give_back(used)

    # less than the bucket, for what is put together is held besides
    in_threads(export(), work, min(bucket_bytes * 3 // 4, 4 * PART_BYTES), progress, threads=2)
    try:
        if not broken:
            group.broadcast([torch.tensor([END])])
    except GroupError as error:
        broken.append(error)
    return contents, broken[0] if broken else None


def dismiss(group: Group) -> None:
    """Tell the members that this group sends no more."""
    with contextlib.suppress(GroupError):  # then they know
        group.broadcast([torch.tensor([OVER])])
    group.close()


class Room:
    """Memory to receive into, or to send from. Used again: pages that are touched for the first time cost more than what is written there."""

    def __init__(self) -> None:
        self._spare: dict[int, list[Tensor]] = {}

    def take(self, nbytes: int) -> Tensor:
        try:
            return self._spare[nbytes].pop()
        except (KeyError, IndexError):
            return torch.empty(nbytes, dtype=torch.uint8)

    def give_back(self, segments: Sequence[Tensor]) -> None:
        """Nobody looks at them any more."""
        for segment in segments:
            self._spare.setdefault(len(segment), []).append(segment)


@dataclass(slots=True)
class Received:
    """A version that came by broadcast."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    contents: Contents = field(default_factory=dict)
    segments: list[Tensor] = field(default_factory=list)
    """The memory of `tensors`."""


def receive(group: Group, room: Room, begun: Callable[[], None]) -> Received | None:
    """The next version; None when the group is given up. `begun`: called when its first part comes. Raises GroupError."""
    received = Received()
    size = torch.empty(1, dtype=torch.int64)
    with ThreadPoolExecutor(1, "checksums") as pool:  # while the next part is on its way
        entries: dict[str, Future[Entry]] = {}
        try:
            while True:
                group.broadcast([size], None if received.segments else IDLE_S)
                if int(size) in (END, OVER):
                    break
                begun()
                for name, tensor in _receive_part(group, int(size), room, received.segments):
                    received.tensors[name], entries[name] = tensor, pool.submit(entry, tensor)
        except GroupError:
            pool.shutdown()  # its memory is not used again: something may still arrive there
            raise
        received.contents = {name: future.result() for name, future in entries.items()}
    return received if int(size) == END else None


def _packed(part: Named, room: Room) -> tuple[list[Tensor], list[Tensor]]:
    """The bytes of a part, in segments; and those of them that are of `room`."""
    pieces = [torch.from_numpy(as_bytes(tensor)) for _, tensor in part]
    segments, used = [], []
    for run in _segments([len(piece) for piece in pieces]):
        if len(run) == 1:
            segments.append(pieces[run[0]])
            continue
        flat = room.take(sum(_padded(len(pieces[i])) for i in run))
        begin = 0
        for i in run:
            flat[begin : begin + len(pieces[i])] = pieces[i]
            begin += _padded(len(pieces[i]))
        segments.append(flat)
        used.append(flat)
    return segments, used


def _send_part(group: Group, part: Named, segments: list[Tensor]) -> None:
    about = json.dumps([[name, NAMES[t.dtype], list(t.shape)] for name, t in part]).encode()
    group.broadcast([torch.tensor([len(about)])])
    group.broadcast([torch.frombuffer(bytearray(about), dtype=torch.uint8)])
    group.broadcast(segments)


def _receive_part(group: Group, about_size: int, room: Room, kept: list[Tensor]) -> Named:
    told = torch.empty(about_size, dtype=torch.uint8)
    group.broadcast([told])
    about = [(name, DTYPES[dtype], shape) for name, dtype, shape in json.loads(bytes(told.numpy()))]
    sizes = [math.prod(shape) * dtype.itemsize for _, dtype, shape in about]
    runs = _segments(sizes)
    segments = [room.take(sizes[run[0]] if len(run) == 1 else sum(_padded(sizes[i]) for i in run)) for run in runs]
    kept += segments
    group.broadcast(segments)
    part: Named = []
    for run, segment in zip(runs, segments, strict=True):
        begin = 0
        for i in run:
            name, dtype, shape = about[i]
            part.append((name, segment[begin : begin + sizes[i]].view(dtype).reshape(shape)))
            begin += _padded(sizes[i])
    return part


def _segments(sizes: list[int]) -> list[list[int]]:
    """Which pieces are sent as one: neighbours up to SEGMENT_BYTES; a larger one alone. The same on both sides."""
    runs: list[list[int]] = []
    total = SEGMENT_BYTES
    for i, size in enumerate(sizes):
        if total + size > SEGMENT_BYTES:
            runs.append([])
            total = 0
        runs[-1].append(i)
        total += size
    return runs


def _padded(size: int) -> int:
    """Every piece of a segment begins where any type may."""
    return -(-size // ALIGNMENT) * ALIGNMENT
