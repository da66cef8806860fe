"""Episodes whose tools are slow, in one worker: a request with all of them at once, by themselves and in lockstep.

bound = the longer of: the engine alone, saying as many tokens at once;  the tools alone, the longest episode's
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import psutil
from rich.table import Table

from relax_hpc.engines import Ask, Sampling, Streams
from relax_hpc.recipe.schema import Recipe
from relax_hpc.records import Finish, Group
from relax_hpc.roles.rollout.runner import RolloutRunner
from relax_hpc.spool.request import Request
from relax_hpc.trainers import make_trainer
from relax_hpc.trainers.build import materialise
from tools.bench.common import SIDES, interleave, progress, show
from tools.bench.sides.slow_tools import tools_s

TURNS, SIGMA = 4, 1.0
"""Turns of an episode, and the spread of the tools' logarithms."""
TOKENS, STOP = 300, ["1", "2", "3", "4"]
"""Most tokens of a turn, which none reaches: weights drawn at random say one of these before."""
MODEL = {"hidden_size": 64, "intermediate_size": 192, "layers": 2, "heads": 4, "kv_heads": 2, "context": 2048}


def recipe(lockstep: bool, seconds: float) -> Recipe:
    options = {"turns": TURNS, "seconds": seconds, "sigma": SIGMA}
    source = {"task": "chain_sum", "environment": f"{SIDES}/slow_tools.py:SlowTools", "environment_options": options}
    rollout = {"device": "cpu", "max_new_tokens": TOKENS, "stop": STOP, "max_turns": TURNS, "lockstep": lockstep}
    asynchronous = {"max_staleness": 1}
    return Recipe.model_validate({"model": MODEL, "source": [source], "rollout": rollout, "async": asynchronous})


@contextmanager
def worker(made: Recipe, folder: Path) -> Iterator[RolloutRunner]:
    """A rollout worker's runner, with weights, whose processes are there."""
    runner = RolloutRunner(made, folder)
    try:
        runner.engine.load(0, dict(make_trainer(made, folder, 0, 1).export()).items())
        yield runner
    finally:
        runner.close()


def play(runner: RolloutRunner, first: int, episodes: int) -> tuple[float, list[Group]]:
    """Play a request of `episodes` prompts, one sample each; returns its seconds and its groups. Raises SystemExit where an
    episode failed."""
    request = Request(f"r{first:06d}-000", tuple((0, first + i) for i in range(episodes)), 1, first, 0)
    prompts = runner.prompts(request)
    began = time.perf_counter()
    groups = runner.groups(request, prompts, lambda state: None)
    seconds = time.perf_counter() - began
    failed = [group for group in groups if group.samples[0].finish is Finish.FAILED]
    if failed or any(len(turns_of(group)) != TURNS for group in groups):
        raise SystemExit(f"{len(failed)} episodes failed, or ended early: {failed[0].detail if failed else ''}")
    return seconds, groups


def turns_of(group: Group) -> list[tuple[int, int]]:
    """Where each of the model's turns begins in its sample, and ends."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], group.samples[0].loss_mask, [0]])))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def engine_s(runner: RolloutRunner, groups: list[Group]) -> float:
    """Seconds in which the engine alone says as many tokens behind the same contexts, all turns at once."""
    assert isinstance(runner.engine, Streams)
    asks = [
        Ask(key, np.concatenate([group.prompt.tokens, group.samples[0].tokens[:begin]]), Sampling(max_new_tokens=end - begin), key)
        for key, (group, begin, end) in enumerate((g, *turn) for g in groups for turn in turns_of(g))
    ]  # fmt: skip
    began, stream = time.perf_counter(), runner.engine.stream()
    stream.ask(asks)
    while stream.busy:
        stream.advance(1.0)
    return time.perf_counter() - began


def cpu_s() -> float:
    """CPU seconds of this process and its children, dead ones too."""
    me = psutil.Process()
    ours = me.cpu_times()
    alive = sum(sum(child.cpu_times()[:2]) for child in me.children(recursive=True))
    return float(sum(ours[:4]) + alive)


def episodes_per_core_s(runner: RolloutRunner, episodes: int) -> float:
    """Episodes for each CPU second, where tools take no time."""
    play(runner, 0, episodes)
    before = cpu_s()
    play(runner, episodes, episodes)
    return episodes / (cpu_s() - before)


def slow(given: Any) -> dict[str, Any]:
    """Measure rounds of both kinds in turn, each round with tools of its own."""
    recipes = [recipe(lockstep, given.seconds) for lockstep in (False, True)]
    with ExitStack() as stack, progress("slow: rounds", given.rounds) as done:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        materialise(recipes[0].model, folder, 0)
        with worker(recipe(False, 0.0), folder) as runner:
            per_core_s = episodes_per_core_s(runner, given.episodes)
        ours, lockstep = (stack.enter_context(worker(made, folder)) for made in recipes)

        def side(runner: RolloutRunner) -> Callable[[int], tuple[float, list[Group]]]:
            play(runner, 0, 4)  # its processes start
            return lambda number: play(runner, (number + 1) * given.episodes, given.episodes)

        seen = interleave({"ours": side(ours), "lockstep": side(lockstep)}, given.rounds, done=done)
        speaking = [engine_s(ours, groups) for _, groups in seen["ours"]]
    return report(given, seen, speaking) | {"episodes_per_s_per_core": round(per_core_s, 1)}


def report(given: Any, seen: dict[str, list[tuple[float, list[Group]]]], speaking: list[float]) -> dict[str, Any]:
    """Compare each round with its bound, and show a table."""
    table = Table(
        "round", "engine alone", "tools alone", "bound", "ours", "of the bound", "lockstep", "lockstep / ours"
    )
    over, against = [], []
    for number, engine in enumerate(speaking):
        first = (number + 1) * given.episodes
        tools = max(sum(tools_s(first + i, TURNS, given.seconds, SIGMA)) for i in range(given.episodes))
        ours, theirs = (seen[name][number][0] for name in ("ours", "lockstep"))
        bound = max(engine, tools)
        over.append(bound / ours)
        against.append(ours / theirs)
        cells = (engine, tools, bound, ours, over[-1], theirs, against[-1])
        table.add_row(str(number), *(f"{cell:.2f}" for cell in cells))
    show(table)
    return {"over_bound": round(float(np.median(over)), 3), "lockstep_over_ours": round(float(np.median(against)), 3)}
