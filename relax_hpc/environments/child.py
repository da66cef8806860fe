"""A process for a user's own environments: whatever they do, it is killed and replaced, and nothing else is hurt."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relax_hpc.environments.base import Environment, ToolError, Turn
from relax_hpc.environments.channel import Channel, Wrong, checked, to_worker
from relax_hpc.environments.load import make_environments
from relax_hpc.parent import end_with
from relax_hpc.recipe.tables.source import AnyPrompts
from relax_hpc.records import Prompt
from relax_hpc.registry import WrongValue, said

START = "import json, sys; sys.path = json.loads(sys.argv[1]); from relax_hpc.environments.child import main; main()"
"""The program of the process: relax_hpc from where the worker has it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call to the environment of a sample: reset, steps or close."""

    seat: int
    """A number that identifies the sample, used by no other."""
    prompt: Prompt | None
    """The prompt to reset the environment with; None where it has begun."""
    answers: tuple[str, ...]
    """Answers of the model to show to the environment, in order."""
    closes: bool = False


def main() -> None:
    """Serve one call after the other, until the channel ends; it comes as the standard input. Sends None first, once the
    users' code is imported."""
    if parent := int(sys.argv[2]):
        end_with(parent)
    channel = Channel(socket.socket(fileno=os.dup(0)))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with contextlib.suppress(EOFError):
        sources: Sequence[AnyPrompts] = pickle.loads(channel.receive())
        make, here = make_environments(sources), dict[int, Environment]()
        channel.send(to_worker(None))
        while True:
            channel.send(to_worker(_do(pickle.loads(channel.receive()), here, make)))


def _do(
    call: Call, here: dict[int, Environment], make: Sequence[Callable[[], Environment]]
) -> tuple[Turn, ...] | Wrong:
    """Do a call; returns a turn for each answer, or the error."""
    doing, turns = "reset", []
    try:
        if call.prompt is not None:
            here[call.seat] = make[call.prompt.source]()
            here[call.seat].reset(call.prompt)
        doing = "step"
        for answer in call.answers:
            try:
                turn = here[call.seat].step(answer)
            except ToolError as error:
                turn = Turn(done=False, observation=error.observation())
            turn = checked(turn)
            if turn.answer is None and hasattr(here[call.seat], "tools"):  # what it said to tools is no answer
                turn = dataclasses.replace(turn, answer=answer)
            turns.append(turn)
        doing = "close"
        if call.closes and call.seat in here:
            here.pop(call.seat).close()
    except WrongValue as error:
        return f"returned a wrong value from {doing}", str(error)
    except (Exception, SystemExit) as error:
        return f"raised {type(error).__name__} in {doing}", said(error, behind=1)
    return tuple(turns)
