"""A supervisor outlives every error of its file system: each call of its life is made to fail, with each error, once and
for several calls in a row.

    calm life ──► its calls, by kind of file ──► a life for each (call, file, error): its duty is done, nothing exits
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import itertools
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest

from tools.faults.calls import CHANGES, inject
from tools.faults.lives import LIVES, hasten

ERRNOS = (
    errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EACCES, errno.ETIMEDOUT, errno.EROFS, errno.EINTR, errno.EDQUOT, errno.ENOENT,
)  # fmt: skip
LOOKS = ("open", "stat", "listdir", "scandir")
"""Calls of which "no such file" may be the answer for a moment, from a client's cache of names."""
TOLD_BY_OTHERS = re.compile(r"heartbeats/[^.].*json|checkpoints/.|outcome.json|stop|weights/latest.json")
"""Files that others make: one of our own that is not there is how a superseded process is fenced."""
LOST_TOO = (*CHANGES, "write", "writev", "fsync", "utime", "chmod")
"""Calls that change something: their reply may be lost."""
IN_A_ROW = 4
OCCURRENCES = 2
"""Calls of one kind in one life of which each is tried."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a life, by the kind of its file: numbers and unique parts of names are left out."""

    name: str
    file: str

    def __str__(self) -> str:
        return f"{self.name} {self.file}"


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that fails, and as many after it as make `times` in a row."""

    call: Call
    occurrence: int
    error: int
    how: str = "before"
    times: int = 1

    def __str__(self) -> str:
        row = f", {self.times} in a row" if self.times > 1 else ""
        return f"{self.call} ({self.occurrence}): {errno.errorcode[self.error]} {self.how}{row}"


@dataclass(slots=True)
class Result:
    """How a life went."""

    calls: list[Call] = field(default_factory=list)
    failed: int = 0
    """Calls that failed."""
    exit: str = ""
    """What ended it before its duty was done; empty where nothing did."""
    said: Counter[str] = field(default_factory=Counter)
    """Thread -> spells of errors that it reported."""
    log: str = ""


def kind(root: Path, path: str) -> str:
    """The kind of a file: its path in the run, without numbers and unique parts."""
    return re.sub(r"[0-9a-f]{8,}|\d+|\.\w{8}(?=$)", "*", os.path.relpath(path, root))


def live(name: str, root: Path, failures: Sequence[Failure] = ()) -> Result:
    """Live one life in `root` with these failures; nothing is raised."""
    result, waiting, left = Result(), list(failures), Counter[Failure]()

    def rule(number: int, call: str, path: str) -> str | None:
        made = Call(call, kind(root, path))
        occurrence = result.calls.count(made) if waiting else 0
        result.calls.append(made)
        for failure in [f for f in waiting if f.call == made and f.occurrence == occurrence]:
            waiting.remove(failure)
            left[failure] = failure.times
        for failure in [f for f, times in left.items() if times > 0]:
            left[failure] -= 1
            if failure.error == errno.ENOENT and not may_be_missing(made):
                continue
            result.failed += 1
            faults.error = failure.error
            return failure.how
        return None

    with watched(result), pytest.MonkeyPatch.context() as patch:
        hasten(patch)
        faults = inject(patch, root)
        faults.rule = rule
        try:
            LIVES[name](root, faults, patch)
        except BaseException as error:
            result.exit = f"{type(error).__name__}: {error}"
    if not result.exit:
        said_again = [thread for thread, times in result.said.items() if times > len(failures)]
        result.exit = "it printed a traceback" if "Traceback" in result.log else ""
        result.exit = result.exit or (f"{said_again} said it more than once" if said_again else "")
    return result


@contextlib.contextmanager
def watched(result: Result) -> Iterator[None]:
    """Note what is logged and printed meanwhile, by any thread; give signals back to whoever handled them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)}
    printed, logger = io.StringIO(), logging.getLogger()
    handler, handlers, level = logging.StreamHandler(printed), logger.handlers, logger.level
    handler.addFilter(lambda record: not result.said.update([record.threadName or ""] if record.name == "io" else []))
    logger.handlers = [handler]
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            yield
    finally:
        logger.handlers, logger.level = handlers, level
        result.log = printed.getvalue()
        for number, handling in before.items():
            signal.signal(number, handling)


def may_be_missing(call: Call) -> bool:
    return call.name in LOOKS and TOLD_BY_OTHERS.match(call.file) is not None


def each_way(call: Call, occurrence: int) -> Iterator[Failure]:
    """Yield the ways in which a call can fail: each error, before it and as a lost reply, once and in a row."""
    hows = ["before"]
    if call.name in LOST_TOO:
        hows.append("lost")
    if call.name in CHANGES:
        hows.append("again")
    for error in ERRNOS if may_be_missing(call) else ERRNOS[:-1]:
        for how in hows:
            for times in (1, IN_A_ROW) if error != errno.ENOENT else (1,):  # a name that one cache lacks
                yield Failure(call, occurrence, error, how, times)


@dataclass(frozen=True, slots=True)
class Trial:
    """A life with one failure, and how it went."""

    life: str
    failure: Failure
    result: Result

    def __str__(self) -> str:
        return f"{self.life}: {self.failure}: {self.result.exit or 'its duty is done'}"


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Make a folder for runs, in memory where that is a file system: nothing here depends on a disk."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def supervisor_errors(budget_s: float = 300.0, lives: Sequence[str] = tuple(LIVES)) -> dict[str, int]:
    """Try the failures of all calls of these lives, until `budget_s` is over.

    Returns {"errors": calls that failed, "supervisor_exits": lives that ended before their duty was done}.
    """
    deadline, errors, exits = time.monotonic() + budget_s, 0, 0
    with scratch() as folder:
        for trial in trials(Path(folder), lives):
            errors += trial.result.failed
            if trial.result.exit:
                exits += 1
                print(trial, file=sys.stderr, flush=True)
            if time.monotonic() > deadline:
                break
    return {"errors": errors, "supervisor_exits": exits}


def trials(folder: Path, lives: Sequence[str] = tuple(LIVES), *, once: bool = False) -> Iterator[Trial]:
    """Live a life in `folder` for each failure of each call: every call with one error, then with the next.

    once: each call is tried in one of the lives that make it, with one error.
    """
    calm = {life: Counter(live(life, folder / f"calm-{life}").calls) for life in lives}
    for number, (life, failure) in enumerate(spread(calm) if once else in_turn(calm)):
        root = folder / f"run{number:06d}"
        yield Trial(life, failure, live(life, root, [failure]))
        shutil.rmtree(root, ignore_errors=True)  # a thread of a leader that ended may still write


def in_turn(calm: Mapping[str, Counter[Call]]) -> Iterator[tuple[str, Failure]]:
    """Yield (life, failure) for all calls of all lives, the first OCCURRENCES of each kind."""
    ways = [
        (life, list(each_way(call, occurrence)))
        for life, calls in calm.items()
        for call, count in calls.items()
        for occurrence in range(min(count, OCCURRENCES))
    ]
    for turn in range(max(len(failures) for _, failures in ways)):
        for place, (life, failures) in enumerate(ways):
            if turn < len(failures):
                yield life, failures[(turn + 7 * place) % len(failures)]  # neighbors get errors of several kinds


def spread(calm: Mapping[str, Counter[Call]]) -> Iterator[tuple[str, Failure]]:
    """Yield (life, failure) once for each call, in the life that has had the fewest."""
    tried = Counter[str]()
    for place, call in enumerate(dict.fromkeys(itertools.chain(*calm.values()))):
        life = min((life for life in calm if call in calm[life]), key=tried.__getitem__)
        tried[life] += 1
        failures = list(each_way(call, 0))
        yield life, failures[-1 if may_be_missing(call) else 7 * place % len(failures)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget-s", type=float, default=300.0, help="seconds after which no further error is tried")
    parser.add_argument("--lives", nargs="*", default=list(LIVES), choices=LIVES)
    arguments = parser.parse_args()
    print(json.dumps(supervisor_errors(arguments.budget_s, arguments.lives)))


if __name__ == "__main__":
    main()
