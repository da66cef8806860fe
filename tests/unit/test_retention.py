"""Room: what counts against the quota, and what may be removed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from relax_hpc.files.run_dir import RunDir
from relax_hpc.records import Finish, Group, Prompt, Sample
from relax_hpc.roles.training.retention import Retention
from relax_hpc.spool.ledger import Dropped, Entry, Ledger, Taken
from relax_hpc.spool.shard_writer import encode
from tests import tiny

NAMES = ["r000000-000", "r000000-001", "r000001-000", "r000001-001", "r000001-001x1", "r000002-000"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Steps 0 and 1 in the ledger (r000001-001 was dropped), r000002-000 waits."""
    run = RunDir(tmp_path)
    run.create()
    commit_dir = run.lease / "000001" / "i000001"
    commit_dir.mkdir(parents=True)
    ledger = Ledger(run, commit_dir)
    ledger.commit(
        Entry(0, 1, 0, (Taken(NAMES[0], 0), Taken(NAMES[1], 0)), dropped=(Dropped(NAMES[3], "stale", NAMES[4]),))
    )
    ledger.commit(Entry(1, 1, 0, (Taken(NAMES[2], 0), Taken(NAMES[4], 1))))
    for k, name in enumerate(NAMES):
        run.shard(name).parent.mkdir(exist_ok=True)
        run.shard(name).write_bytes(b"x" * (100 + k))
    (run.shard(NAMES[0]).parent / ".r000003-000.h5.temporary").write_bytes(b"x" * 5000)
    return run


def retention(
    run: RunDir, keep: str = "needed", quota_bytes: float | None = None, critic: RunDir | None = None
) -> Retention:
    spool = {"keep": keep} | ({"quota_gb": quota_bytes / 1e9} if quota_bytes else {})
    recipe = tiny.recipe(
        spool=spool,
        trainer={"prompts_per_step": 8},
        rollout={"groups_per_request": 4, "max_new_tokens": 16},
        algorithm={"group_size": 2},
    )
    commit_dir = run.lease / "000001" / "i000001"
    return Retention(run, recipe, commit_dir, Ledger(run), context=64, critic=critic)


def test_shards_stay_that_a_critics_older_checkpoint_replays_unless_room_is_short(run: RunDir) -> None:
    critic = RunDir(run.critic)
    for step in (0, 1, 2):
        critic.checkpoint(step).mkdir(parents=True)
        (critic.checkpoint(step) / "DONE").touch()
    room = retention(run, critic=critic)
    room.remove_before(2)
    assert left(run) == set(NAMES)
    (critic.checkpoint(0) / "DONE").unlink()
    room.remove_before(2)
    assert left(run) == {NAMES[2], NAMES[4], NAMES[5]}
    assert room.waits_for_critic() and left(run) == {NAMES[5]}
    assert not room.waits_for_critic(), "no more may go"


def left(run: RunDir) -> set[str]:
    return {p.stem for p in run.shards.rglob("*.h5")}


def test_nothing_goes_that_the_oldest_checkpoint_replays(run: RunDir) -> None:
    room = retention(run)
    room.scan(excluding=())
    assert room.used_bytes == sum(range(100, 106))
    room.remove_before(0)
    assert left(run) == set(NAMES)
    room.remove_before(1)
    assert left(run) == {NAMES[2], NAMES[4], NAMES[5]}
    assert room.used_bytes == 102 + 104 + 105
    room.remove_before(2)
    assert left(run) == {NAMES[5]} and room.used_bytes == 105
    assert os.listdir(run.lease / "000001" / "i000001") == []


def test_keep_all_keeps_all_and_may_change_its_mind(run: RunDir) -> None:
    retention(run, keep="all").remove_before(2)
    assert left(run) == set(NAMES)
    retention(run).remove_before(2)
    assert left(run) == {NAMES[5]}


def test_what_was_removed_is_not_looked_for_again(run: RunDir) -> None:
    room = retention(run)
    room.remove_before(2)
    room.remove_before(1)
    assert room.removed_before == 2


def test_removing_again_after_a_crash_harms_nothing(run: RunDir) -> None:
    retention(run).remove_before(2)
    room = retention(run)
    room.scan(excluding=())
    room.remove_before(2)
    assert room.used_bytes == 105 and left(run) == {NAMES[5]}


def test_a_fenced_trainer_removes_nothing(run: RunDir) -> None:
    room = retention(run)
    folder = run.lease / "000001"
    folder.rename(run.lease / "000001.x.over")
    room.remove_before(2)
    assert left(run) == set(NAMES)


def test_outstanding_shards_are_counted_when_they_are_taken_in(run: RunDir) -> None:
    room = retention(run)
    room.scan(excluding={NAMES[5]})
    assert room.used_bytes == sum(range(100, 105))
    room.add(105)
    assert room.used_bytes == sum(range(100, 106))


def test_the_largest_possible_shard_fits_into_what_is_reserved(run: RunDir) -> None:
    """8 samples of 16 tokens, prompts as long as the context leaves; a real shard of that is not larger."""
    prompt = np.zeros(48, np.int32)
    sample = Sample(np.zeros(16, np.int32), np.ones(16, np.uint8), np.zeros(16, np.float32), [(0, 3)], Finish.LENGTH)
    groups = [Group(Prompt(0, i, "x" * 48, prompt, "1"), [sample, sample]) for i in range(4)]
    assert sum(map(len, encode("r000000-000", groups, {"version": 0}))) <= retention(run).request_bytes


def test_as_many_bytes_are_reserved_for_media_as_a_request_was_seen_to_have(run: RunDir) -> None:
    room = retention(run)
    text = room.request_bytes
    for seen, reserved in ((500, 500), (300, 500), (900, 900)):
        room.reserve_media(seen)
        assert room.request_bytes == text + reserved
    run.shard(NAMES[0]).write_bytes(bytes(text + 5000))
    again = retention(run)
    again.scan(excluding=())
    assert again.request_bytes == text + 5000, "a trainer that starts again looks at the shards there are"


def test_a_batch_is_released_only_when_all_in_generates_and_it_may_become_their_largest(run: RunDir) -> None:
    each = retention(run).request_bytes
    room = retention(run, quota_bytes=1000 + 6.5 * each)
    room.used_bytes = 1000
    assert room.has_room(4) and not room.has_room(5)  # 4 in progress and a batch of 2
    room.used_bytes = 1000 + each
    assert not room.has_room(4)
    assert retention(run).has_room(10**9)
