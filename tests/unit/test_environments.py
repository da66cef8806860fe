"""Environments: the single turn, a user's own, what is wrong with one is said at the start, and what one does wrong hurts no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from relax_hpc.environments import Environment, Environments, Seat, SingleTurn, Turn, make_environments
from relax_hpc.recipe import Recipe
from relax_hpc.recipe.tables.source import FileSource
from relax_hpc.records import Prompt
from relax_hpc.registry import RegistryError

ROOT = Path(__file__).resolve().parents[2]
USER = Path(__file__).with_name("user_code.py")


def source(environment: str = "single_turn", **options: Any) -> FileSource:
    return FileSource(prompts=Path("x.jsonl"), environment=environment, environment_options=options)


def generate(environment: Environment, *answers: str) -> list[Turn]:
    environment.reset(Prompt(0, 0, "?", np.zeros(1, np.int32)))
    turns = [environment.step(answer) for answer in answers]
    environment.close()
    return turns


def test_a_single_turn_is_done_and_leaves_the_reward_to_the_source() -> None:
    (make,) = make_environments([source()])
    assert isinstance(make(), SingleTurn)
    assert generate(make(), "46") == [Turn(done=True, observation="", reward=None, extra={})]


def test_a_users_environment_is_made_once_a_sample_with_its_options() -> None:
    short, long = make_environments([source(f"{USER}:Counting"), source(f"{USER}:Counting", turns=3)])
    assert short() is not short()
    assert [t.done for t in generate(long(), "a", "b", "c")] == [False, False, True]
    first, last = generate(short(), "ab", "cde")
    assert (first.observation, first.reward, last.reward) == ("go on", None, 5.0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (source("twin_turn"), r"unknown environment 'twin_turn'.*'single_turn'"),
        (source(turns=2), "turns=2"),
        (source(f"{USER}:NoClose"), "no method 'close'; it needs reset, step, close"),
        (source(f"{USER}:OddStep"), r"OddStep.step\(self, answer.*cannot be called as \(self, answer\).*state"),
        (source(f"{USER}:Absent"), "no 'Absent'; it has .*Counting"),
    ],
)
def test_what_is_wrong_with_an_environment_is_said_at_the_start(wrong: FileSource, message: str) -> None:
    with pytest.raises(RegistryError, match=message):
        make_environments([source(), wrong])


def recipe(rollout: dict[str, Any], made: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(
        {"model": {"name": "tiny"}, "rollout": {"max_new_tokens": 8} | rollout, "source": [made]}
    )


def host(processes: int = 1, limit_s: float = 20.0, **options: Any) -> closing[Environments]:
    """Environments of `Odd` in so many processes."""
    rollout = {"step_time_limit_s": limit_s, "code_processes": processes}
    made = {"task": "chain_sum", "environment": f"{USER}:Odd", "environment_options": options}
    return closing(Environments(recipe(rollout, made)))


@pytest.fixture(scope="module")
def process() -> Iterator[Environments]:
    with host(limit_s=2.0) as environments:
        yield environments


def begin(environments: Environments, *answers: str) -> list[Seat]:
    """Each a group of its own."""
    prompts = [Prompt(0, i, "?", np.zeros(1, np.int32), a) for i, a in enumerate(answers)]
    seats = environments.begin([*enumerate(prompts)])
    environments.wait(heartbeat)
    return seats


def step(environments: Environments, said: list[tuple[Seat, str]], progress: Callable[[], None] = lambda: None) -> None:
    """Show answers, and wait for all turns."""
    for seat, answer in said:
        environments.show(seat, answer)
    environments.wait(progress)


def heartbeat() -> None:
    """Nobody looks."""


@pytest.mark.parametrize(
    ("misdeed", "reason", "detail"),
    [
        ("reset raise", "raised KeyError in reset", "KeyError: 'key' (.*user_code.py:"),
        ("step1 raise", "raised KeyError in step", "KeyError: 'key' (.*user_code.py:"),
        ("step2 exit", "raised SystemExit in step", "SystemExit: 3"),
        ("close raise", "raised KeyError in close", "KeyError: 'key'"),
        ("step1 crash", "died with exit status -11 in step", ""),
        ("step2 sleep", "took longer than 2 s in step (rollout.step_time_limit_s)", ""),
        ("reset sleep", "took longer than 2 s in reset (rollout.step_time_limit_s)", ""),
        ("close sleep", "took longer than 2 s in close", ""),
        (
            "step1 text",
            "returned a wrong value from step",
            "returned 'done' (str), expected a relax_hpc.environments.Turn",
        ),
        ("step1 done", "returned a wrong value from step", "returned 'yes' (str) as Turn.done, expected True or False"),
        ("step1 surrogate", "returned a wrong value from step", "as Turn.observation, expected text"),
        ("step1 nan", "returned a wrong value from step", "nan (float) as Turn.reward, expected a finite number"),
        ("step1 column", "returned a wrong value from step", "under the name 'a/b'"),
    ],
)
def test_what_an_environment_does_wrong_fails_it_alone_though_all_live_in_one_process(
    process: Environments, misdeed: str, reason: str, detail: str
) -> None:
    seats = begin(process, "", misdeed, "")
    for answer in ("a", "b"):
        step(process, [(seat, answer) for seat in seats if not seat.failure], heartbeat)
    process.leave(seats)
    (fine, odd, last) = seats
    assert odd.failure is not None and odd.failure.reason == f"environment '{USER}:Odd' {reason}"
    assert re.search(r"source 0, prompt 1.*" + re.escape(detail).replace(re.escape("(.*"), r"\(.*"), odd.failure.detail)
    for seat in (fine, last):
        assert seat.failure is None
        assert [(t.done, t.observation) for t in seat.turns] == [(False, "1"), (True, "2")]


def test_one_that_says_other_things_in_a_new_process_than_it_did_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with host(turns=3) as environments:
        odd, crashes = begin(environments, "step1 pid", "step2 crash")
        step(environments, [(odd, "a"), (crashes, "a")], heartbeat)
        step(environments, [(crashes, "b")], heartbeat)
        assert crashes.failure is not None and odd.failure is None
        step(environments, [(odd, "b")], heartbeat)
        assert odd.failure is not None and "says other things to the same answers the second time" in odd.failure.reason


def test_others_go_on_beside_one_that_hangs_and_who_waits_is_heard() -> None:
    heartbeats: list[bool] = []
    with host(processes=2, limit_s=5.0) as environments:
        hangs, fine = begin(environments, "step1 sleep", "")
        step(
            environments,
            [(hangs, "a"), (fine, "a")],
            lambda: heartbeats.append(bool(fine.turns) and hangs.failure is None),
        )
        assert hangs.failure is not None and fine.failure is None
        assert sum(heartbeats) >= 3, "the other one waited for the one that hangs, or nobody was told"


def test_a_prompt_whose_environment_hangs_in_reset_costs_one_time_limit_whatever_the_number_of_its_samples(
    process: Environments,
) -> None:
    hangs, fine = (Prompt(0, i, "?", np.zeros(1, np.int32), a) for i, a in enumerate(["reset sleep", ""]))
    seats = process.begin([*[(0, hangs)] * 6, (1, fine)])
    process.wait(heartbeat)
    assert [seat.failure is not None for seat in seats] == [True, *[False] * 6], "others of its group were tried"
    step(process, [(seats[6], "a")])
    assert [seat.begun for seat in seats] == [*[False] * 6, True] and len(seats[6].turns) == 1


class Stopped(BaseException):
    pass


def test_who_is_asked_to_stop_does_not_wait_and_leaves_no_process(tmp_path: Path) -> None:
    def progress() -> None:
        if time.monotonic() - began > 0.2:
            raise Stopped

    with host(limit_s=3600.0) as environments:
        seats = begin(environments, "step1 sleep", "")
        step(environments, [(seats[1], "a")], heartbeat)
        (pid,) = {int(turn.extra["pid"]) for turn in seats[1].turns}
        began = time.monotonic()
        with pytest.raises(Stopped):
            step(environments, [(seats[0], "a")], progress)
        environments.leave(seats)
        assert time.monotonic() - began < 60
    assert not psutil.pid_exists(pid)


def test_a_killed_role_leaves_no_environment_behind(tmp_path: Path) -> None:
    main = tmp_path / "role.py"
    main.write_text(
        "from test_environments import begin, heartbeat, host, step\n"
        "if __name__ == '__main__':\n"
        "    with host(limit_s=3600.0) as environments:\n"
        "        seats = begin(environments, 'step2 sleep')\n"
        "        step(environments, [(seats[0], 'a')], heartbeat)\n"
        "        print(int(seats[0].turns[0].extra['pid']), flush=True)\n"
        "        step(environments, [(seats[0], 'b')], heartbeat)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{USER.parent}"}
    with subprocess.Popen([sys.executable, str(main)], stdout=subprocess.PIPE, text=True, env=environment) as role:
        assert role.stdout is not None
        child = psutil.Process(int(role.stdout.readline()))
        role.kill()
    _, alive = psutil.wait_procs([child], timeout=30)
    assert not alive


def test_built_in_environments_generates_in_place() -> None:
    before = psutil.Process().children()
    with closing(Environments(recipe({}, {"task": "chain_sum"}))) as environments:
        (seat,) = environments.begin([(0, Prompt(0, 0, "?", np.zeros(1, np.int32)))])
        step(environments, [(seat, "46")], heartbeat)
        environments.leave([seat])
        assert seat.turns == [Turn(done=True)] and psutil.Process().children() == before
