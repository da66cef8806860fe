"""A run's timeline in the Trace Event Format (ui.perfetto.dev, chrome://tracing): who waited for whom, and when.

metrics/ROLE.jsonl ──► slices on the role's track      supervisor's events ──► instants
versions ──► arrows from their publication to each worker's first request with them
the ledger ──► arrows from requests to the step that took them

A line of metrics is written when something is over and says how long its parts took, so slices are laid out backwards from
there. Between hosts the picture is as exact as their clocks agree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from relax_hpc.files.errors import RunError
from relax_hpc.monitor.analysis import RunView

MICRO = 1e6
SHORTEST_US = 1.0
"""A slice is at least so long, to be seen."""
WORK, PUBLISH, CHECKPOINTS = "work", "publish shards", "checkpoints"
"""Threads of a role's track; the last two go on beside the first."""
TRAIN_PARTS = ("columns_s", "forward_backward_s", "optimize_s")
STEP_ARGS = ("version", "incarnation", "replayed", "raw_reward", "loss", "tokens", "samples", "age_mean", "age_max")
REQUEST_ARGS = ("request", "version", "attempt", "samples", "tokens", "reward", "failed")
COUNTERS = ("raw_reward", "spool_depth", "age_mean")
PARTS = {
    "step": ("wait_s", "read_s", "train_s", "publish_s", "settle_s"),
    "column": ("wait_s", "score_s", "publish_s"),
}
"""The parts of a line's time, in the order in which they came before its end."""
LOUD = ("lost", "outcome")
"""Events that are drawn across all tracks."""

Event = dict[str, Any]


class Timeline:
    """Events by role and thread; times in seconds of the clock in, microseconds since `began` out."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.events: list[Event] = []
        self.published: dict[int, list[Event]] = {}
        """Version -> where it was published, each time."""
        self.steps: dict[int, Event] = {}
        """Step -> where it first read its requests."""
        self.requests: dict[str, Event] = {}
        """Request -> where its shard was published."""
        self._ids: dict[tuple[str, str], tuple[int, int]] = {}
        self._last: dict[tuple[str, str], tuple[float, float]] = {}
        self._arrows = 0

    def slice(self, role: str, thread: str, name: str, begin: float, end: float, **args: Any) -> Event:
        """A slice that begins when the one before it on its thread has ended, at the earliest."""
        begin = max(begin, self._last.get((role, thread), (0.0, 0.0))[1])
        self._last[role, thread] = begin, max(end, begin + SHORTEST_US / MICRO)
        return self.part(role, thread, name, *self._last[role, thread], **args)

    def part(self, role: str, thread: str, name: str, begin: float, end: float, **args: Any) -> Event:
        """Add a slice within the newest one on its thread; what reaches beyond that is cut."""
        first, last = self._last[role, thread]
        begin, end = (min(max(time, first), last) for time in (begin, end))
        return self._add("X", role, thread, name, begin, dur=(end - begin) * MICRO, args=_plain(args))

    def instant(self, role: str, name: str, line: dict[str, Any], *, loud: bool = False) -> None:
        """Add a line of metrics as an event at its time. `loud`: drawn across all tracks."""
        self._add("i", role, WORK, name, line["time"], s="g" if loud else "t", args=_plain(line))

    def counter(self, role: str, name: str, time: float, value: float) -> None:
        if math.isfinite(value):
            self._add("C", role, WORK, name, time, args={name: value})

    def arrow(self, name: str, tail: Event, head: Event) -> None:
        """Draw an arrow from the end of one slice to the beginning of another; none where that one was over before."""
        # Within the slices: that binds the ends to them.
        left = tail["ts"] + tail["dur"] - min(SHORTEST_US, tail["dur"]) / 2
        arrived = max(left, head["ts"] + min(SHORTEST_US, head["dur"]) / 2)
        if arrived > head["ts"] + head["dur"]:
            return
        self._arrows += 1
        for phase, event, ts, bind in (("s", tail, left, {}), ("f", head, arrived, {"bp": "e"})):
            place = {"pid": event["pid"], "tid": event["tid"]}
            self.events.append({"ph": phase, "cat": name, "name": name, "id": self._arrows, "ts": ts, **place, **bind})

    def _add(self, phase: str, role: str, thread: str, name: str, time: float, **more: Any) -> Event:
        pid, tid = self._place(role, thread)
        event = {"ph": phase, "name": name, "pid": pid, "tid": tid, "ts": max(time - self.began, 0.0) * MICRO, **more}
        self.events.append(event)
        return event

    def _place(self, role: str, thread: str) -> tuple[int, int]:
        if (role, thread) not in self._ids:
            roles = {known: pid for (known, _), (pid, _) in self._ids.items()}
            self._ids[role, thread] = (roles.get(role, len(roles) + 1), len(self._ids) + 1)
        return self._ids[role, thread]

    def names(self) -> Iterator[Event]:
        """The events that name processes and threads, and keep their order."""
        for (role, thread), (pid, tid) in self._ids.items():
            about = (("process_name", {"name": role}), ("process_sort_index", {"sort_index": pid}),
                     ("thread_name", {"name": thread}), ("thread_sort_index", {"sort_index": tid}))  # fmt: skip
            for name, args in about:
                yield {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def write(view: RunView, path: Path) -> int:
    """Write the timeline of a run, which may be going on; return its number of events. Raises RunError for none."""
    line = timeline(view)
    events = [*line.names(), *sorted(line.events, key=lambda e: (e["ts"], -e.get("dur", 0.0)))]
    head = {"displayTimeUnit": "ms", "otherData": {"run": str(view.run.root), "began": line.began}}
    with path.open("w") as file:
        file.write(json.dumps(head, allow_nan=False)[:-1] + ', "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event, allow_nan=False) for event in events))
        file.write("\n]}\n")
    return len(events)


def timeline(view: RunView) -> Timeline:
    """Build the timeline with the events of all roles."""
    files = sorted((p.stem for p in view.run.metrics.glob("*.jsonl")), key=lambda n: (len(n), n))
    lines = {name: view.metrics(name) for name in files if not name.endswith(".trained")}
    times = [_began(line) for said in lines.values() for line in said]
    if not times:
        raise RunError(f"'{view.run.root}' has no metrics yet, so there is no timeline: ask again when it has begun")
    made = Timeline(min(times))
    roles = ["trainer-0", *(n for n in lines if n.startswith("rollout-")), *lines]
    lay_out = {"trainer-0": _trainer, "rollout-": _worker, "scorer-": _columns, "critic-": _columns, "": _events}
    for role in dict.fromkeys(role for role in roles if role in lines):
        next(function for name, function in lay_out.items() if role.startswith(name))(made, role, lines[role])
    for request, status in view.statuses().requests.items():
        if request in made.requests and status.step in made.steps:
            made.arrow("request", made.requests[request], made.steps[status.step])
    return made


def _began(line: dict[str, Any]) -> float:
    """The earliest time that a line covers."""
    parts = PARTS.get(str(line.get("kind")), ("seconds",))
    before: float = line.get("began", line["time"]) - sum(line.get(name, 0.0) for name in parts)
    return before - line.get("wait_s", 0.0) if "began" in line else before


def _trainer(made: Timeline, role: str, lines: Iterable[dict[str, Any]]) -> None:
    for line in lines:
        kind, end = line.get("kind"), line["time"]
        if kind == "step":
            read, publish = _step(made, role, line)
            made.published.setdefault(line["version"], []).append(publish)
            made.steps.setdefault(line["step"], read)
        elif kind == "publish":
            event = made.slice(role, WORK, f"publish v{line['version']}", end - line["seconds"], end)
            made.published.setdefault(line["version"], []).append(event)
        elif kind == "checkpoint":
            made.slice(role, CHECKPOINTS, f"checkpoint {line['step']}", end - line["seconds"], end)
        elif kind == "eval":
            made.instant(role, f"score of v{line['version']}: {line['score']:.3f}", line)
            made.counter(role, "score", end, line["score"])
        else:
            made.instant(role, str(kind), line)


def _step(made: Timeline, role: str, line: dict[str, Any]) -> tuple[Event, Event]:
    """Add the slices of a step; return the one that read its requests and the one that published."""
    end = line["time"]
    bounds = [end]
    for part in ("settle_s", "publish_s", "train_s", "read_s", "wait_s"):
        bounds.append(bounds[-1] - line[part])
    settle, publish, train, read, wait = bounds[1:]
    name = f"step {line['step']}{' again' if line['replayed'] else ''}"
    made.slice(role, WORK, name, wait, end, **{key: line.get(key) for key in STEP_ARGS})
    made.part(role, WORK, "wait for requests", wait, read)
    reading = made.part(role, WORK, "read", read, train)
    made.part(role, WORK, "train", train, publish)
    for part in TRAIN_PARTS:
        if line.get(part):
            until = min(train + line[part], publish)
            made.part(role, WORK, part.removesuffix("_s").replace("_", " "), train, until)
            train = until
    publishing = made.part(role, WORK, f"publish v{line['version']}", publish, settle)
    made.part(role, WORK, "settle", settle, end)
    for key in COUNTERS:
        if key in line:
            made.counter(role, key, end, line[key])
    return reading, publishing


def _worker(made: Timeline, role: str, lines: Iterable[dict[str, Any]]) -> None:
    held = None
    for line in lines:
        if line.get("kind") != "request":
            made.instant(role, str(line.get("kind")), line)
            continue
        began = line["began"]
        made.slice(role, WORK, "wait for a request", began - line["wait_s"], began - line["sync_s"])
        if line["sync_s"]:
            made.slice(role, WORK, f"take v{line['version']}", began - line["sync_s"], began)
        scored = began + line["generate_s"]
        done = scored + line["score_s"]
        args = {key: line.get(key) for key in REQUEST_ARGS}
        name = f"generate {line['request']} v{line['version']}"
        generating = made.slice(role, WORK, name, began, done, **args)
        if line["score_s"]:
            made.part(role, WORK, "score", scored, done)
        made.requests[line["request"]] = made.slice(role, PUBLISH, line["request"], done, done + line["publish_s"])
        if line["version"] != held:
            held, end = line["version"], generating["ts"] + generating["dur"]
            before = [p for p in made.published.get(held, ()) if p["ts"] + p["dur"] <= end]
            if before:
                made.arrow(f"v{held}", before[-1], generating)


def _columns(made: Timeline, role: str, lines: Iterable[dict[str, Any]]) -> None:
    """Add the work of a scorer or a critic."""
    for line in lines:
        if line["kind"] == "critic":
            made.slice(role, WORK, f"learn step {line['step']}", line["time"] - line["learn_s"], line["time"])
        if line["kind"] != "column":
            continue
        scored = line["time"] - line["publish_s"]
        began = scored - line["score_s"]
        made.slice(role, WORK, "wait for a request", began - line["wait_s"], began)
        args = {key: line[key] for key in ("tokens", "tokens_per_s", "lag_s", "behind")}
        what = "value" if role.startswith("critic-") else "score"
        made.slice(role, WORK, f"{what} {line['request']}", began, line["time"], **args)
        made.part(role, WORK, "publish", scored, line["time"])


def _events(made: Timeline, role: str, lines: Iterable[dict[str, Any]]) -> None:
    for line in lines:
        kind = str(line.get("kind"))
        what = " ".join(str(line[key]) for key in ("role", "outcome", "reason") if line.get(key))
        made.instant(role, f"{kind} {what}".strip(), line, loud=kind in LOUD)


def _plain(args: dict[str, Any]) -> dict[str, Any]:
    """Make values fit for strict JSON: a number that is not finite becomes text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in args.items()
        if value is not None
    }
