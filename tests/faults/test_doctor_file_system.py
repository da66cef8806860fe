"""`relax-hpc doctor --file-system` on file systems that break a promise: each is named, with what rests on it and keys that exist."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest

from relax_hpc.planning.doctor import file_system, files, load, seen
from relax_hpc.planning.doctor.checks import Check
from relax_hpc.planning.doctor.file_system import RESTS, SECOND, measure
from relax_hpc.planning.doctor.two_nodes import Pulse, Watch
from relax_hpc.recipe import Recipe
from tests.runs import relax_hpc, start, wait_for
from tests.unit.test_docs import key_names
from tools.faults import faultfs
from tools.faults.faultfs import Caches, FaultFS, Rule

LATE = re.compile(r"seen within ([\d.]+) s")


@pytest.fixture(autouse=True)
def mountable() -> None:
    if reason := faultfs.why_not():
        pytest.skip(reason)


@pytest.fixture
def little_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "ROUNDS", 5)


def measured(folder: Path, own: Caches, others: Caches) -> dict[str, Check]:
    """The checks of one mount of `folder` while the second is in another, by name."""
    with (
        FaultFS(folder / "backing", folder / "a", own) as here,
        FaultFS(folder / "backing", folder / "b", others) as there,
    ):
        second = start("doctor", "--file-system", there.mount, "--second")
        try:
            wait_for(lambda: [*(folder / "backing").glob(f"{SECOND}*/opened/file")])
            found = {check.what: check for check in measure(here.mount)}
            said, _ = second.communicate(timeout=60)
        finally:
            second.kill()
    assert second.returncode == 0, said
    assert [*(folder / "backing").iterdir()] == [], "nothing is left"
    assert all(check.rests for check in found.values()), "each says what rests on it"
    return found


def late_s(check: Check) -> float:
    said = LATE.search(check.found)
    assert said, check
    return float(said[1])


@pytest.mark.usefixtures("little_load")
def test_caches_of_a_second_whole_seconds_and_silly_renames_are_told(tmp_path: Path) -> None:
    caches = Caches(attributes_s=1, entries_s=1, negative_s=1, whole_seconds=True, silly_rename=True)
    found = measured(tmp_path, caches, Caches())
    assert "a tick is 1.0 s" in found["times of folders"].found
    assert "leaves '.fuse_hidden" in found["deletion while open"].found
    for what in ("attribute cache of files", "negative lookups"):
        assert found[what].verdict == "note" and 1.0 <= late_s(found[what]) < 2.5, found[what]
    assert 1.0 <= late_s(found["attribute cache of folders"]) < 4.0
    for what in (
        "listing cache",
        "close-to-open",
        "visibility after close",
        "one winner among nodes",
        "flock between nodes",
    ):
        assert found[what].verdict == "ok", found[what]


@pytest.mark.usefixtures("little_load")
def test_caches_of_three_seconds_that_opening_does_not_pass_name_the_keys_to_set(tmp_path: Path) -> None:
    caches = Caches(attributes_s=3, entries_s=3, negative_s=3, listings_s=3, close_to_open=False)
    found = measured(tmp_path, caches, caches)
    for what in (
        "attribute cache of files",
        "attribute cache of folders",
        "negative lookups",
        "listing cache",
        "close-to-open",
    ):
        assert found[what].verdict != "ok" and 3.0 <= late_s(found[what]) < 5.0, found[what]
    assert "async.max_staleness" in found["listing cache"].fix
    assert "weights.transport = 'file'" in found["negative lookups"].fix
    assert "supervision.node_agent_silent_s = 19" in found["close-to-open"].fix
    for what in ("visibility after close", "one winner among nodes"):
        assert found[what].verdict == "ok", found[what]


def test_lost_replies_errors_and_refusals_are_told_by_the_command(tmp_path: Path) -> None:
    with FaultFS(tmp_path / "backing", tmp_path / "mount") as disk:
        disk.rules(
            Rule("link", "/from/link.*>.*/to/", "error-after", 0.02, errno.EEXIST),
            Rule("mkdir", "/to/mkdir", "error-after", 0.02, errno.EEXIST),
            Rule("rename", "/from/rename", "error-before", 0.02, errno.EIO),
            Rule("link", "/x/.*>.*/y/", "error-before", 1.0, errno.EXDEV),
            Rule("flock", "", "error-before", 1.0, errno.ENOTSUP),
        )
        done = relax_hpc("doctor", "--file-system", disk.mount, "--json", code=1)
        disk.rules()
        assert [*disk.backing.iterdir()] == []
    found = {check["what"]: check for check in json.loads(done.stdout)}
    assert found["hard links across folders"]["verdict"] == "failed"
    assert found["hard links across folders"]["found"] == "Invalid cross-device link"
    assert found["flock"]["verdict"] == "failed" and "not supported" in found["flock"]["found"]
    lost = found["lost replies"]
    assert lost["verdict"] == "warning" and "link" in lost["found"] and "mkdir" in lost["found"]
    assert "rename: Input/output error" in found["errors under load"]["found"]
    assert "--second" in found["changes by another node"]["fix"]
    fine = set(found) - {
        "hard links across folders",
        "flock",
        "lost replies",
        "errors under load",
        "changes by another node",
    }
    assert {found[what]["verdict"] for what in fine} == {"ok"} and set(RESTS) >= fine


def test_a_replaced_file_that_can_be_neither_read_nor_closed_ends_no_measurement(tmp_path: Path) -> None:
    """As on GlusterFS, where both say that there is no such file."""
    with FaultFS(tmp_path / "backing", tmp_path / "mount") as disk:
        Pulse(disk.backing / "second").close()
        gone = [Rule(op, "stat/file", "error-before", 1.0, errno.ENOENT) for op in ("read", "close")]
        disk.rules(*gone)
        watch = Watch(disk.mount / "second", 0.1)
        watch.work()
        assert watch.held_error == "No such file or directory" and disk.hits()[-1].op == "close"


def test_what_a_killed_second_left_the_next_one_removes(tmp_path: Path) -> None:
    Pulse(tmp_path / f"{SECOND}killed").close()
    second = start("doctor", "--file-system", tmp_path, "--second")
    try:
        wait_for(
            lambda: [path for path in tmp_path.glob(f"{SECOND}*/opened/file") if path.parts[-3] != f"{SECOND}killed"]
        )
        second.terminate()
        second.communicate(timeout=60)
    finally:
        second.kill()
    assert [*tmp_path.iterdir()] == []


def test_the_keys_that_it_names_exist() -> None:
    text = "".join(Path(module.__file__).read_text() for module in (file_system, files, load, seen))
    known = {*key_names(Recipe)}
    tables = {key.partition(".")[0] for key in known if "." in key}
    named = {key for key in re.findall(r"\b([a-z]+\.[a-z_]+)\b(?!\()", text) if key.partition(".")[0] in tables}
    assert {"weights.transport", "supervision.node_agent_silent_s", "rollout.groups_per_request"} <= named
    assert named <= known
