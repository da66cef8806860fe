"""Actors: the processes of a run as threads of this one, of which one runs at a time, call by call.

    driver ──advance(calls, fault)──► actor's thread ──os.link(…)──► reach: handed over? killed? ──► the host's client ──► a real directory
       ◄──────────── stands before its next call ────────────┘                 └──► fails before, after (a lost reply), twice, half

A killed actor's objects are gone: from then on each of its calls raises Killed and does nothing, `finally` included. Which
actor runs, and what goes wrong, is the driver's choice alone, so a schedule can be played again.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

from relax_hpc.supervise import lease
from tools.faults.model.client import Client, Server, real

MUTATIONS = ("mkdir", "rename", "link", "unlink", "rmdir", "utime", "replace")
READS = ("stat", "lstat", "listdir", "scandir")
How = Literal["before", "lost", "again", "half", "killed", "killed after"]
FAULTS: tuple[How, ...] = ("before", "lost", "again", "half", "killed", "killed after")
ERRNOS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
_current = threading.local()
_HANDLE = re.compile(r"(.*?)(?: \(deleted\))?$")


class Killed(BaseException):
    """Raised by every call of an actor that was killed."""


class Violation(AssertionError):
    """A promise of the protocol that was broken."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call to the file system that an actor is about to make, or a sleep."""

    op: str
    path: str
    to: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """A call's mishap: "lost" is done and answered with an error, "again" is done twice and answered with the second answer."""

    how: How
    error: int = errno.EIO


class Actor:
    """A process: a program that runs on a thread of its own, and stands before a call whenever it does not run."""

    def __init__(
        self, server: Server, name: str, role: str, client: Client, program: Callable[[Actor], object]
    ) -> None:
        self.server, self.name, self.role, self.client, self._program = server, name, role, client, program
        self.pending: Call | None = None
        self.faults: list[Fault] = []
        """What went wrong for it."""
        self.wakes_at, self.calls = float("-inf"), 0
        self.dead = self.ended = self.within = False
        """dead: killed; ended: its thread is over; within: it makes a call for the machinery, not for the program."""
        self.result: object = None
        self.error: BaseException | None = None
        self._budget = 0
        self._fault: Fault | None = None
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire(), self._back.acquire()
        self._thread: threading.Thread | None = None
        self._own_globals: tuple[Any, Any] = ({}, set())
        """The module variables that are this process's own: what it knows of leases."""

    @property
    def alive(self) -> bool:
        return not (self.dead or self.ended)

    def advance(self, calls: int = 1, fault: Fault | None = None) -> None:
        """Let the actor make up to `calls` calls, fewer if it goes to sleep or ends. The last one meets the fault. Wakes a
        sleeper: time goes on until then."""
        if self.ended:
            return
        self.server.now_s = max(self.server.now_s, self.wakes_at)
        self.wakes_at = float("-inf")
        self._budget, self._fault = calls, fault
        before, (lease._renewals, lease._given_up) = (lease._renewals, lease._given_up), self._own_globals
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        self._own_globals, (lease._renewals, lease._given_up) = (lease._renewals, lease._given_up), before
        if self.ended:
            self._thread.join()

    def kill(self) -> None:
        """Kill the actor where it stands: its next call is never made."""
        self.dead = True
        if self._thread is None:
            self.ended = True
        else:
            self.advance()

    def _run(self) -> None:
        _current.actor = self
        try:
            self.result = self._program(self)
        except Killed:
            self.dead = True
        except BaseException as error:  # the driver judges it
            self.error = error
        self.ended, self.pending = True, None
        self._back.release()

    def _hand_over(self) -> None:
        self._back.release()
        self._go.acquire()
        if self.dead:
            raise Killed

    def reach(self, call: Call) -> Fault | None:
        """Stand before a call until the driver lets it happen; returns what is to become of it."""
        if self.dead:
            raise Killed
        self.pending = call
        while self._budget == 0:
            self._hand_over()
        self._budget, self.calls = self._budget - 1, self.calls + 1
        fault = self._fault if self._budget == 0 else None
        if fault is not None and fault.how == "killed":
            self.die()
        return fault

    def die(self) -> None:
        self.dead = True
        raise Killed

    def sleep(self, seconds: float) -> None:
        if self.dead:
            raise Killed
        self.pending, self.wakes_at, self._budget = Call("sleep", ""), self.server.now_s + max(seconds, 0.0), 0
        self._hand_over()

    def call(self, op: str, path: str, to: str, work: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        """Make a call, or what the driver makes of it."""
        fault = self.reach(Call(op, path, to))
        how = fault.how if fault else None
        reads = op in READS or op == "read"
        if fault and (how == "before" or (reads and how in ("lost", "again", "half"))):
            raise OSError(fault.error, os.strerror(fault.error), path)
        if how == "half" and half is not None:
            half()
            self.die()
        result = self._done(op, path, to, work)
        if how == "killed after":
            self.die()
        if fault and how == "lost":
            if op == "open":
                real["close"](result)
            raise OSError(fault.error, os.strerror(fault.error), path)
        return work() if how == "again" and op in MUTATIONS else result

    def _done(self, op: str, path: str, to: str, work: Callable[[], Any]) -> Any:
        """Make the call, and let server, client and observer see it."""
        self.within = True
        try:
            if op in READS or op == "read":
                result = work()
                self.server.observe(self, Call(op, path))
                return result
            self.client.touches(path, to)
            result = work()
            self.server.changed(op, path, to, result)
            self.server.observe(self, Call(op, path, to))
        except Violation as violation:
            self.server.violation = self.server.violation or violation
            self.die()
        finally:
            self.within = False
        return result


def current() -> Actor | None:
    """Return the actor on whose thread we are, unless it works for the machinery."""
    actor: Actor | None = getattr(_current, "actor", None)
    return None if actor is None or actor.within else actor


def _text(path: Any, folder: int | None = None) -> str:
    """Return the path of a call's argument; empty for a handle."""
    if isinstance(path, int):
        return ""
    text = os.fsdecode(path)
    return os.path.join(real["readlink"](f"/proc/self/fd/{folder}"), text) if folder is not None else text


def _wrap_change(op: str) -> Callable[..., Any]:
    """Wrap a call that changes names."""

    def wrapped(path: Any, *arguments: Any, **options: Any) -> Any:
        actor, text = current(), _text(path, options.get("dir_fd"))
        if actor is None or not actor.server.has(text):
            return real[op](path, *arguments, **options)
        to = _text(arguments[0]) if op in ("rename", "link", "replace") else ""
        where = path if "dir_fd" in options and options["dir_fd"] is not None else actor.client.where(text)
        rest = (actor.client.where(to), *arguments[1:]) if to else arguments
        return actor.call("rename" if op == "replace" else op, text, to, lambda: real[op](where, *rest, **options))

    return wrapped


def _wrap_read(op: str) -> Callable[..., Any]:
    """Wrap a call that reads names or attributes, of which the client may have old ones."""

    def wrapped(path: Any = ".", *arguments: Any, **options: Any) -> Any:
        actor, text = current(), _text(path)
        if actor is None or not actor.server.has(text) or options.get("dir_fd") is not None:
            return real[op](path, *arguments, **options)
        return actor.call(op, text, "", lambda: getattr(actor.client, op)(text))

    return wrapped


def _open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    actor, text = current(), _text(path, dir_fd)
    if actor is None or not actor.server.has(text) or dir_fd is not None:
        return int(real["open"](path, flags, mode, dir_fd=dir_fd))
    if flags & os.O_CREAT:
        return int(actor.call("open", text, "", lambda: real["open"](actor.client.where(text), flags, mode)))
    return int(actor.call("read", text, "", lambda: real["open"](actor.client.opened(text), flags, mode)))


def _io_open(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
    actor, text = current(), _text(path)
    if actor is None or not actor.server.has(text) or options.get("opener"):
        return real["io.open"](path, mode, *arguments, **options)
    assert not set(mode) & set("wax+"), f"nothing of a run is written by open: {text}"
    return actor.call("read", text, "", lambda: real["io.open"](actor.client.opened(text), mode, *arguments, **options))


def _writev(handle: int, pieces: Any) -> int:
    actor = current()
    path = actor and _HANDLE.match(real["readlink"](f"/proc/self/fd/{handle}"))
    if actor is None or not path or not actor.server.has(path[1]):
        return int(real["writev"](handle, pieces))
    half = lambda: real["write"](handle, b"".join(pieces)[: sum(map(len, pieces)) // 2])
    return int(actor.call("write", path[1], "", lambda: real["writev"](handle, pieces), half))


def _fsync(handle: int) -> None:
    actor = current()
    if actor is not None:
        actor.server.synced(handle)


def _fstat(handle: int) -> os.stat_result:
    found: os.stat_result = real["fstat"](handle)
    actor = current()
    return found if actor is None else actor.server.dated(found)


def _clock(name: str, read: Callable[[Actor], float]) -> Callable[[], float]:
    def wrapped() -> float:
        actor = current()
        return float(real[name]()) if actor is None else read(actor)

    return wrapped


def _sleep(seconds: float) -> None:
    actor = current()
    if actor is None:
        real["sleep"](seconds)
    else:
        actor.sleep(seconds)


def _uname() -> Any:
    """Each supervisor seems to have a host of its own: whether another one lives is seen by its lease alone."""
    actor, found = current(), real["uname"]()
    return found if actor is None else os.uname_result((found[0], actor.name, *found[2:]))


def _uuid4() -> uuid.UUID:
    actor = current()
    if actor is None:
        return uuid.UUID(bytes=real["urandom"](16))
    actor.server.names_given += 1
    return uuid.UUID(int=actor.server.names_given * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Put the layer between Python and the system, for actors only."""
    logging.disable(logging.CRITICAL)
    with contextlib.ExitStack() as patches:
        patches.callback(logging.disable, logging.NOTSET)

        def put(module: object, name: str, new: object) -> None:
            patches.enter_context(mock.patch.object(module, name, new))

        for op in MUTATIONS:
            put(os, op, _wrap_change(op))
        for op in READS:
            put(os, op, _wrap_read(op))
        for name, new in {"open": _open, "writev": _writev, "fsync": _fsync, "fstat": _fstat, "uname": _uname}.items():
            put(os, name, new)
        put(io, "open", _io_open)
        put(uuid, "uuid4", _uuid4)
        put(time, "sleep", _sleep)
        put(time, "monotonic", _clock("monotonic", lambda actor: actor.server.now_s))
        put(time, "time", _clock("time", lambda actor: actor.server.now_s + actor.client.clock_s))
        yield
