"""Measures the times of a finished run from its metrics: requests, steps, versions, checkpoints, restarts."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from typing import Any

import numpy as np

from relax_hpc.files.errors import RunError
from relax_hpc.monitor.analysis import RunView
from relax_hpc.planning.simulation.assume import RESTART_S, Asked
from relax_hpc.planning.simulation.times import Measured, Times
from relax_hpc.recipe.schema import Recipe

LEAST = 5
"""Fewest steps, and fewest requests, from which anything is concluded."""
Lines = list[dict[str, Any]]


def calibrated(view: RunView, recipe: Recipe, asked: Asked) -> tuple[Times, list[str]]:
    """(times, what they come from). Raises RunError for a run whose metrics say too little."""
    for name, value in dataclasses.asdict(asked).items():
        if value is not None and name in ("answer_tokens", "sigma", "token_s", "bandwidth"):
            raise RunError(
                f"--{name.replace('_', '-')} is for a recipe: of '{view.run.root}', a run, the requests are taken as they were; "
                f"simulate '{view.run.recipe}' to assume others"
            )
    steps, requests = _steps(view), _requests(view)
    if min(len(steps), len(requests)) < LEAST:
        raise RunError(
            f"'{view.run.metrics}' tells of {len(steps)} training steps and {len(requests)} requests (the first of each process left "
            f"out), {LEAST} of each are needed: let the run go on, or simulate '{view.run.recipe}' with assumed times"
        )
    train = _without_checkpoints(view, steps)
    publish = [s["publish_s"] for s in steps]
    if asked.train_s is not None:
        train = [asked.train_s] * len(steps)
    if asked.publish_s is not None:
        publish = [asked.publish_s] * len(steps)
    fetches = [o["sync_s"] for o in requests if o.get("sync_s")]
    restarts, saves = _restarts(view), [line["seconds"] for line in view.metrics("trainer-0", "checkpoint")]
    fetch_s, fetch_note = _chosen("take weights", "--fetch-s", asked.fetch_s, fetches, 0.0)
    checkpoint_s, checkpoint_note = _chosen(
        "write a checkpoint", "--checkpoint-s", asked.checkpoint_s, [] if recipe.run.async_checkpoints else saves, 0.0
    )
    restart_s, restart_note = _chosen("be back after a fault", "--restart-s", asked.restart_s, restarts, RESTART_S)
    before = _given_back(view)
    seconds = np.array(
        [o["generate_s"] + o.get("score_s", 0.0) - o.get("swap_s", 0.0) + before[o["request"]] for o in requests]
    )
    times = Times(
        requests=Measured(seconds, np.array([float(o["tokens"]) for o in requests])),
        train=np.array(train),
        publish=np.array(publish),
        fetch_s=fetch_s,
        shard_s=statistics.median(o["publish_s"] for o in requests),
        checkpoint_s=checkpoint_s,
        restart_s=restart_s,
        worker_lost_s=recipe.supervision.node_agent_silent_s,
        worker_restart_s=restart_s,
    )
    notes = [
        f"requests as {len(requests)} of the run were: {np.median(seconds):.3g} s (median), {np.quantile(seconds, 0.95):.3g} s (p95)",
        f"steps as {len(steps)} of the run were: {statistics.median(train):.3g} s of training, "
        f"{statistics.median(publish):.3g} s of publishing weights (medians)",
        fetch_note, checkpoint_note, restart_note,
        "a request and a version take as long with any number of workers",
    ]  # fmt: skip
    return times, notes


def _steps(view: RunView) -> Lines:
    """Steps when they were first made, without the first step of each process."""
    return [s for s in _warm(view.metrics("trainer-0", "step"), "incarnation") if not s.get("replayed")]


def _requests(view: RunView) -> Lines:
    """Training requests, without the first of each process, which loads and compiles."""
    warm = [request for lines in view.workers().values() for request in _warm(lines, "attempt")]
    return [request for request in warm if request["samples"] and not request["request"].startswith("e")]


def _given_back(view: RunView) -> dict[str, float]:
    """Request -> seconds of generating before it was given back as a partial rollout."""
    seconds: dict[str, float] = defaultdict(float)
    for worker in view.workers():
        for line in view.metrics(worker, "abort"):
            seconds[line["request"]] += line["generate_s"]
    return seconds


def _warm(lines: Lines, process: str) -> Lines:
    """All but the first line of each process; `process`: the key that tells processes apart."""
    first = {line.get(process): number for number, line in reversed(list(enumerate(lines)))}
    return [line for number, line in enumerate(lines) if first[line.get(process)] != number]


def _without_checkpoints(view: RunView, steps: Lines) -> list[float]:
    """Seconds of each step without waiting for data and publishing; a checkpoint counts to the step after it."""
    saves = {line["step"]: line["seconds"] for line in view.metrics("trainer-0", "checkpoint")}
    rest = [s["step_s"] - s["wait_s"] - s["publish_s"] - saves.get(s["step"], 0.0) for s in steps]
    return [max(r, s["train_s"]) for r, s in zip(rest, steps, strict=True)]


def _restarts(view: RunView) -> list[float]:
    """Seconds from each loss of the trainer to the beginning of the first step after it."""
    steps = view.metrics("trainer-0", "step")
    lost = [line["time"] for line in view.metrics("supervisor", "lost") if line.get("role") == "trainer"]
    after = [next((s for s in steps if s["time"] > when), None) for when in lost]
    return [
        max(0.0, s["time"] - s["wait_s"] - s["train_s"] - s["publish_s"] - when)
        for when, s in zip(lost, after, strict=True)
        if s is not None
    ]


def _chosen(what: str, option: str, said: float | None, seen: list[float], otherwise: float) -> tuple[float, str]:
    """(value, sentence that explains it): the value said, else the median of those seen, else the assumption."""
    if said is not None:
        return said, f"{said:.3g} s to {what} ({option})"
    if seen:
        return statistics.median(seen), f"{statistics.median(seen):.3g} s to {what}: the median of {len(seen)}"
    return otherwise, f"{otherwise:.3g} s to {what}: the run's metrics do not tell ({option} says)"
