"""Find mutants out: by schedules of the state machine, and by tests.

seed ──► the mutant is put in place, the schedule is played ──► the promise that it broke
test ──► pytest in a process of its own, with the mutant ──► it fails; that it passes without is seen once, for all tests
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tools.faults.model.actors import Violation, installed
from tools.faults.model.mutants import MUTANTS, Mutant, applied
from tools.faults.model.protocol import play

ROOT = Path(__file__).resolve().parents[3]
TEST_S = 30
"""Seconds after which a test that does not end counts as failed."""


def kill(mutant: Mutant, seeds: Iterable[int] = ()) -> tuple[int | str, str] | None:
    """Return what finds a mutant out, a schedule or a test, and the promise that it broke; None if nothing does. What is known
    to find it out is tried first, then the schedules of `seeds`."""
    if isinstance(mutant.killer, str):
        if fails(mutant.killer, mutant):
            return mutant.killer, "the test fails"
    elif mutant.killer is not None:
        seeds = [mutant.killer, *seeds]
    with installed(), applied(mutant):
        for seed in seeds:
            try:
                play(seed)
            except Violation as violation:
                return seed, str(violation).partition(":")[0]
            except Exception as error:  # the machinery's own reading of what the mutant left
                return seed, f"what is there can be read ({type(error).__name__})"
    return None


def fails(test: str, mutant: Mutant) -> bool:
    """Return True if a test fails with a mutant in place."""
    return _tested([test], "-p", "tools.faults.model.mutated", "--mutant", mutant.says)


def fails_without(tests: Iterable[str]) -> bool:
    """Return True if one of these tests fails with nothing in place: then it says nothing of a mutant either."""
    return _tested(sorted({*tests}))


def _tested(tests: Sequence[str], *options: str) -> bool:
    """Run tests in a process of their own; return True if one fails. Raises RuntimeError if they cannot be run."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-x", "--timeout", str(TEST_S), *options, *tests]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.returncode == pytest.ExitCode.TESTS_FAILED


def mutants(seeds: int = 0, schedules: int = 100, which: Sequence[Mutant] = MUTANTS) -> dict[str, Any]:
    """Try mutants by what is known to find each out, then with up to `seeds` schedules each, and the protocol itself with
    `schedules`. Returns figures and a table."""
    states, violations = set[int](), list[str]()
    with installed():
        for seed in range(schedules):
            try:
                play(seed, states)
            except Violation as violation:
                violations.append(f"schedule {seed}: {violation}")
    tests = [mutant.killer for mutant in which if isinstance(mutant.killer, str)]
    if tests and fails_without(tests):
        raise RuntimeError(f"a test fails without a mutant: {tests}")
    table = []
    for mutant in which:
        killer, promise = kill(mutant, range(seeds)) or (None, None)
        table.append({"mutant": mutant.says, "where": mutant.where, "killed_by": killer, "broken_promise": promise})
    fraction = sum(row["killed_by"] is not None for row in table) / max(len(table), 1)
    return {
        "mutants": len(table), "mutants_killed": fraction, "schedules": schedules, "states": len(states),
        "violations": len(violations), "violated": violations, "table": table,
    }  # fmt: skip
