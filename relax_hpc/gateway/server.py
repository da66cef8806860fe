"""The gateway: a web server in a thread of the rollout worker, between agents' requests and the engine's stream.

agents ──HTTP──► server's thread ──asks()──► the worker's loop ──► Stream
       ◄─────── reply ◄──────────answer()───┘
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import os
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Coroutine
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np
import uvicorn
from numpy.typing import NDArray

from relax_hpc.engines import Ask, Completion, Sampling
from relax_hpc.gateway.app import make_app
from relax_hpc.gateway.rendering import Renderer
from relax_hpc.gateway.sessions import Desk, Session, ended

T = TypeVar("T")
START_S = 30.0
REMEMBERED = 4096
"""Keys of sessions that have ended, which are told so."""


class Gateway:
    """Serves sessions on loopback and on a Unix socket that only this user can open."""

    def __init__(self, tokenizer: Any, context: int) -> None:
        """context: the most tokens of a sequence."""
        self._sessions: dict[str, Session] = {}
        self._past: deque[str] = deque(maxlen=REMEMBERED)
        self._asks = SimpleQueue[Ask]()
        self._waiting: dict[int, tuple[Session, asyncio.Future[Completion]]] = {}
        self._numbers, self._news = itertools.count(), threading.Event()
        desk = Desk(Renderer(copy.deepcopy(tokenizer)), context, self._generate)
        self._folder = tempfile.TemporaryDirectory(prefix="relax-hpc-gateway-")  # of mode 0700
        self.socket = Path(self._folder.name) / "socket"
        """Path of the Unix socket."""
        loopback, local = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
        local.bind(str(self.socket))
        os.chmod(self.socket, 0o600)
        self.url = f"http://127.0.0.1:{loopback.getsockname()[1]}"
        """Where agents reach it, without /v1."""
        config = uvicorn.Config(
            make_app(desk, self._sessions.get), log_config=None, access_log=False, lifespan="off", ws="none", backlog=1024,
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=([loopback, local],), name="gateway", daemon=True)
        self._thread.start()

    def _serve(self, sockets: list[socket.socket]) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._server.serve(sockets))

    def begin(self, seed: int, sampling: Sampling) -> Session:
        """Open a session. seed: what is drawn in it depends on nothing else."""
        session = Session.begin(seed, sampling)
        self._sessions[session.key] = session
        return session

    def end(self, session: Session) -> None:
        """End a session: its requests, open and later ones, are refused. Its tree does not change any more."""
        if not session.ended:
            self._in_server(self._end(session))

    async def _end(self, session: Session) -> None:
        session.ended = True
        for key in [key for key, (own, _) in self._waiting.items() if own is session]:
            self._settle(key, ended())
        if len(self._past) == self._past.maxlen:
            self._sessions.pop(self._past[0], None)
        self._past.append(session.key)

    def asks(self) -> list[Ask]:
        """Return what agents asked for since the last call."""
        self._news.clear()
        found = list[Ask]()
        with contextlib.suppress(Empty):
            while True:
                found.append(self._asks.get_nowait())
        return [ask for ask in found if ask.key in self._waiting]

    def wait(self, seconds: float) -> None:
        """Wait until an agent asks for something."""
        self._news.wait(seconds)

    def answer(self, key: int, completion: Completion) -> None:
        """Give the agent what it asked for; it may be gone by now."""
        self._loop.call_soon_threadsafe(self._settle, key, completion)

    def close(self) -> None:
        """End the server and all sessions."""
        for session in [s for s in self._sessions.values() if not s.ended]:
            self.end(session)
        self._server.should_exit = True
        self._thread.join()
        self._loop.close()
        self._folder.cleanup()

    def _generate(
        self, session: Session, context: NDArray[np.int32], sampling: Sampling, seed: int
    ) -> asyncio.Future[Completion]:
        key, future = next(self._numbers), self._loop.create_future()
        self._waiting[key] = session, future
        future.add_done_callback(lambda _: self._waiting.pop(key, None))
        self._asks.put(Ask(key, context, sampling, seed))
        self._news.set()
        return future

    def _settle(self, key: int, outcome: Completion | Exception) -> None:
        _, future = self._waiting.get(key, (None, None))
        if future is None or future.done():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _in_server(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)
