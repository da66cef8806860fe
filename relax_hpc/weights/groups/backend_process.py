"""A child process that moves bytes for its parent, so that MPI or NCCL in it may crash or hang: then it is killed.

    parent ──{"call": …}──► socket ──► child ──► {"value": …} or {"error": …} ──► parent
    bytes ──► slots of memory that both have mapped ──► the group ──► slots ──► bytes       or straight from and into shared buffers

The other side of this is Backend in mpi_process.py.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from relax_hpc.files.errors import RunError
from relax_hpc.files.tensor_files import as_bytes
from relax_hpc.weights.groups.mpi_process import MESSAGE_BYTES, SLOT_BYTES, SLOTS
from relax_hpc.weights.groups.protocol import IDLE_S, Arrived, GroupError, pieces
from relax_hpc.weights.groups.shared_buffers import Arena, SharedBufferPool

LOOK_S = 0.5
"""Seconds between two checks whether another group was called, while nothing comes."""
START_S = 60.0


class BackendProcess:
    """The child as its parent sees it. Methods raise GroupError where the child does not do what it is asked to."""

    def __init__(self, speaks: str, program: Path, *arguments: str, start_s: float = START_S) -> None:
        """`speaks`: MPI or NCCL, for messages. Raises RunError when the program finds no library to speak it with."""
        self._speaks = speaks
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = os.memfd_create(f"relax_hpc-{speaks}")
        os.ftruncate(memory, SLOTS * SLOT_BYTES)
        mapped = mmap.mmap(memory, SLOTS * SLOT_BYTES)
        self._shared: dict[Arena, int] = {}
        """Memory besides the slots that the child has mapped -> its number there."""
        self.slots = [np.frombuffer(mapped, np.uint8, SLOT_BYTES, i * SLOT_BYTES) for i in range(SLOTS)]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(program), str(theirs.fileno()), str(memory), str(os.getpid()), *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), memory),
            )
        os.close(memory)
        try:
            self.hear(start_s)
        except GroupError as error:
            self.kill()
            raise RunError(str(error)) from error

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """Kill the child, with all that it holds and all that waits in it for dead processes."""
        self.process.kill()
        self.process.wait()
        self._channel.close()

    def call(self, what: str, limit_s: float, given_up: Callable[[], bool] = lambda: False, **arguments: Any) -> Any:
        self.say(what, **arguments)
        return self.hear(limit_s, given_up)

    def say(self, what: str, descriptors: Sequence[int] = (), **arguments: Any) -> None:
        with contextlib.suppress(OSError):  # it died: that is heard
            socket.send_fds(self._channel, [json.dumps({"call": what, **arguments}).encode()], descriptors)

    def hear(self, limit_s: float, given_up: Callable[[], bool] = lambda: False) -> Any:
        """Wait for the next answer. A child that gives none in time, or before `given_up` returns True, is killed."""
        began = time.monotonic()
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while not poll.poll(1000 * min(LOOK_S, limit_s)):
            waited_s = time.monotonic() - began
            try:
                over = waited_s > limit_s or given_up()
            except BaseException:
                self.kill()  # a late answer would be taken for that to another call
                raise
            if over:
                self.kill()
                raise GroupError(f"{self._speaks} did not end what it was asked to within {waited_s:.1f} s")
        try:
            data = self._channel.recv(MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            self.process.wait()
            self.kill()
            code = self.process.returncode
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise GroupError(f"the process that speaks {self._speaks} was ended by {how}")
        said = json.loads(data)
        if "error" in said:
            raise GroupError(said["error"])
        return said["value"]

    def move(
        self,
        tensors: Sequence[Tensor],
        sends: bool,
        limit_s: float,
        given_up: Callable[[], bool] = lambda: False,
        arrived: Arrived = lambda _: None,
        buffers: SharedBufferPool | None = None,
    ) -> None:
        """Send the tensors' bytes to the group, or receive into them, as Group.broadcast does; `limit_s` holds for each
        slot. Where that fails, the child is killed. buffers: bytes that lie in this pool do not pass through the slots.
        """
        todo = [(place, as_bytes(p)) for place, tensor in enumerate(tensors) for p in pieces(tensor, SLOT_BYTES)]
        under_way: deque[tuple[int, bool]] = deque()
        """(index in `todo`, True if it passes through a slot) of each move."""

        def end_one() -> None:
            self.hear(limit_s, given_up)
            number, by_slot = under_way.popleft()
            place, piece = todo[number]
            if by_slot and not sends:
                piece[:] = self.slots[number % SLOTS][: len(piece)]
            if number + 1 == len(todo) or todo[number + 1][0] != place:
                arrived(place)

        try:
            for place, tensor in enumerate(tensors):
                if not tensor.nbytes:
                    arrived(place)
            if buffers is not None:
                self._share(buffers.arenas, given_up)
            for number, (_, piece) in enumerate(todo):
                if len(under_way) == SLOTS:
                    end_one()
                where = self._where(piece, buffers)
                by_slot = where is None
                if where is None:
                    where = {"begin": number % SLOTS * SLOT_BYTES}
                    if sends:
                        self.slots[number % SLOTS][: len(piece)] = piece
                self.say("move", **where, size=len(piece), sends=sends, idle=limit_s == IDLE_S)
                under_way.append((number, by_slot))
            while under_way:
                end_one()
        except BaseException:
            self.kill()  # it may hold requests that never end
            raise

    def _share(self, arenas: Sequence[Arena], given_up: Callable[[], bool]) -> None:
        """Have the child map these arenas too."""
        for arena in arenas:
            if arena not in self._shared:
                self.say("share", [arena.descriptor])
                self._shared[arena] = self.hear(START_S, given_up)

    def _where(self, piece: NDArray[np.uint8], buffers: SharedBufferPool | None) -> dict[str, Any] | None:
        """Find bytes in memory that the child has mapped besides the slots; returns arguments of its `move`, or None."""
        found = buffers.find(piece) if buffers is not None else None
        if found is None or found[0] not in self._shared:
            return None
        return {"begin": found[1], "memory": self._shared[found[0]]}
