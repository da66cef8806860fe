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
from dataclasses import dataclass
from typing import Any

from relax_hpc.environments.base import Turn
from relax_hpc.registry import WrongValue, finite_number, finite_numbers, shown

Wrong = tuple[str, str]
"""The error as (in general, in this case). It is text, because an exception of the user's own may not unpickle."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A process's reply to a call."""

    seat: int | None
    """Number of the environment's seat; None: the process is ready, or says what cannot be read."""
    outcome: tuple[Turn, ...] | Wrong = ()
    """A turn for each answer, or the error."""
    state: Any = None
    """The environment's state after them, where it has one."""

    @property
    def wrong(self) -> Wrong | None:
        """The error, if it is one."""
        return (self.outcome[0], str(self.outcome[1])) if self.outcome and isinstance(self.outcome[0], str) else None

    @property
    def turns(self) -> list[Turn]:
        return [turn for turn in self.outcome if isinstance(turn, Turn)]


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


def to_worker(reply: Reply) -> bytes:
    """Write down a reply."""
    turns = [[t.done, t.observation, t.reward, t.extra, t.answer] for t in reply.turns]
    said = [reply.seat, reply.wrong or turns, reply.state]
    return json.dumps(said, default=lambda value: {_BYTES: base64.b64encode(value).decode()}).encode()


def from_child(message: bytes) -> Reply:
    """Read what a child sent, whatever it is."""
    try:
        seat, said, state = json.loads(message, object_hook=lambda d: base64.b64decode(d[_BYTES]) if _BYTES in d else d)
        if seat is not None and type(seat) is not int:
            raise TypeError(f"{seat!r} is no seat")
        if said and isinstance(said[0], str):
            return Reply(seat, (said[0], str(said[1])))
        return Reply(seat, tuple(checked(Turn(*turn)) for turn in said), state)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        return Reply(None, ("answered in another form than a turn", f"{type(error).__name__}: {error}"[:1000]))


def checked(turn: object) -> Turn:
    """Copy what `step` returned as plain values. Raises WrongValue unless it is a Turn with allowed ones."""
    if not isinstance(turn, Turn):
        raise WrongValue(f"returned {shown(turn)}, expected a relax_hpc.environments.Turn")
    if not isinstance(turn.done, bool):
        raise WrongValue(f"returned {shown(turn.done)} as Turn.done, expected True or False")
    observation = plain(
        "Turn.observation", turn.observation, "text, or parts made of text, bytes, numbers, lists and dicts"
    )
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


def plain(name: str, value: object, expected: str) -> Any:
    """Copy what a user's code returned as `name`. Raises WrongValue for others than plain values, which may mean something
    else in another process, and for None."""
    if value is None or not _is_plain(value):
        raise WrongValue(f"returned {shown(value)} as {name}, expected {expected}")
    return _copied(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(one) for pair in value.items() for one in pair)
    if isinstance(value, str):
        return value == value.encode(errors="replace").decode()
    return isinstance(value, bytes | int | float | None)


def _copied(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_copied(item) for item in value]
    if isinstance(value, dict):
        return {_copied(key): _copied(item) for key, item in value.items()}
    return str(value) if isinstance(value, str) else value
