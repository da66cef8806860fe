"""A process for a user's own environments: whatever they do, it is killed and replaced, and nothing else is hurt."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from relax_hpc.environments.base import Environment, Turn
from relax_hpc.environments.load import make_environments
from relax_hpc.parent import end_with
from relax_hpc.recipe.tables.source import AnyPrompts
from relax_hpc.records import Prompt
from relax_hpc.registry import WrongValue, finite_number, finite_numbers, said, shown

Wrong = tuple[str, str]
"""The error as (in general, in this case). It is text, because an exception of the user's own may not unpickle."""


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


def serve(connection: Connection, sources: Sequence[AnyPrompts], parent: int) -> None:
    """Serve one call after the other, until the connection ends. Sends None first, once the users' code is imported."""
    end_with(parent)
    os.setpgid(0, 0)  # Ctrl-C at a terminal is not for us, and what the users' code starts ends with us
    make, here = make_environments(sources), dict[int, Environment]()
    connection.send(None)
    while True:
        try:
            call: Call = connection.recv()
        except EOFError:
            return
        connection.send(_do(call, here, make))


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
            turns.append(checked(here[call.seat].step(answer)))
        doing = "close"
        if call.closes and call.seat in here:
            here.pop(call.seat).close()
    except WrongValue as error:
        return f"returned a wrong value from {doing}", str(error)
    except (Exception, SystemExit) as error:
        return f"raised {type(error).__name__} in {doing}", said(error, behind=1)
    return tuple(turns)


def checked(turn: object) -> Turn:
    """Copy what `step` returned as plain values. Raises WrongValue unless it is a Turn with allowed ones."""
    if not isinstance(turn, Turn):
        raise WrongValue(f"returned {shown(turn)}, expected a relax_hpc.environments.Turn")
    if not isinstance(turn.done, bool):
        raise WrongValue(f"returned {shown(turn.done)} as Turn.done, expected True or False")
    observation = _plain(turn.observation)
    if not (isinstance(observation, str) or all(isinstance(p, dict) and "type" in p for p in observation or [None])):
        raise WrongValue(
            f"returned {shown(turn.observation)} as Turn.observation, expected text or a list of content parts"
        )
    if not isinstance(turn.extra, dict):
        raise WrongValue(f"returned {shown(turn.extra)} as Turn.extra, expected a dict of numbers")
    reward = None if turn.reward is None else finite_number("Turn.reward", turn.reward)
    return Turn(turn.done, observation, reward, finite_numbers(turn.extra))


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
