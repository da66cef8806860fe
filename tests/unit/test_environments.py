"""Environments: the single turn, a user's own, and what is wrong with one is said at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_hpc.environments import Environment, SingleTurn, Turn, make_environments
from relax_hpc.recipe.source import FileSource
from relax_hpc.records import Prompt
from relax_hpc.registry import RegistryError

USER = Path(__file__).with_name("user_code.py")


def source(environment: str = "single_turn", **options: Any) -> FileSource:
    return FileSource(prompts=Path("x.jsonl"), environment=environment, environment_options=options)


def play(environment: Environment, *answers: str) -> list[Turn]:
    environment.reset(Prompt(0, 0, "?", np.zeros(1, np.int32)))
    turns = [environment.step(answer) for answer in answers]
    environment.close()
    return turns


def test_a_single_turn_is_done_and_leaves_the_reward_to_the_source() -> None:
    (make,) = make_environments([source()])
    assert isinstance(make(), SingleTurn)
    assert play(make(), "46") == [Turn(done=True, observation="", reward=None, extra={})]


def test_a_users_environment_is_made_once_a_sample_with_its_options() -> None:
    short, long = make_environments([source(f"{USER}:Counting"), source(f"{USER}:Counting", turns=3)])
    assert short() is not short()
    assert [t.done for t in play(long(), "a", "b", "c")] == [False, False, True]
    first, last = play(short(), "ab", "cde")
    assert (first.observation, first.reward, last.reward) == ("go on", None, 5.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (source("twin_turn"), r"unknown environment 'twin_turn'.*\['single_turn'\]"),
        (source(turns=2), "turns=2"),
        (source(f"{USER}:NoClose"), "no method 'close'; it needs reset, step, close"),
        (source(f"{USER}:OddStep"), r"OddStep.step\(self, answer.*cannot be called as \(self, answer\).*state"),
        (source(f"{USER}:Absent"), "no 'Absent'; it has .*Counting"),
    ],
)
def test_what_is_wrong_with_an_environment_is_said_at_the_start(wrong: FileSource, message: str) -> None:
    with pytest.raises(RegistryError, match=message):
        make_environments([source(), wrong])
