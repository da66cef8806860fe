"""The ledger: one entry a step, whoever comes first; a superseded incarnation commits nothing."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.files.errors import Damaged
from relax_hpc.files.run_dir import RunDir
from relax_hpc.spool.ledger import Dropped, Entry, Ledger, Taken


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    return run


def incarnation(run: RunDir, number: int) -> Path:
    folder = run.lease / "000001" / f"i{number:06d}"
    folder.mkdir(parents=True)
    return folder


def entry(step: int, number: int) -> Entry:
    return Entry(
        step, number, 0, (Taken("r000000-000", 3), Taken("r000000-001x1", 4)), {"r000000-000/1": "failed: ü"},
        (Dropped("r000000-001", "stale", "r000000-001x1"),),
    )  # fmt: skip


def test_an_entry_comes_back_as_it_went(run: RunDir) -> None:
    ledger = Ledger(run, incarnation(run, 1))
    assert ledger.find(1234) is None
    committed = ledger.commit(entry(1234, 1))
    assert Ledger(run).find(1234) == committed == entry(1234, 1).__class__.from_json(committed.to_json())


def test_a_flipped_bit_anywhere_in_an_entry_changes_nothing_that_it_says_or_is_found(run: RunDir) -> None:
    committed = Ledger(run, incarnation(run, 1)).commit(entry(0, 1))
    path = run.ledger_entry(0)
    whole, found = path.read_bytes(), 0
    for place in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
            try:
                assert Ledger(run).find(0) == committed, (place, bit)
            except Damaged as error:
                assert f"'{path}'" in str(error) and "from a copy" in str(error)
                found += 1
    assert found > 0.9 * 8 * len(whole.replace(b" ", b""))


def test_an_entry_with_another_layout_says_the_same(run: RunDir) -> None:
    """Somebody's tool wrote it anew, with other spaces and another order of keys."""
    committed = Ledger(run, incarnation(run, 1)).commit(entry(0, 1))
    path = run.ledger_entry(0)
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    assert Ledger(run).find(0) == committed


def test_who_comes_second_adopts(run: RunDir) -> None:
    first = Ledger(run, incarnation(run, 1)).commit(entry(0, 1))
    second = Ledger(run, incarnation(run, 2))
    assert second.commit(Entry(0, 2, 1, (Taken("r000009-000", 0),))) == first
    assert second.find(0) == first


def test_a_fenced_incarnation_cannot_commit(run: RunDir) -> None:
    commit_dir = incarnation(run, 1)
    ledger = Ledger(run, commit_dir)
    ledger.commit(entry(0, 1))
    commit_dir.rename(commit_dir.with_name("i000001.over"))
    with pytest.raises(FileNotFoundError):
        ledger.commit(entry(1, 1))
    with pytest.raises(FileNotFoundError):
        ledger.commit(entry(0, 1))
    assert [p.name for p in run.ledger.rglob("*") if p.is_file()] == ["00000000.json"]


def _commit(root: Path, number: int, results: Any) -> None:
    commit_dir = RunDir(root).lease / "000001" / f"i{number:06d}"
    results.put(
        [(step, Ledger(RunDir(root), commit_dir).commit(entry(step, number)).incarnation) for step in range(30)]
    )


def test_processes_that_race_agree_on_every_entry(run: RunDir) -> None:
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = []
    for number in range(1, 5):
        incarnation(run, number)
        processes.append(context.Process(target=_commit, args=(run.root, number, results)))
    for process in processes:
        process.start()
    answers = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join(30)
    assert all(a == answers[0] for a in answers)
    assert len(list(run.ledger.rglob("*.json"))) == 30
