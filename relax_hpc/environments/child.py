"""A process for a user's own environments: whatever they do, it is killed and replaced, and nothing else is hurt.

worker ──Call──► child: reset or restore, steps, close ──► Reply
                   ├── one call after the other, in no event loop: an environment may run one of its own
                   └── async environments: all calls side by side in one event loop
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import itertools
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_hpc.environments.base import ToolError, Turn
from relax_hpc.environments.channel import Channel, Reply, checked, plain, to_worker
from relax_hpc.environments.load import make_environments
from relax_hpc.parent import end_with
from relax_hpc.recipe.tables.source import AnyPrompts
from relax_hpc.records import Prompt
from relax_hpc.registry import WrongValue, said

START = "import json, sys; sys.path = json.loads(sys.argv[1]); from relax_hpc.environments.child import main; main()"
"""The program of the process: relax_hpc from where the worker has it."""
_CALLERS = (__file__, str(Path(asyncio.__file__).parent))
"""Files through which a method is called: their frames are not the user's."""
Settle = Callable[[Any], Awaitable[Any]]
"""Awaits what a method returned, if it is to be awaited."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call to the environment of a sample: reset or restore, steps or close."""

    seat: int
    """A number that identifies the sample, used by no other."""
    prompt: Prompt | None
    """The prompt to reset the environment with; None where it has begun."""
    answers: tuple[str, ...]
    """Answers of the model to show to the environment, in order."""
    closes: bool = False
    state: Any = None
    """With a prompt: the state to restore; None: reset."""
    allowed_s: float = 0.0
    """Time limit in seconds of the whole call."""
    late: str = ""
    """What is said of a call that takes longer."""

    @property
    def doing(self) -> str:
        """Its last method, which is most likely to take long."""
        begin = "reset" if self.state is None else "restore"
        return "close" if self.closes else "step" if self.answers else begin


def main() -> None:
    """Serve calls until the channel ends; it comes as the standard input. Sends a reply without a seat first, once the
    users' code is imported."""
    if parent := int(sys.argv[2]):
        end_with(parent)
    channel = Channel(socket.socket(fileno=os.dup(0)))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with contextlib.suppress(EOFError):
        sources: Sequence[AnyPrompts]
        sources, at_once = pickle.loads(channel.receive())
        served = Served(sources)
        channel.send(to_worker(Reply(None)))
        if at_once:
            asyncio.run(_side_by_side(channel, served))
        else:
            _one_by_one(channel, served)


def _one_by_one(channel: Channel, served: Served) -> None:
    with asyncio.Runner() as runner:

        async def settle(value: Any) -> Any:
            return runner.run(_awaited(value)) if inspect.isawaitable(value) else value

        while True:
            call: Call = pickle.loads(channel.receive())
            channel.send(to_worker(_by_hand(served.reply(call, settle))))


async def _side_by_side(channel: Channel, served: Served) -> None:
    async def settle(value: Any) -> Any:
        return await value if inspect.isawaitable(value) else value

    async def answer(call: Call) -> None:
        try:
            async with asyncio.timeout(call.allowed_s):
                reply = await served.reply(call, settle)
        except TimeoutError:
            reply = Reply(call.seat, (call.late, ""))
        channel.send(to_worker(reply))

    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    tasks = set[asyncio.Task[None]]()

    def take() -> None:
        try:
            while (message := channel.poll()) is not None:
                task = loop.create_task(answer(pickle.loads(message)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except EOFError:
            ended.set()

    loop.add_reader(channel.fileno(), take)
    await ended.wait()


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _by_hand(work: Coroutine[Any, Any, Reply]) -> Reply:
    """Run what never waits, in no event loop."""
    try:
        work.send(None)
    except StopIteration as end:
        reply: Reply = end.value
        return reply
    raise RuntimeError("a call waits outside of an event loop")


def _behind(error: BaseException) -> int:
    """Count the frames of this module before the user's."""
    frames = traceback.extract_tb(error.__traceback__)
    return sum(1 for _ in itertools.takewhile(lambda frame: frame.filename.startswith(_CALLERS), frames))


class Served:
    """The environments that live in this process."""

    def __init__(self, sources: Sequence[AnyPrompts]) -> None:
        self._make, self._here = make_environments(sources), dict[int, Any]()

    async def reply(self, call: Call, settle: Settle) -> Reply:
        """Do a call: a turn for each answer, or the error."""
        doing, turns, state = call.doing if call.prompt is not None else "step", list[Turn](), None
        try:
            if call.prompt is not None:
                doing = "reset" if call.state is None else "restore"
                await self._begin(call, call.prompt, settle)
            doing = "step"
            for answer in call.answers:
                turns.append(await self._step(call.seat, answer, settle))
            if turns and not turns[-1].done and hasattr(self._here[call.seat], "state"):
                doing = "state"
                state = plain(
                    "the state", await settle(self._here[call.seat].state()), "JSON values or bytes, not None"
                )
            doing = "close"
            if call.closes and call.seat in self._here:
                await settle(self._here.pop(call.seat).close())
        except WrongValue as error:
            return Reply(call.seat, (f"returned a wrong value from {doing}", str(error)))
        except (Exception, SystemExit) as error:
            return Reply(call.seat, (f"raised {type(error).__name__} in {doing}", said(error, _behind(error))))
        return Reply(call.seat, tuple(turns), state)

    async def _begin(self, call: Call, prompt: Prompt, settle: Settle) -> None:
        environment: Any = self._make[prompt.source]()
        self._here[call.seat] = environment
        if call.state is None:
            await settle(environment.reset(prompt))
        else:
            await settle(environment.restore(prompt, call.state))

    async def _step(self, seat: int, answer: str, settle: Settle) -> Turn:
        try:
            turn = checked(await settle(self._here[seat].step(answer)))
        except ToolError as error:
            turn = Turn(done=False, observation=error.observation())
        if turn.answer is None and hasattr(self._here[seat], "tools"):  # what it said to tools is no answer
            turn = dataclasses.replace(turn, answer=answer)
        return turn
