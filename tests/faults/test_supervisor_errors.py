"""No error of the file system ends a supervisor, a leader, a node agent or a rollout job, whichever call it hits, however
often; the duty is done, and each spell of errors is said once."""

from __future__ import annotations

import dataclasses
import errno
import functools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_hpc.files.publish import to_json, write_file
from relax_hpc.recipe import load_recipe
from relax_hpc.slurm import rollout_jobs
from relax_hpc.slurm.chain import Chain
from relax_hpc.slurm.rollout_nodes import RolloutNodes
from relax_hpc.supervise import processes, supervisor
from relax_hpc.supervise.io_retry import IoRetry
from relax_hpc.telemetry import Telemetry
from tools.faults import roles
from tools.faults.calls import CHANGES, inject
from tools.faults.lives import LIVES, PAUSES, SPLIT, prepared
from tools.faults.supervisor_errors import ERRNOS, Call, Failure, each_way, live, scratch, trials


def test_whatever_call_fails_no_supervisor_ends_and_its_duty_is_done() -> None:
    with scratch() as folder:
        tried = list(trials(Path(folder), once=True))
    assert not [str(trial) for trial in tried if trial.result.exit]
    assert len(tried) > 150 and {trial.life for trial in tried} == set(LIVES)
    assert {trial.failure.error for trial in tried} == set(ERRNOS)
    assert {"open", "read", "write", "writev", "fsync", "close", *CHANGES} - {"link", "replace"} <= {
        trial.failure.call.name for trial in tried
    }


def test_a_supervisor_that_tries_nothing_again_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what the other tests here look for is seen where it is."""
    monkeypatch.setattr(IoRetry, "__call__", lambda self, action: action())
    failure = Failure(Call("stat", "lease/*"), 0, errno.EIO)
    found = live("local", tmp_path / "run", [failure])
    assert found.failed == 1 and "Input/output error" in found.exit


@functools.cache
def calls(life: str) -> list[Call]:
    with scratch() as folder:
        return sorted(set(live(life, Path(folder) / "run").calls), key=str)


@st.composite
def spells(draw: st.DrawFn) -> tuple[str, list[Failure]]:
    """A life, and some spells of errors in it, up to 40 calls long."""
    life = draw(st.sampled_from(sorted(LIVES)))
    failures = []
    for _ in range(draw(st.integers(1, 4))):
        way = draw(st.sampled_from(list(each_way(draw(st.sampled_from(calls(life))), draw(st.integers(0, 5))))))
        times = 1 if way.error == errno.ENOENT else draw(st.integers(1, 40))
        failures.append(dataclasses.replace(way, times=times))
    return life, failures


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)
@given(spells())
def test_spells_of_errors_end_no_supervisor(found: tuple[str, list[Failure]]) -> None:
    life, failures = found
    with scratch() as folder:
        result = live(life, Path(folder) / "run", failures)
    assert not result.exit, f"{life}: {[str(failure) for failure in failures]}\n{result.log}"


@pytest.mark.parametrize(
    ("life", "call", "looks"),
    [
        ("local", Call("stat", "lease/*"), {supervisor: {"LEASE_LOOK_S": 0.02}}),
        ("local", Call("open", "heartbeats/rollout-*.json"), {supervisor: {"LEASE_LOOK_S": 60.0}, processes: {"LOOKS_SHARE": 6000}}),
        ("leader", Call("listdir", "heartbeats"), {supervisor: {"LEASE_LOOK_S": 60.0}, rollout_jobs: {"LOOK_S": 0.02}}),
    ],
    ids=["lease", "heartbeats", "node agents"],
)  # fmt: skip
def test_a_spell_is_said_once_though_what_fails_is_looked_at_now_and_then(
    life: str, call: Call, looks: dict[Any, dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tick that is tried again must look again: else it goes well, and the next look says that all fails anew."""
    monkeypatch.setattr(roles, "POLLS", 300)  # a life of many looks
    for module, values in looks.items():
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)
            monkeypatch.setitem(PAUSES.get(module, {}), name, value)  # type: ignore[arg-type]
    said = list[int]()
    with scratch() as folder:
        for occurrence in range(1, 4):
            failure = Failure(call, occurrence, errno.EIO, times=12)
            result = live(life, Path(folder) / f"run{occurrence}", [failure])
            assert not result.exit, f"{failure}: {result.exit}\n{result.log}"
            said.append(max(result.said.values(), default=0))
    assert max(said) == 1


def test_a_folder_that_cannot_be_listed_is_an_error_and_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path.glob finds nothing where it may not look: all node agents would be silent, a run would have made no step."""
    run = prepared(tmp_path / "run", *SPLIT)
    recipe = load_recipe(run.recipe)
    assert recipe.slurm is not None
    run.ledger_entry(3).parent.mkdir(exist_ok=True)
    write_file(run.ledger_entry(3), to_json({}))
    (run.ledger / "stray").touch()
    telemetry, chain = Telemetry(run, "supervisor", 0), Chain(run, recipe.slurm, "7")
    assert chain._steps() == 4
    faults = inject(monkeypatch, run.root)
    faults.error, faults.rule = errno.EACCES, lambda n, call, path: "before" if call in ("listdir", "scandir") else None
    for act in (lambda: RolloutNodes(run, recipe, telemetry), chain._steps):
        with pytest.raises(PermissionError):
            act()
