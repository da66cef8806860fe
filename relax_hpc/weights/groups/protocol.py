"""Protocol by which a version goes through a group: parts with a description each, checksums on both sides.

first version of a group:    size of a description · the description (names, types, shapes) · segments of bytes · … · END
the others:                  AGAIN, for their tensors are those of the version before · segments of bytes · …
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from relax_hpc.files.tensor_files import DTYPES, as_bytes, buckets, split
from relax_hpc.records import Progress
from relax_hpc.weights.base import Export
from relax_hpc.weights.contents import Contents, entry
from relax_hpc.weights.parts import Named, in_threads

SEGMENT_BYTES = 2 << 20
"""Bytes to which smaller neighbors are put together (both sides compute the same), since each message costs a fraction
of a millisecond. Larger tensors are sent from where they are, and received where they stay."""
PART_BYTES = 8 << 20
"""Bytes of tensors that are described together. While one such part is on its way, the next one is prepared."""
END, OVER, AGAIN = 0, -1, -2
"""Sent in place of a description's size: the version is whole; the group is given up; the parts are those of before."""
ALIGNMENT = 16
IDLE_S = 24 * 3600.0
"""Longest wait between two versions. A sender that dies is noticed at once, a lost host when a new group is formed."""

Arrived = Callable[[int], None]
Described = list[tuple[str, str, tuple[int, ...]]]
"""The tensors of a part: name, type in safetensors' notation, shape."""


class GroupError(Exception):
    """The group was not formed, or broke: a member is gone, or did not take part in time."""


class Group(Protocol):
    """Connected processes, of which the first one sends."""

    def broadcast(
        self, tensors: Sequence[Tensor], timeout_s: float | None = None, arrived: Arrived = lambda _: None
    ) -> None:
        """Send the tensors' bytes, or receive into them; nobody waits longer than `timeout_s` for another. arrived:
        called with each tensor's place in `tensors`, in order, while later ones are on their way. Raises GroupError."""
        ...

    def tell(self, message: Tensor, timeout_s: float | None = None) -> None:
        """Send or receive a small message that says which bytes come, or whether there are any. Raises GroupError."""
        self.broadcast([message], timeout_s)

    def close(self) -> None: ...


class BufferPool:
    """Memory to receive into, or to send from; used again, as touching pages for the first time costs more than writing."""

    def __init__(self) -> None:
        self._spare: defaultdict[int, list[Tensor]] = defaultdict(list)

    def allocate(self, nbytes: int) -> Tensor:
        try:
            return self._spare[nbytes].pop()
        except IndexError:
            return self._new(nbytes)

    def give_back(self, segments: Sequence[Tensor]) -> None:
        """Give segments back for later use; nobody may look at them any more."""
        for segment in segments:
            self._spare[len(segment)].append(segment)

    def abandon(self, segments: Sequence[Tensor]) -> None:
        """Drop segments whose group has broken: bytes may still arrive there, so they are not used again."""

    def _new(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class Outgoing:
    """The sender's end of a group. buffers: memory to put small tensors together in."""

    def __init__(self, group: Group, buffers: BufferPool) -> None:
        self.group, self._buffers = group, buffers
        self._before: list[Described] = []
        """The parts of the last version."""

    def send(self, export: Export, bucket_bytes: int, progress: Progress) -> tuple[Contents, GroupError | None]:
        """Export a version into the group. Returns its contents, and the error if the group broke."""
        contents: Contents = {}
        sent: list[Described] = []
        broken: list[GroupError] = []
        turns = _Turns()

        def work(number: int, part: Named) -> None:
            try:
                entries, segments, used = self._packed(part)
                about = [(name, e.dtype, e.shape) for name, e in entries.items()]
                turns.wait_for(number)
                contents.update(entries)
                if len(sent) == number and not broken:
                    try:
                        self._send_part(number, about, segments)
                        sent.append(about)
                    except GroupError as error:
                        broken.append(error)
                self._buffers.give_back(used)
            finally:
                turns.pass_on(number)

        # less than the bucket, for what is put together is held besides
        in_threads(export(), work, min(bucket_bytes * 3 // 4, 4 * PART_BYTES), progress, threads=2)
        try:
            if not broken:
                self._end(len(sent))
        except GroupError as error:
            broken.append(error)
        self._before = sent
        return contents, broken[0] if broken else None

    def dismiss(self) -> None:
        """Tell the members that this group sends no more, and close it."""
        with contextlib.suppress(GroupError):  # then they know
            self.group.tell(torch.tensor([OVER]))
        self.group.close()

    def _packed(self, part: Named) -> tuple[Contents, list[Tensor], list[Tensor]]:
        """Prepare a part: returns its contents, its bytes in segments, and those of the segments that are our buffers'."""
        entries: Contents = {}
        segments, used = [], []
        for run in buckets(part, SEGMENT_BYTES):
            flat = None if len(run) == 1 else self._buffers.allocate(sum(_padded(tensor.nbytes) for _, tensor in run))
            begin = 0
            for name, tensor in run:
                on_cpu = tensor.cpu()  # once, where it comes from a GPU
                entries[name], piece = entry(on_cpu), as_bytes(on_cpu)
                if flat is None:
                    segments.append(torch.from_numpy(piece))
                else:  # while it is in the processor's cache
                    flat.numpy()[begin : begin + len(piece)] = piece
                    begin += _padded(len(piece))
            if flat is not None:
                segments.append(flat)
                used.append(flat)
        return entries, segments, used

    def _send_part(self, number: int, about: Described, segments: list[Tensor]) -> None:
        if self._before:
            if number >= len(self._before) or self._before[number] != about:
                raise GroupError("its tensors are not those of the version before")
            if number == 0:
                self.group.tell(torch.tensor([AGAIN]))
        else:
            text = json.dumps(about).encode()
            self.group.tell(torch.tensor([len(text)]))
            self.group.tell(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self.group.broadcast(segments)

    def _end(self, parts: int) -> None:
        if not self._before:
            self.group.tell(torch.tensor([END]))
        elif parts != len(self._before):
            raise GroupError("it has fewer tensors than the version before")


class _Turns:
    """Makes threads continue in the order of their numbers."""

    def __init__(self) -> None:
        self._next, self._moved = 0, threading.Condition()

    def wait_for(self, number: int) -> None:
        with self._moved:
            self._moved.wait_for(lambda: self._next == number)

    def pass_on(self, number: int) -> None:
        """Wait for the turn of `number`, then let the next one continue."""
        self.wait_for(number)
        with self._moved:
            self._next += 1
            self._moved.notify_all()


@dataclass(slots=True)
class Received:
    """A version that came by broadcast."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    contents: Contents = field(default_factory=dict)
    segments: list[Tensor] = field(default_factory=list)
    """The memory of `tensors`."""


class Incoming:
    """A receiver's end of a group. buffers: memory to receive into."""

    def __init__(self, group: Group, buffers: BufferPool) -> None:
        self.group, self._buffers = group, buffers
        self._before: list[Described] = []
        """The parts of the last version."""

    def receive(self, begun: Callable[[], None]) -> Received | None:
        """Receive the next version; None when the group is given up. begun: called when it comes. Raises GroupError."""
        received = Received()
        try:
            return self._receive(received, begun)
        except BaseException:
            self._buffers.abandon(received.segments)
            raise

    def _receive(self, received: Received, begun: Callable[[], None]) -> Received | None:
        parts: list[Described] = []
        size = torch.empty(1, dtype=torch.int64)
        self.group.tell(size, IDLE_S)
        if int(size) == OVER:
            return None
        begun()
        if int(size) == AGAIN:
            self._receive_parts(self._before, received)
            return received
        while int(size) != END:
            told = torch.empty(int(size), dtype=torch.uint8)
            self.group.tell(told)
            parts.append([(name, dtype, tuple(shape)) for name, dtype, shape in json.loads(bytes(told.numpy()))])
            self._receive_parts(parts[-1:], received)
            self.group.tell(size)
        self._before = parts
        return received

    def _receive_parts(self, parts: list[Described], received: Received) -> None:
        runs: list[list[tuple[str, torch.dtype, tuple[int, ...], int]]] = []
        for part in parts:
            about = [
                (name, dtype := DTYPES[called], shape, math.prod(shape) * dtype.itemsize)
                for name, called, shape in part
            ]
            runs += split(about, lambda tensor: tensor[-1], SEGMENT_BYTES)
        sizes = [run[0][-1] if len(run) == 1 else sum(_padded(size) for *_, size in run) for run in runs]
        segments = [self._buffers.allocate(size) for size in sizes]
        received.segments += segments

        def take(place: int) -> None:
            begin = 0
            for name, dtype, shape, size in runs[place]:
                tensor = segments[place][begin : begin + size].view(dtype).reshape(shape)
                received.tensors[name], received.contents[name] = tensor, entry(tensor)
                begin += _padded(size)

        self.group.broadcast(segments, arrived=take)


def pieces(tensor: Tensor, nbytes: int) -> list[Tensor]:
    """Cut a tensor's bytes into pieces of at most `nbytes`; none of an empty one. All sides of a group cut alike."""
    data = tensor.view(torch.uint8)
    return [data[begin : begin + nbytes] for begin in range(0, len(data), nbytes)]


def _padded(size: int) -> int:
    """Round a size up so that the next piece of the segment begins where any type may."""
    return -(-size // ALIGNMENT) * ALIGNMENT
