"""The rules of the Trace Event Format that a viewer needs, as far as relax_hpc uses it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def read(path: Path) -> list[Event]:
    """The events of a trace that keeps the rules. Fails on NaN, which no viewer reads."""
    trace = json.loads(path.read_text(), parse_constant=_refuse)
    events: list[Event] = trace["traceEvents"]
    named = {
        (e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name" and e["args"]["name"]
    }
    for event in events:
        assert event["ph"] in "XMiCsf" and isinstance(event["name"], str), event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int), event
        assert event["ts"] >= 0 and (event["ph"] != "X" or event["dur"] >= 0), event
        assert (event["pid"], event["tid"]) in named, event
        assert event["ph"] != "i" or event["s"] in "gpt", event
        assert event["ph"] != "C" or all(isinstance(v, int | float) for v in event["args"].values()), event
    assert [e["ts"] for e in events if e["ph"] != "M"] == sorted(e["ts"] for e in events if e["ph"] != "M")
    slices = tracks(events)
    for track in slices.values():
        _nests(track)
    _arrows_are_bound(events, slices)
    return events


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def tracks(events: list[Event]) -> dict[tuple[int, int], list[Event]]:
    """Slices by process and thread."""
    found: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


def _nests(track: list[Event]) -> None:
    """Slices of a thread lie in one another or apart: half over another they are drawn wrong."""
    open_until: list[float] = []
    for event in track:
        begin, end = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1] <= begin + 1e-3:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 1e-3, event
        open_until.append(end)


def _arrows_are_bound(events: list[Event], slices: dict[tuple[int, int], list[Event]]) -> None:
    """Each has one tail and one head, not earlier, both within a slice of their threads."""
    ends: dict[tuple[int, str], dict[str, Event]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            assert event["ph"] not in ends[event["id"], event["cat"]], event
            ends[event["id"], event["cat"]][event["ph"]] = event
            track = slices[event["pid"], event["tid"]]
            assert any(s["ts"] <= event["ts"] <= s["ts"] + s["dur"] for s in track), event
    for pair in ends.values():
        assert set(pair) == {"s", "f"} and pair["s"]["ts"] <= pair["f"]["ts"] and pair["f"]["bp"] == "e", pair
