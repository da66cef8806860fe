"""The channel between a worker and a process of environments, which may be in a sandbox and is not trusted.

worker ──pickle──► child; child ──JSON──► worker: nothing that the child sends can run code here, or make the worker wait.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import socket
import struct
from typing import Any

from relax_hpc.environments.base import Turn
from relax_hpc.registry import WrongValue, finite_number, finite_numbers, shown

Wrong = tuple[str, str]
"""The error as (in general, in this case). It is text, because an exception of the user's own may not unpickle."""
LARGEST_BYTES = 1 << 30
"""The largest reply; a larger one counts as the end of the process."""
_HEAD = struct.Struct("<Q")
_READ_BYTES = 1 << 20
_BYTES = "__bytes__"


class Channel:
    """One end of a socket that carries whole messages."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._got = end, bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()

    def send(self, message: bytes, within_s: float | None = None) -> None:
        """Send a message. Raises TimeoutError when it is not taken within `within_s`."""
        self._end.settimeout(within_s)
        self._end.sendall(_HEAD.pack(len(message)) + message)

    def poll(self) -> bytes | None:
        """Return a message where a whole one has come; never waits. Raises EOFError at the end."""
        self._end.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while not self._whole():
                self._more()
        return self._take() if self._whole() else None

    def receive(self) -> bytes:
        """Wait for a message. Raises EOFError at the end."""
        self._end.settimeout(None)
        while not self._whole():
            self._more()
        return self._take()

    def _more(self) -> None:
        got = self._end.recv(_READ_BYTES)
        if not got:
            raise EOFError
        self._got += got

    def _length(self) -> int:
        length: int = _HEAD.unpack_from(self._got)[0]
        if length > LARGEST_BYTES:
            raise EOFError
        return length

    def _whole(self) -> bool:
        return len(self._got) >= _HEAD.size and len(self._got) >= _HEAD.size + self._length()

    def _take(self) -> bytes:
        ends = _HEAD.size + self._length()
        message = bytes(self._got[_HEAD.size : ends])
        del self._got[:ends]
        return message


def to_child(value: object) -> bytes:
    """Write down what a child is to do."""
    return pickle.dumps(value)


def to_worker(answer: tuple[Turn, ...] | Wrong | None) -> bytes:
    """Write down turns, an error, or None for "ready"."""
    if answer and isinstance(answer[0], str):
        return json.dumps(answer).encode()
    turns = answer if answer is None else [[t.done, t.observation, t.reward, t.extra, t.answer] for t in answer]
    return json.dumps(turns, default=lambda value: {_BYTES: base64.b64encode(value).decode()}).encode()


def from_child(message: bytes) -> tuple[Turn, ...] | Wrong | None:
    """Read what a child sent, whatever it is."""
    try:
        said = json.loads(message, object_hook=lambda d: base64.b64decode(d[_BYTES]) if _BYTES in d else d)
        if said is None:
            return None
        if said and isinstance(said[0], str):
            return said[0], str(said[1])
        return tuple(checked(Turn(*turn)) for turn in said)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        return "answered in another form than a turn", f"{type(error).__name__}: {error}"[:1000]


def checked(turn: object) -> Turn:
    """Copy what `step` returned as plain values. Raises WrongValue unless it is a Turn with allowed ones."""
    if not isinstance(turn, Turn):
        raise WrongValue(f"returned {shown(turn)}, expected a relax_hpc.environments.Turn")
    if not isinstance(turn.done, bool):
        raise WrongValue(f"returned {shown(turn.done)} as Turn.done, expected True or False")
    observation = _plain(turn.observation)
    if not (isinstance(observation, str) or _alike(observation, "type") or _alike(observation, "role", "content")):
        raise WrongValue(
            f"returned {shown(turn.observation)} as Turn.observation, expected text, a list of chat messages with role and content, or a list "
            "of content parts with a type"
        )
    if not isinstance(turn.extra, dict):
        raise WrongValue(f"returned {shown(turn.extra)} as Turn.extra, expected a dict of numbers")
    reward = None if turn.reward is None else finite_number("Turn.reward", turn.reward)
    if turn.answer is not None and not isinstance(turn.answer, str):
        raise WrongValue(f"returned {shown(turn.answer)} as Turn.answer, expected text or None")
    return Turn(turn.done, observation, reward, finite_numbers(turn.extra), turn.answer)


def _alike(items: Any, *keys: str) -> bool:
    return bool(items) and all(isinstance(item, dict) and all(key in item for key in keys) for item in items)


def _plain(value: object) -> Any:
    """Copy text, or parts of plain values. Raises WrongValue for others, which may mean something else in another process."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, str) and value == value.encode(errors="replace").decode():
        return str(value)
    if isinstance(value, bytes | int | float | None):
        return value
    raise WrongValue(
        f"returned {shown(value)} as Turn.observation, expected text, or parts made of text, bytes, numbers, lists and dicts"
    )
