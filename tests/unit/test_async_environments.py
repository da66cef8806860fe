"""Async environments side by side in one process, and environments that are brought back by their states."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from relax_hpc.environments import Environments, Seat, make_environments, process, record
from relax_hpc.recipe import Recipe
from relax_hpc.recipe.tables.source import FileSource
from relax_hpc.records import Prompt
from relax_hpc.registry import RegistryError

CODE = '''
import asyncio, os, time
from relax_hpc.environments import ToolError, Turn

class Slow:
    """Takes as many seconds as it is told, but does as the prompt's answer says."""
    async def reset(self, prompt): self.does = prompt.answer
    async def step(self, answer):
        match self.does:
            case "hang": await asyncio.Event().wait()
            case "block": time.sleep(3600)
            case "die": os._exit(3)
            case "raise": raise KeyError("key")
            case "tool": raise ToolError("no such page")
        await asyncio.sleep(float(answer))
        return Turn(False, "ok", extra={"pid": os.getpid()})
    async def close(self): ...

def slow(): return Slow()

class Loops:
    """Has an event loop of its own in each step."""
    def reset(self, prompt): ...
    def step(self, answer): return Turn(False, asyncio.run(self.said()))
    async def said(self): return "ok"
    def close(self): ...

class Keeps:
    def reset(self, prompt): self.done = ["reset"]
    def step(self, answer):
        self.done.append(answer)
        return Turn(len(self.done) == 9, " ".join(self.done), 1.0, {"pid": os.getpid()})
    def state(self): return {"done": self.done[1:], "bytes": b"\\x00\\xff"} if self.done[1] != "odd" else object()
    def restore(self, prompt, state):
        assert prompt.text == "?" and state["bytes"] == b"\\x00\\xff"
        self.done = ["restored", *state["done"]]
    def close(self): ...

class Half(Keeps):
    restore = None

class Narrow(Keeps):
    def restore(self, state): ...
'''


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("code") / "code.py"
    path.write_text(CODE)
    return path


Make = Callable[..., Environments]


@pytest.fixture
def make(code: Path) -> Iterator[Make]:
    """Make environments that live in two processes, two of each kind."""
    made: list[Environments] = []

    def environments(name: str, limit_s: float = 60.0) -> Environments:
        rollout = {"max_new_tokens": 8, "step_time_limit_s": limit_s, "code_processes": 2}
        source = {"task": "chain_sum", "environment": f"{code}:{name}"}
        recipe = Recipe.model_validate({"model": {"name": "tiny"}, "rollout": rollout, "source": [source]})
        made.append(Environments(recipe))
        return made[-1]

    yield environments
    for one in made:
        one.close()


def begin(environments: Environments, *answers: str) -> list[Seat]:
    seats = environments.begin([(i, Prompt(0, i, "?", np.zeros(1, np.int32), a)) for i, a in enumerate(answers)])
    environments.wait(lambda: None)
    return seats


def step(environments: Environments, seats: list[Seat], answer: str = "0") -> None:
    for seat in seats:
        environments.show(seat, answer)
    environments.wait(lambda: None)


def test_many_slow_async_steps_take_as_long_as_one_and_each_has_its_own_time_limit(make: Make) -> None:
    environments = make("Slow", limit_s=20.0)
    seats = begin(environments, *["fine"] * 100)
    began = time.monotonic()
    step(environments, seats, "0.5")
    assert time.monotonic() - began < 12.5, "half of what one after the other takes in two processes"
    assert all(seat.failure is None and len(seat.turns) == 1 for seat in seats)
    assert len({seat.turns[0].extra["pid"] for seat in seats}) == 2


def test_an_async_step_that_hangs_raises_or_fails_as_a_tool_leaves_its_process_alone(make: Make) -> None:
    environments = make("Slow", limit_s=2.0)
    hangs, raises, tool, *fine = begin(environments, "hang", "raise", "tool", "fine", "fine")
    step(environments, [hangs, raises, tool, *fine])
    step(environments, fine)
    assert hangs.failure and "took longer than 2 s in step (rollout.step_time_limit_s)" in hangs.failure.reason
    assert raises.failure and "raised KeyError in step" in raises.failure.reason and "code.py:" in raises.failure.detail
    assert tool.turns[0].observation == [{"role": "tool", "content": "error: no such page"}]
    assert all(len({turn.extra["pid"] for turn in seat.turns}) == 1 and len(seat.turns) == 2 for seat in fine)


@pytest.mark.parametrize(
    ("does", "reason"), [("block", "took longer than 1 s in step"), ("die", "died with exit status 3 in step")]
)
def test_what_costs_an_async_process_fails_alone_and_the_others_are_asked_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, does: str, reason: str
) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.5)
    environments = make("Slow", limit_s=1.0)
    seats = begin(environments, "fine", does, "fine", "fine", "fine")
    odd = seats.pop(1)
    step(environments, [odd, *seats])
    assert odd.failure and reason in odd.failure.reason
    assert [(seat.failure, len(seat.turns)) for seat in seats] == [(None, 1)] * 4


@pytest.mark.parametrize("name", ["slow", "Loops"])
def test_what_an_environment_awaits_is_awaited_wherever_it_lives(make: Make, name: str) -> None:
    environments = make(name)
    [seat] = begin(environments, "fine")
    step(environments, [seat])
    step(environments, [seat])
    assert seat.failure is None and [turn.observation for turn in seat.turns] == ["ok", "ok"]


def test_an_environment_with_a_state_is_restored_where_its_process_was_killed_and_by_another_worker(make: Make) -> None:
    environments = make("Keeps")
    [seat] = begin(environments, "")
    step(environments, [seat], "a")
    child = psutil.Process(int(seat.turns[0].extra["pid"]))
    child.kill()
    while child.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    step(environments, [seat], "b")
    assert seat.failure is None
    assert [turn.observation for turn in seat.turns] == ["reset a", "restored a b"]
    text = record(seat)
    assert text is not None
    another = make("Keeps")
    [again] = another.begin([(0, seat.prompt)], {0: text})
    another.wait(lambda: None)
    assert again.turns == seat.turns
    step(another, [again], "c")
    assert again.failure is None and [turn.observation for turn in again.turns][2:] == ["restored a b c"]


def test_a_state_that_cannot_be_kept_or_restored_is_named(make: Make, code: Path) -> None:
    environments = make("Keeps")
    [seat] = begin(environments, "")
    step(environments, [seat], "odd")
    assert seat.failure and "returned a wrong value from state" in seat.failure.reason
    assert "as the state, expected JSON values or bytes" in seat.failure.detail
    for name, message in (("Half", "has a method 'state' but no 'restore'"), ("Narrow", "cannot be called as")):
        with pytest.raises(RegistryError, match=message):
            make_environments([FileSource(prompts=Path("x.jsonl"), environment=f"{code}:{name}")])
