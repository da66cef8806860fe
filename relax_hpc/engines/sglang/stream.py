"""SGLang's stream: a request in flight for each ask, which the server batches as they come and go.

    asks ──a thread each──► server ──► answers, as they end ──advance──► Completions

A server that is lost takes all that is under way with it.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import numpy as np

from relax_hpc.engines.base import Ask, Completion, EngineError
from relax_hpc.engines.model_folder import check_new, room_of
from relax_hpc.engines.sglang.client import Client
from relax_hpc.engines.sglang.media_files import MediaFiles
from relax_hpc.engines.sglang.outside.checks import check_lengths
from relax_hpc.engines.sglang.requests import Requests, seed_of
from relax_hpc.records import Progress

SILENCE_S = 30.0
"""Seconds without an answer after which the server is asked whether it still makes tokens."""
ABORT_S = 5.0
"""Seconds that the server has to end its requests."""
ABORT_EVERY_S = 0.2


class Served(Protocol):
    """The engine, as far as its stream knows it."""

    context: int
    version: int

    @property
    def client(self) -> Client: ...

    def lost(self) -> bool: ...

    def failed(self, error: EngineError, progress: Progress) -> EngineError: ...


class Pulse:
    """Notices a server that makes no tokens any more."""

    def __init__(self, client: Client, threads: ThreadPoolExecutor) -> None:
        self._client, self._threads = client, threads
        self._asked: Future[None] | None = None
        self._heard = time.monotonic()

    def listen(self, heard: bool) -> None:
        """Ask the server for a token after a long silence. heard: it has answered just now. Raises EngineError if it
        makes none."""
        if self._asked is not None and self._asked.done():
            self._asked.result()
            self._asked, self._heard = None, time.monotonic()
        elif heard:
            self._heard = time.monotonic()
        elif self._asked is None and time.monotonic() - self._heard > SILENCE_S:
            self._asked = self._threads.submit(self._client.pulse)


def end_all(client: Client, requests: Iterable[Future[Any]]) -> None:
    """End all requests on the server. It is told repeatedly, as long as requests on their way to it still arrive. Raises
    EngineError where it does not end them in time."""
    waiting = {future for future in requests if not future.cancel()}
    until = time.monotonic() + ABORT_S
    with contextlib.suppress(EngineError):
        while waiting and time.monotonic() < until:
            client.abort()
            _, waiting = wait(waiting, ABORT_EVERY_S)
    if any(not future.done() for future in waiting):
        raise EngineError(f"SGLang at {client.address} did not end its requests in {ABORT_S:.0f} s")


def _tell(ended: queue.SimpleQueue[int], key: int, future: Future[Any]) -> None:
    ended.put(key)


class SglangStream:
    """See relax_hpc.engines.base.Stream."""

    def __init__(self, engine: Served, requests: Requests, most: int, progress: Progress) -> None:
        """most: requests that are in flight at once."""
        self._engine, self._requests, self._progress = engine, requests, progress
        self._client = engine.client
        self._threads = ThreadPoolExecutor(most + 1, "sglang-stream")
        self._pulse = Pulse(self._client, self._threads)
        self._files = MediaFiles()
        self._going: dict[int, tuple[Ask, Future[Any]]] = {}
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        """Keys of asks that the server has answered."""
        self._lock = threading.Lock()
        """Held while asks come and go."""

    @property
    def busy(self) -> bool:
        return bool(self._going)

    def ask(self, asks: Sequence[Ask]) -> None:
        rooms = [room_of(ask, self._engine.context) for ask in asks]
        if self._engine.version < 0:
            raise EngineError("no version was loaded yet: there is nothing to generate with")
        with self._lock:
            check_new(asks, self._going)
            names = [(self._requests.pictures or self._files).name(ask.media) if ask.media else [] for ask in asks]
            if not self._going:
                self._pulse.listen(True)
            for ask, room, name in zip(asks, rooms, names, strict=True):
                context = np.concatenate([ask.context, ask.begun])
                body = self._requests.body(context, [seed_of(ask.seed, 0)], ask.sampling, room, name)
                future = self._threads.submit(self._client.generate, body, self._engine.lost)
                self._going[ask.key] = ask, future
                future.add_done_callback(functools.partial(_tell, self._ended, ask.key))

    def advance(self, wait_s: float) -> list[tuple[int, Completion]]:
        if not self._going:
            return []
        keys: list[int] = []
        with contextlib.suppress(queue.Empty):
            keys.append(self._ended.get(timeout=wait_s))
            while True:
                keys.append(self._ended.get_nowait())
        try:
            self._pulse.listen(bool(keys))
            return [self._completion(key, False) for key in keys]
        except EngineError as error:
            self._forget()
            raise self._engine.failed(error, self._progress) from error

    def abort(self) -> list[tuple[int, Completion]]:
        with self._lock:
            going = dict(self._going)
        try:
            end_all(self._client, [future for _, future in going.values()])
            done = [self._completion(key, True) for key in going]
        except EngineError as error:
            self._forget()
            raise self._engine.failed(error, self._progress) from error
        self._ended = queue.SimpleQueue()
        return done

    def close(self) -> None:
        """End everything under way; nobody asks for it any more."""
        with contextlib.suppress(EngineError):
            end_all(self._client, [future for _, future in self._going.values()])
        self._forget()

    def _forget(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)  # a server that hangs would never let them end
        self._going.clear()
        self._files.close()

    def _completion(self, key: int, abort: bool) -> tuple[int, Completion]:
        """Return (key, completion) of an ask that has ended."""
        ask, future = self._going[key]
        answer = None if future.cancelled() else future.result()[0]
        if self._requests.pictures:
            check_lengths(self._client, [answer], [np.concatenate([ask.context, ask.begun])], 1)
        done = self._requests.completion(answer, abort, ask.begun, ask.sampling.stop)
        with self._lock:
            del self._going[key]
            if ask.media and not self._requests.pictures and ask.media.digest not in self._shown():
                self._files.drop(ask.media)
        return key, done

    def _shown(self) -> set[str]:
        """Return the digests of all media that are under way."""
        return {ask.media.digest for ask, _ in self._going.values() if ask.media}
