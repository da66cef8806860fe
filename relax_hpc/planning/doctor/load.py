"""Asks a file system the same of several processes at once, and compares each answer with what is there.

each round, each process:  names of its own    mkdir · link · rename · O_EXCL ─► an error, though it was done, is a lost reply
                           a name for them all  the same calls                 ─► exactly one process may have it

The reply to a call that was carried out can be lost: the client asks again, and hears of the second time. relax_hpc outlives
that, since it looks before it believes an error; a name that two processes got it could not outlive.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from relax_hpc.files.publish import is_there, write_file
from relax_hpc.planning.doctor.checks import Check, failed, ok, warning
from relax_hpc.planning.doctor.files import ELSEWHERE

LOADED_S, ROUNDS = 4.0, 100
"""The load ends after this time, or this many rounds of each process."""
PROCESSES = 4
START_S = 0.3
"""Seconds until all processes have begun."""
CALLS = ("mkdir", "link", "rename", "O_EXCL")
Answer = Literal["yes", "lost", "no"]
"""It was done and said so; it was done, and an error came; somebody else was first."""


@dataclass(slots=True)
class Said:
    """The answers that one process had."""

    calls: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    """Lost replies by call."""
    errors: Counter[str] = field(default_factory=Counter)
    """Errors of calls that were not carried out, by call and error."""
    won: list[str] = field(default_factory=list)
    """The common names that this process got: CALL-ROUND."""


def under_load(folder: Path, seconds: float = LOADED_S) -> list[Check]:
    """Call mkdir, link, rename and O_EXCL from PROCESSES processes for `seconds` at most, and check all answers."""
    own, begin = folder / "load", time.monotonic() + START_S
    for name in ("from", "to"):
        (own / name).mkdir(parents=True)
    with multiprocessing.get_context("fork").Pool(PROCESSES) as pool:
        said = pool.starmap(_work, [(own, p, begin, begin + seconds) for p in range(PROCESSES)], chunksize=1)
    winners = Counter(name for one in said for name in one.won)
    calls, lost, errors = sum(one.calls for one in said), Counter[str](), Counter[str]()
    for one in said:
        lost += one.lost
        errors += one.errors
    lost += _nobodys(own, winners)
    asked = f"{calls} calls by {PROCESSES} processes"
    return [_winners(winners, asked), _lost(lost, asked), _errors(errors, asked)]


def _work(folder: Path, process: int, begin: float, end: float) -> Said:
    """Make the calls of one process."""
    said = Said()
    time.sleep(max(0.0, begin - time.monotonic()))
    for number in range(ROUNDS):
        if time.monotonic() > end:
            break
        for call, common in _calls(process):
            name = f"{call}-{number}" if common else f"{call}-{number}.{process}"
            try:
                answer = _ask(folder, call, name, process, common)
                said.calls += 1
                said.lost[call] += answer == "lost"
                if common and answer != "no":
                    said.won.append(name)
                    if call == "link":  # all try to rename what the winner makes
                        write_file(folder / "from" / f"rename-{number + 1}", b"", durable=False)
            except OSError as error:
                said.errors[f"{call}: {error.strerror}"] += 1
    return said


def _calls(process: int) -> Iterator[tuple[str, bool]]:
    """Yield (call, True if the name is common) for a round; each process has another order."""
    for i in range(len(CALLS)):
        yield from ((CALLS[(i + process) % len(CALLS)], common) for common in (True, False))


def _ask(folder: Path, call: str, name: str, process: int, common: bool) -> Answer:
    """Call, and where the answer is an error, look. Raises OSError if it was neither done nor another was first."""
    source, target = folder / "from" / name, folder / "to" / name
    if call == "rename":
        if not common:
            write_file(source, b"", durable=False)
        target = target.with_name(f"{name}.{process}.mine")
        return _answer(lambda: os.rename(source, target), lambda: is_there(target), FileNotFoundError)
    if call == "link":
        source = source.with_name(f"{name}.{process}.mine")
        write_file(source, b"", durable=False)
        return _answer(lambda: os.link(source, target), lambda: os.stat(source).st_nlink > 1, FileExistsError)
    make = (lambda: os.mkdir(target)) if call == "mkdir" else (lambda: write_file(target, b"", durable=False))
    return _answer(make, lambda: not common and is_there(target), FileExistsError)


def _answer(call: Callable[[], None], done: Callable[[], bool], another: type[OSError]) -> Answer:
    try:
        call()
    except OSError as error:
        if done():
            return "lost"
        if isinstance(error, another):
            return "no"
        raise
    return "yes"


def _nobodys(folder: Path, winners: Counter[str]) -> Counter[str]:
    """Count the common names that are there, and that nobody heard to have made: whose reply was lost."""
    made = (name for name in os.listdir(folder / "to") if "." not in name and name not in winners)
    return Counter(name.partition("-")[0] for name in made)


def _winners(winners: Counter[str], asked: str) -> Check:
    what, twice = "one winner among processes", [name for name, count in winners.items() if count > 1]
    if twice:
        words = f"{len(twice)} of {len(winners)} names were given to several processes: {', '.join(sorted(twice)[:3])}"
        return failed(what, words, "each name for one process", ELSEWHERE)
    return ok(what, f"{asked}; {len(winners)} names for all, each got by one")


def _lost(lost: Counter[str], asked: str) -> Check:
    if not (number := lost.total()):
        return ok("lost replies", f"none; {asked}")
    words = f"{number} of {asked} were carried out and answered by an error ({_counted(lost)})"
    return warning("lost replies", words, "none", "nothing to set: relax_hpc looks before it believes an error; tell the site, other programs may not")  # fmt: skip


def _errors(errors: Counter[str], asked: str) -> Check:
    if not errors:
        return ok("errors under load", f"none; {asked}")
    words = f"{errors.total()} errors besides {asked}: {_counted(errors)}"
    return warning("errors under load", words, "none", "supervision.io_wait_s and supervision.max_restarts say how long a run outlives it: longer, higher")  # fmt: skip


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common(4) if count)
