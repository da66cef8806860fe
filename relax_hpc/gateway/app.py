"""The gateway's HTTP side: who asks (a session's key), how much (limits), and by which API.

POST /v1/chat/completions      OpenAI      ─┐
POST /v1/messages              Anthropic   ─┼─► Call ──desk──► Turn ──► reply, or events of a stream
POST /inference/v1/generate    tokens      ─┘
GET  /v1/models
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from relax_hpc.gateway.anthropic import Anthropic
from relax_hpc.gateway.openai import OpenAI, models
from relax_hpc.gateway.refusals import Refusal
from relax_hpc.gateway.sessions import Call, Desk, Prepared, Session, Turn, ended
from relax_hpc.gateway.tokens import TokenApi

MAX_BODY_BYTES = 16 << 20
PING_S = 5.0
"""Seconds between two comments in a stream whose answer is still being generated."""
HOLD_S = 0.2
"""Seconds after which a session that has ended is told so: a client that tries for ever costs nothing."""
NO_RETRY = {"x-should-retry": "false"}


class Api(Protocol):
    """What an API must say to be served."""

    def call(self, body: Mapping[str, Any]) -> Call: ...

    def reply(self, call: Call, turn: Turn, words: list[str]) -> dict[str, Any]: ...

    def events(self, call: Call, turn: Turn, words: list[str]) -> Iterator[str]: ...

    def error(self, refusal: Refusal) -> dict[str, Any]: ...

    def error_event(self, refusal: Refusal) -> str: ...


FindSession = Callable[[str], Session | None]


def make_app(desk: Desk, session_of: FindSession) -> Starlette:
    """Make the application. session_of: finds the session of a key, ended ones too."""
    openai, anthropic, tokens = OpenAI(), Anthropic(), TokenApi(len(desk.renderer.tokenizer))
    apis: dict[str, Api] = {"/v1/chat/completions": openai, "/v1/messages": anthropic, "/inference/v1/generate": tokens}
    post = [Route(path, _endpoint(api, desk, session_of), methods=["POST"]) for path, api in apis.items()]

    async def listed(request: Request) -> Response:
        try:
            await _session(request, session_of)
        except Refusal as refusal:
            return _refused(openai, refusal)
        return JSONResponse(models(desk.context))

    async def unknown(request: Request, error: Exception) -> Response:
        served = ", ".join([*apis, "/v1/models"])
        path = f"{request.method} {request.url.path}"
        return _refused(openai, Refusal(f"{path} is not served: use POST to one of {served}", 404))

    async def broken(request: Request, error: Exception) -> Response:
        return _refused(openai, Refusal(f"the gateway failed: {type(error).__name__}: {error}", 500))

    routes = [*post, Route("/v1/models", listed)]
    return Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown, 500: broken})


def _endpoint(api: Api, desk: Desk, session_of: FindSession) -> Callable[[Request], Awaitable[Response]]:
    async def serve(request: Request) -> Response:
        session = None
        try:
            session = await _session(request, session_of)
            call = api.call(await _body(request))
            ready = desk.prepare(session, call)
            if call.stream:
                return StreamingResponse(_stream(api, desk, ready), media_type="text/event-stream")
            turn = await desk.answer(ready, request.is_disconnected)
            return JSONResponse(api.reply(call, turn, _words(desk, turn)))
        except Refusal as refusal:
            if session is not None:
                desk.refuse(session, refusal)
            return _refused(api, refusal)
        except ClientDisconnect:
            return Response(status_code=400)

    return serve


def _words(desk: Desk, turn: Turn) -> list[str]:
    return [desk.renderer.tokenizer.decode([token]) for token in turn.said.tokens.tolist()]


def _refused(api: Api, refusal: Refusal) -> Response:
    return JSONResponse(api.error(refusal), refusal.status, NO_RETRY)


async def _session(request: Request, session_of: FindSession) -> Session:
    """Find the session that a request's key opens. Raises Refusal."""
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    key = bearer or request.headers.get("x-api-key", "")
    session = session_of(key) if key else None
    if session is None:
        raise Refusal(
            "no session has this key: use the $OPENAI_API_KEY (or $ANTHROPIC_API_KEY) that this agent was started with",
            401,
        )
    if session.ended:
        await asyncio.sleep(HOLD_S)
        raise ended()
    return session


async def _body(request: Request) -> Mapping[str, Any]:
    """Read a body, a JSON object; one that is too large is refused before it is read. Raises Refusal."""
    too_large = Refusal(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB: shorten the messages", 413)
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise too_large
    data = bytearray()
    async for piece in request.stream():
        data += piece
        if len(data) > MAX_BODY_BYTES:
            raise too_large
    try:
        found = json.loads(data)
    except ValueError as error:
        raise Refusal(f"the body is not JSON ({error}): send an object with 'model' and 'messages'") from error
    if not isinstance(found, dict):
        raise Refusal(f"the body is a {type(found).__name__}, expected an object with 'model' and 'messages'")
    return found


async def _stream(api: Api, desk: Desk, ready: Prepared) -> AsyncIterator[str]:
    """The reply in events, with comments until there is one. A client that leaves ends it, and its turn is not kept."""

    async def here() -> bool:
        return False

    answer = asyncio.ensure_future(desk.answer(ready, here))
    try:
        while not (await asyncio.wait([answer], timeout=PING_S))[0]:
            yield ": the answer is being generated\n\n"
        turn = answer.result()
        for event in api.events(ready.call, turn, _words(desk, turn)):
            yield event
    except Refusal as refusal:
        desk.refuse(ready.session, refusal)
        yield api.error_event(refusal)
    finally:
        answer.cancel()
        with contextlib.suppress(asyncio.CancelledError, Refusal):
            await answer
