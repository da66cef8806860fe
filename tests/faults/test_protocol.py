"""The protocol on a real directory under an adversary: old listings, lost replies, deaths between any two calls, two
supervisors, zombies, clocks that jump, power that goes. And: an adversary that does not see a missing step is none.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tools.faults.model.actors import installed
from tools.faults.model.killing import ROOT, fails, fails_without, kill
from tools.faults.model.mutants import MUTANTS, Mutant
from tools.faults.model.protocol import Protocol, play

EXAMPLES, EVENTS, SCHEDULES = 60, 30, 60
SEARCHED = 200
"""Schedules that are tried where the known one finds nothing: another Python makes other calls, and the same number another schedule."""
BY_SCHEDULE = [mutant for mutant in MUTANTS if isinstance(mutant.killer, int)]
BY_TEST = [mutant for mutant in MUTANTS if isinstance(mutant.killer, str)]
"""Those that a test finds out, in a process of its own; each is tried by `mutants` in tools/faults/model/killing.py, here a few."""
QUICK = ("test_lease.py", "test_ledger.py", "test_heartbeat_monitor.py")
"""Files of tests that begin without torch and end within a second or two."""


def test_no_promise_is_broken_whatever_fails() -> None:
    Protocol.states.clear()
    chosen = settings(
        max_examples=EXAMPLES, stateful_step_count=EVENTS, deadline=None, derandomize=True, database=None,
        suppress_health_check=[*HealthCheck],
    )  # fmt: skip
    run_state_machine_as_test(Protocol, settings=chosen)
    assert len(Protocol.states) > 1000, "the machine hardly moves"


def test_random_schedules_break_no_promise() -> None:
    with installed():
        for seed in range(SCHEDULES):
            play(seed)


@pytest.mark.parametrize("mutant", BY_SCHEDULE, ids=lambda mutant: mutant.says)
def test_a_protocol_without_one_step_is_found_out(mutant: Mutant) -> None:
    assert kill(mutant, range(SEARCHED)) is not None, f"nothing notices: {mutant.says}"


def test_a_test_finds_a_protocol_without_one_step_out() -> None:
    quick = [mutant for mutant in BY_TEST if any(file in str(mutant.killer) for file in QUICK)]
    assert not fails_without(str(mutant.killer) for mutant in quick)
    assert [mutant.says for mutant in quick[::3] if not fails(str(mutant.killer), mutant)] == []


def test_a_mutant_of_something_else_fails_no_test() -> None:
    """The plugin alone does not."""
    other = next(m for m in BY_TEST if "test_ledger.py" in str(m.killer))
    assert not fails("tests/unit/test_heartbeat_monitor.py", other)


def test_every_mutant_changes_the_code_that_it_is_about_and_something_finds_it_out() -> None:
    """A refactoring that makes one void is an error, and so is the name of a test that is no more."""
    assert len({mutant.says for mutant in MUTANTS}) == len(MUTANTS)
    assert [mutant.says for mutant in MUTANTS if mutant.killer is None] == []
    for mutant in BY_TEST:
        path, _, name = str(mutant.killer).partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()
    for mutant in MUTANTS:
        mutant.source()


def test_a_schedule_plays_the_same_each_time() -> None:
    mutant = next(m for m in MUTANTS if m.says == "a claim does not end with its shard")
    assert kill(mutant, ()) == kill(mutant, ())


def test_a_mutant_that_matches_nothing_is_refused() -> None:
    void = Mutant("nothing", "relax_hpc.files.publish:names", (("no such text", ""),), 0)
    with pytest.raises(LookupError, match="0 times"):
        void.source()
