"""Kill, stop and refuse a real run at single calls of its commits: nothing is lost, nothing twice, the same bits at the end.

This is a cut: tools/bench/faults.py meets each call of each commit, in four kinds of runs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relax_hpc.files.run_dir import RunDir
from tools.faults import commits, faultfs, schedules
from tools.faults.commits import ELSEWHERE, KINDS
from tools.faults.faultfs import Hit
from tools.faults.scenes import SCENES, lost_replies_of, play, points_of

CUT = (
    "ledger entry: link {i}/.{n}.json.{h} > ledger/{n}/{n}.json: kill-after",
    "latest.json: rename {i}/.latest.json.{h} > weights/latest.json: kill-before",
    "samples in the loss: write metrics/trainer-0.trained.jsonl: kill-half",
    "checkpoint: rename {i}/checkpoint-{n} > checkpoints/step-{n}: kill-before",
    "claim: rename requests/open/{r}.a{n}.v{n} > requests/claimed/{any}/{r}.a{n}.v{n}: kill-after",
    "ledger entry: write {i}/.{n}.json.{h}: stop-after",
)
"""The most telling points of the plain run."""


def changes(*texts: str) -> list[Hit]:
    """The log of these changes: "op path" or "op path>target"."""
    words = [(op, *path.partition(">")[::2]) for op, path in (text.split(" ", 1) for text in texts)]
    return [Hit(0.0, op, path, target, "note", 0, 0, 1, "") for op, path, target in words]


@pytest.mark.quick
def test_a_change_that_no_kind_of_commit_names_is_found():
    known = changes("create /r/outcome.json", "write /.r.0a1b.new/run.json", "rename /.r.0a1b.new>/r")
    assert [hit.path for hit in schedules.unknown(known, KINDS)] == ["/r/outcome.json"], (
        "what is published is never created"
    )
    entry = "lease/000001/i000002/.00000003.json.0f"
    whole = changes(f"create /r/{entry}", f"write /r/{entry}", f"link /r/{entry}>/r/ledger/0000/00000003.json")
    assert not [*schedules.unknown(whole, KINDS)]
    without = [kind for kind in KINDS if kind.name != "ledger entry"]
    assert len([*schedules.unknown(whole, without)]) == 3
    assert [*schedules.unknown(changes("rename /r/x>/r/ledger/0000/00000003.json"), KINDS)]


@pytest.mark.quick
def test_every_path_of_a_run_has_a_kind_of_commit_or_a_reason():
    run = RunDir("/r")
    paths = {
        name: str(path.relative_to(run.root))
        for name, path in vars(run).items()
        if isinstance(path, Path) and path != run.root
    }
    targets = [call.path.rpartition(" > ")[2] for kind in KINDS for call in kind.calls]
    named = {name for name, path in paths.items() if any(re.match(rf"{path}(/|$)", target) for target in targets)}
    assert paths.keys() - named == ELSEWHERE.keys(), "a path without a schedule, or a reason that is none"


@pytest.mark.quick
def test_every_scene_has_points_and_every_kind_a_scene():
    assert {kind.scene for kind in KINDS} == SCENES.keys()
    together = [point for scene in SCENES for batch in points_of(scene) for point in batch]
    assert len(together) >= 200
    assert {kind.name for kind in KINDS} == {point.kind.name for point in together} | {
        kind.name for kind in KINDS if kind.begins in ("run", "rare")
    }
    assert {str(point) for point in together} >= {*CUT}
    names = [kind.name for kind in commits.KINDS]
    assert len(names) == len({*names})


def test_a_run_survives_faults_at_its_commits_and_ends_with_the_same_bits(tmp_path):
    if reason := faultfs.why_not():
        pytest.skip(reason)
    kills = [batch for batch in points_of("plain") if str(batch[0]) in CUT]
    replies = [
        batch for batch in lost_replies_of("plain") if batch[0].kind.name in ("ledger entry", "claim", "manifest")
    ]
    found = play("plain", tmp_path, kills, replies, storm=10)
    assert (found.lost, found.twice, found.torn, found.missed, found.unknown) == ([], [], [], [], [])
    assert found.points >= len(CUT) and found.errors >= 10 + len(replies)
    assert found.bit_identical  # that one bit would be seen: tests/chaos, test_one_bit_of_one_token_…
