"""Rewards and environments such as a user writes, good ones and bad ones; tests name them as FILE.py:NAME."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from typing import Any


def length(prompt: Any, answer: str, scale: float = 1.0) -> dict[str, float]:
    return {"reward": len(answer) * scale, "characters": len(answer)}


def by_answer(prompt: Any, answer: str) -> Any:
    """Misbehaves as the answer says; 'fine' is fine; 'hang FOLDER' leaves a file there first."""
    if answer.startswith("hang "):
        tempfile.mkstemp(dir=answer.removeprefix("hang "))
        time.sleep(3600)
    misdeeds = {
        "fine": lambda: 0.5,
        "true": lambda: True,
        "raise": lambda: {}["key"],
        "exit": lambda: sys.exit(3),
        "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "nan": lambda: float("nan"),
        "text": lambda: "1.0",
        "none": lambda: None,
        "dict": lambda: {"score": 1.0},
        "inf": lambda: {"reward": 1.0, "other": float("inf")},
        "huge": lambda: 1e300,
        "slash": lambda: {"reward": 1.0, "a/b": 2.0},
        "unnamed": lambda: {"reward": 1.0, 1: 2.0},
        "surrogate": lambda: refuse("no \udcff"),
        "sleep": lambda: time.sleep(3600),
        "spin": spin,
        "unpicklable": lambda: lambda: 1,
        "pid": lambda: {"reward": 1.0, "pid": os.getpid(), "torch": float("torch" in sys.modules)},
    }
    return misdeeds[answer]()


def refuse(why: str) -> None:
    raise ValueError(why)


def spin() -> None:
    while True:
        pass


def one_argument(prompt: Any) -> float:
    return 1.0


class Counting:
    """Says done after `turns` answers, and gives how long they were as the reward."""

    def __init__(self, turns: int = 2) -> None:
        self.turns = turns

    def reset(self, prompt: Any) -> None:
        self.left, self.said = self.turns, 0

    def step(self, answer: str) -> Any:
        from relax_hpc.environments import Turn

        self.left, self.said = self.left - 1, self.said + len(answer)
        return Turn(done=not self.left, observation="go on", reward=float(self.said) if not self.left else None)

    def close(self) -> None:
        pass


class Kept(Counting):
    """Counting that keeps its state, and says how many steps this very object took."""

    steps = 0

    def step(self, answer: str) -> Any:
        turn = super().step(answer)
        self.steps += 1
        turn.extra["steps"] = self.steps
        return turn

    def state(self) -> Any:
        return {"left": self.left, "said": self.said}

    def restore(self, prompt: Any, state: Any) -> None:
        self.left, self.said = state["left"], state["said"]


class Odd:
    """Misbehaves as the prompt's answer says ("reset raise"), else says how many turns there were, and in which process; done after `turns`."""

    def __init__(self, turns: int = 2, long: int = 0) -> None:
        self.turns, self.long = turns, long

    def reset(self, prompt: Any) -> None:
        self.when, _, self.what = (prompt.answer or "").partition(" ")
        self.said = 0
        self.do("reset")

    def step(self, answer: str) -> Any:
        from relax_hpc.environments import Turn

        self.said += 1
        if odd := self.do(f"step{self.said}"):
            return odd
        return Turn(self.said == self.turns, f"{self.said}" + "1" * self.long, extra={"pid": os.getpid()})

    def close(self) -> None:
        self.do("close")

    def do(self, when: str) -> Any:
        from relax_hpc.environments import Turn

        if when != self.when:
            return None
        misdeeds = {
            "raise": lambda: {}["key"],
            "exit": lambda: sys.exit(3),
            "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
            "sleep": lambda: time.sleep(3600),
            "text": lambda: "done",
            "done": lambda: Turn(done="yes"),
            "surrogate": lambda: Turn(done=False, observation="\udc80"),
            "nan": lambda: Turn(done=True, reward=float("nan")),
            "column": lambda: Turn(done=True, extra={"a/b": 1.0}),
            "pid": lambda: Turn(done=False, observation=str(os.getpid())),
        }
        return misdeeds[self.what]()


class NoClose:
    def reset(self, prompt: Any) -> None: ...

    def step(self, answer: str) -> None: ...


class OddStep(Counting):
    def step(self, answer: str, *, state: int) -> Any: ...


async def awaited(prompt, answer):
    """One event loop for all calls in a process; "hang" never ends."""
    loops.add(id(asyncio.get_running_loop()))
    if answer == "hang":
        await asyncio.Event().wait()
    await asyncio.sleep(0)
    return {"reward": float(answer), "loops": len(loops)}


async def ranked(prompt, answers):
    """Of a group at once: each answer's place."""
    if "raise" in answers:
        raise KeyError("ranks")
    if "few" in answers:
        return [1.0]
    return [{"reward": sorted(answers).index(answer), "of": len(answers)} for answer in answers]


ranked.batch = True
loops = set()
