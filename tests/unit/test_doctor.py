"""The doctor's checks: each with what it must find wrong, and that nothing is left behind."""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from relax_hpc.cli import app
from relax_hpc.files.errors import RunError
from relax_hpc.files.run_dir import RunDir
from relax_hpc.planning.doctor import files, load, probe, python, room, slurm, two_nodes
from relax_hpc.planning.doctor.checks import Check, worst
from relax_hpc.planning.doctor.examine import checkpoint_s, examine, target
from relax_hpc.planning.doctor.seen import seen
from relax_hpc.recipe import Recipe, dump_recipe, load_recipe
from relax_hpc.slurm.plan import make_plan
from tests.runs import SMALL, write_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe(write_recipe(tmp_path, SMALL + '[slurm]\npartition = "gpu"\n'))


def of(checks: list[Check], what: str) -> Check:
    return next(check for check in checks if what in check.what)


# --- files --------------------------------------------------------------------------------------------------------


def test_this_file_system_can_hold_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SLOW_FSYNC_S", math.inf)  # a disk may be busy with something else
    assert worst(files.semantics(tmp_path, trainer_processes=2)) == "ok"


def test_a_slow_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SLOW_FSYNC_S", 0.0)
    assert of(files.semantics(tmp_path, trainer_processes=1), "fsync").verdict == "warning"


@pytest.mark.parametrize(
    ("call", "what"),
    [("link", "exclusive link"), ("rename", "rename over a file"), ("utime", "modification times"), ("fsync", "fsync")],
)
def test_a_call_that_does_not_work_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, what: str
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, call, refuse)
    found = of(files.semantics(tmp_path, trainer_processes=1), what)
    assert found.verdict == "failed" and "not supported" in found.found and found.fix


def test_a_link_that_replaces_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", os.replace)
    assert of(files.semantics(tmp_path, trainer_processes=1), "exclusive link").verdict == "failed"


@pytest.mark.parametrize(
    ("call", "as_if"),
    [("link", lambda source, target: None), ("rename", lambda source, target: target.touch())],
)
def test_a_name_that_several_processes_get_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, as_if: Callable[[Path, Path], None]
) -> None:
    monkeypatch.setattr(load, "ROUNDS", 20)
    monkeypatch.setattr(os, call, as_if)
    found = of(load.under_load(tmp_path), "one winner")
    assert found.verdict == "failed" and f"{call}-" in found.found


def test_locks_matter_for_several_trainer_processes_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    for processes, verdict in ((1, "note"), (2, "failed")):
        folder = tmp_path / str(processes)
        folder.mkdir()
        assert of(files.semantics(folder, trainer_processes=processes), "flock").verdict == verdict


@pytest.mark.parametrize(("off_s", "verdict"), [(0, "ok"), (10, "warning"), (-100, "failed")])
def test_a_clock_that_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off_s: int, verdict: str) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - off_s)
    assert files.skew(tmp_path).verdict == verdict


def test_scratch_goes_and_says_where_it_could_not_be(tmp_path: Path) -> None:
    with files.scratch(tmp_path / "not" / "there") as folder:
        assert folder.parent == tmp_path
        (folder / "x").mkdir()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunError, match=r"/proc.*run\.root = '/proc/runs'"), files.scratch(Path("/proc/runs")):
        pass


# --- room ---------------------------------------------------------------------------------------------------------


def test_parameters_are_those_of_the_model(tmp_path: Path, recipe: Recipe) -> None:
    save_file({"a": np.zeros((3, 4)), "b": np.zeros(5)}, tmp_path / "m.safetensors", {"format": "pt"})
    on_disk = load_recipe(tmp_path / "small.toml", [f'model={{path="{tmp_path}"}}'])
    assert room.parameters(on_disk) == 17
    assert of(room.inputs(on_disk), "model.path").found.endswith("has no config.json")
    (tmp_path / "m.safetensors").write_bytes(b"x")
    assert room.parameters(on_disk) is None and room.room(on_disk)[0].verdict == "note"


def test_what_is_kept_needs_room(recipe: Recipe, tmp_path: Path) -> None:
    few, many = (room.need(load_recipe(tmp_path / "small.toml", [f"run.keep_checkpoints={n}"])) for n in (1, 3))
    assert few is not None and many is not None and many.checkpoints == 2 * few.checkpoints
    capped = room.need(load_recipe(tmp_path / "small.toml", ["run.steps=1000000", "spool.quota_gb=0.5"]))
    assert capped is not None and capped.shards == 500_000_000
    ppo = load_recipe(
        tmp_path / "small.toml", ["run.keep_checkpoints=1", f"algorithm={{name='ppo', teacher='{tmp_path}'}}"]
    )
    with_critic = room.need(ppo)
    assert with_critic is not None and with_critic.checkpoints == 2 * few.checkpoints
    assert of(room.inputs(ppo), "algorithm.teacher").verdict == "failed"


def test_too_little_room(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize, f_files, f_favail = 1, 4096, 100, 3

    monkeypatch.setattr(os, "statvfs", lambda _: Full)
    assert [(c.what, c.verdict) for c in room.room(recipe)] == [("space", "failed"), ("inodes", "failed")]


INODES = """
import subprocess, sys
from pathlib import Path
from relax_hpc.planning.doctor import room
folder = Path(sys.argv[1])
for option, files in (("nr_inodes=0", 0), ("nr_inodes=50", 0), ("nr_inodes=50", 49)):
    subprocess.run(["mount", "-t", "tmpfs", "-o", option, "tmpfs", str(folder)], check=True)
    for i in range(files):
        (folder / str(i)).touch()
    check = room.inodes(folder, 20)
    print(check.verdict, check.found, sep=": ")
    subprocess.run(["umount", str(folder)], check=True)
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "--map-root-user", "--mount", "true"], capture_output=True, check=False).returncode != 0,
    reason="file systems of our own need root or user namespaces",
)
def test_inodes_that_are_not_counted_that_are_left_and_that_are_used_up(tmp_path: Path) -> None:
    """On real file systems: one that does not count (0 of 0, as btrfs says), one with files left, one that is full of them."""
    command = ["unshare", "--map-root-user", "--mount", sys.executable, "-c", INODES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "note: not counted by this file system",
        "ok: 49 left, about 20 are needed",
        "failed: 0 left",
    ]


def test_rows_of_prompts_that_are_left_out_are_counted(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{i}+1=", "answer": {i or "null"}}}\n' for i in range(5)))
    own = f'[[source]]\nprompts = "{prompts}"\nmissing_answer = "drop"\n'
    made = load_recipe(write_recipe(tmp_path, SMALL[: SMALL.index("[[source]]")] + own))
    found = of(list(examine(made, areas=["files"])), "rows of prompts")
    assert (found.verdict, found.found) == ("note", "source.0: of 5 rows 1 left out without an answer")
    prompts.write_text('{"prompt": 5}\n')
    assert of(room.rows(made, None), "rows").verdict == "failed"


# --- Python -------------------------------------------------------------------------------------------------------


def test_a_library_that_is_missing_or_kills_is_named() -> None:
    import sys

    assert python.libraries(sys.executable, ("json",))[0].verdict == "failed", "no distribution of that name"
    assert python.libraries(sys.executable, ("pydantic",))[0].verdict == "ok"
    found = python.libraries(sys.executable, ("pydantic", "not_there"))[0]
    assert (found.what, found.verdict) == ("not_there", "failed") and "not_there" in found.found
    assert python.libraries("/no/python")[0].verdict == "failed"
    assert python.libraries("/bin/true")[0].verdict == "failed"


# --- Slurm --------------------------------------------------------------------------------------------------------


def cluster(**about: str) -> slurm.Cluster:
    told = {
        "PartitionName": "gpu",
        "State": "UP",
        "MaxTime": "04:00:00",
        "TotalNodes": "2",
        "PriorityTier": "1",
        **about,
    }
    nodes = [slurm.Node(f"n{i}", "idle", 8, 64000, {"gpu": 4, "gpu:a100": 4}) for i in (1, 2)]
    return slurm.Cluster({"gpu": told}, {"gpu": nodes}, {"PreemptType": "preempt/qos", "JobRequeue": "1"})


def verdicts(tmp_path: Path, seen: slurm.Cluster, *sets: str, checkpoint_s: float | None = None) -> list[Check]:
    plan = make_plan(load_recipe(tmp_path / "small.toml", sets))
    return [check for check in slurm.cluster_checks(plan, seen, checkpoint_s) if check.verdict in ("warning", "failed")]


def test_a_recipe_that_fits_passes(recipe: Recipe, tmp_path: Path) -> None:
    assert verdicts(tmp_path, cluster(), "slurm.gpus_per_node=4") == []
    for longest in ("UNLIMITED", "1-00:00:00"):
        assert verdicts(tmp_path, cluster(MaxTime=longest), 'slurm.time="1-00:00:00"') == []
    assert verdicts(tmp_path, cluster(), "slurm.gres=gpu:a100:4", 'slurm.mem="62G"') == []


@pytest.mark.parametrize(
    ("sets", "told", "words"),
    [
        (["slurm.partition=nope"], {}, "no such partition"),
        (['slurm.autoscale={partition="nope"}'], {}, "no such partition"),
        (["slurm.gpus_per_node=8"], {}, "0 of 2 nodes have 1 CPUs, 8 gpu"),
        (["slurm.gpus_per_node=h100:1"], {}, "0 of 2 nodes have 1 CPUs, 1 gpu:h100"),
        (["trainer.nodes=3", "trainer.processes=3"], {}, "2 of 2 nodes have 1 CPUs"),
        (['slurm.mem="64G"'], {}, "0 of 2"),
        (["slurm.cpus_per_task=9"], {}, "9 CPUs"),
        (['slurm.time="04:00:01"'], {}, "slurm.time = '04:00:01'"),
        ([], {"State": "DOWN"}, "it is DOWN"),
        (["trainer.nodes=2", "trainer.processes=2"], {"MaxNodes": "1"}, "trainer.nodes = 2"),
        ([], {"PreemptMode": "REQUEUE", "GraceTime": "30"}, "GraceTime 30 s, slurm.signal_lead_s is 120 s"),
        ([], {"PreemptMode": "SUSPEND", "GraceTime": "300"}, "SUSPEND"),
    ],
)
def test_what_does_not_fit_is_named(
    recipe: Recipe, tmp_path: Path, sets: list[str], told: dict[str, str], words: str
) -> None:
    found = verdicts(tmp_path, cluster(**told), *sets)
    assert found and all(check.expected and check.fix for check in found)
    assert any(words in check.found for check in found), found


def test_nodes_that_are_down_are_named(recipe: Recipe, tmp_path: Path) -> None:
    seen = cluster()
    seen.nodes["gpu"] = [slurm.Node("n1", state, 8, 64000, {}) for state in ("down*", "drained", "idle*")]
    assert any("n1 down*, n1 drained, n1 idle*" in check.found for check in verdicts(tmp_path, seen))


@pytest.mark.parametrize(("took_s", "verdict"), [(10.0, None), (100.0, "warning"), (130.0, "failed")])
def test_a_checkpoint_must_fit_before_the_end(
    recipe: Recipe, tmp_path: Path, took_s: float, verdict: str | None
) -> None:
    found = verdicts(tmp_path, cluster(), checkpoint_s=took_s)
    assert [check.verdict for check in found] == ([verdict] if verdict else [])


def test_checkpoints_are_measured(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert checkpoint_s(run) is None
    run.create()
    lines = [{"kind": "checkpoint", "seconds": s} for s in (1.0, 3.0, None)] + [{"kind": "step", "seconds": 9.0}]
    (run.metrics / "trainer-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert checkpoint_s(run) == 3.0


def test_slurms_words_are_read() -> None:
    assert slurm.gres_of("gpu:a100:4(S:0-1),shard:8") == {"gpu": 4, "gpu:a100": 4, "shard": 8}
    assert slurm.gres_of("(null)") == {} and slurm.gres_of("gpu:4") == {"gpu": 4}
    assert slurm.memory_mb("2G") == 2048 and slurm.memory_mb("500") == 500


# --- what nodes do ------------------------------------------------------------------------------------------------


def test_a_port_answers_who_knows_the_token_and_then_closes() -> None:
    with probe.listener("a" * 64) as port:
        probe.greet("127.0.0.1", port, "a" * 64)
        with pytest.raises(OSError):
            probe.greet("127.0.0.1", port, "b" * 64)
    with pytest.raises(OSError):
        probe.greet("127.0.0.1", port, "a" * 64)


def test_somebody_else_on_the_port_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        import threading

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"x" * 64)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match="somebody else"):
            probe.greet("127.0.0.1", server.getsockname()[1], "a" * 64)
        thread.join()


# --- the command --------------------------------------------------------------------------------------------------


def test_nothing_is_left_and_a_local_root_fails(recipe: Recipe, tmp_path: Path) -> None:
    before = set(tmp_path.rglob("*"))
    path = str(tmp_path / "small.toml")
    done = CliRunner().invoke(app, ["doctor", path, "--only", "files", "--json"])
    assert done.exit_code == 1, done.output
    assert [check["what"] for check in json.loads(done.stdout) if check["verdict"] == "failed"] == ["run.root"]
    done = CliRunner().invoke(app, ["doctor", path, "--only", "files", "--local-root-ok"])
    assert done.exit_code == 0 and "0 failed" in done.stdout, done.output
    assert set(tmp_path.rglob("*")) == before


def test_without_slurm_it_says_so(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = list(examine(recipe, areas=("slurm", "nodes")))
    assert [check.what for check in found if check.verdict == "failed"] == ["commands", "srun"]
    plain = load_recipe(write_recipe(tmp_path))
    assert [check.verdict for check in examine(plain, areas=("slurm", "nodes"))] == ["note", "failed"]


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no recipe and no run"):
        target(tmp_path / "absent.toml")
    done = CliRunner().invoke(app, ["doctor", str(tmp_path), "--only", "moon"])
    assert done.exit_code == 2 and "files, python, slurm, nodes" in done.stderr


def test_a_run_is_looked_at_and_left_as_it_is(recipe: Recipe, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "small")
    run.create()
    run.identity.write_text("{}")
    run.recipe.write_text(dump_recipe(recipe))
    before = set(tmp_path.rglob("*"))
    found, opened = target(run.root, ['slurm.time="02:00:00"'])
    assert opened == run and found.slurm is not None and found.slurm.time == "02:00:00"
    assert worst(examine(found, opened, areas=("files",), local_root_ok=True)) == "ok"
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("cached_s", "verdict", "words"),
    [
        (0.0, "ok", "seen within"),
        (1.4, "note", "within 1."),
        (60.0, "note", "no change by another node was seen in 3 s"),
    ],
)
def test_what_a_client_caches_of_another_nodes_changes_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached_s: float, verdict: str, words: str
) -> None:
    """Through a client that answers stat from what it knows, for so long."""
    known, real = dict[str, tuple[float, object]](), os.stat

    def cached(path: Any, **options: Any) -> object:
        if threading.current_thread() is not threading.main_thread() or not str(path).endswith(("stat/file", "folder")):
            return real(path, **options)
        since, answered = known.get(str(path), (0.0, None))
        if answered is None or time.monotonic() - since > cached_s:
            since, answered = known[str(path)] = time.monotonic(), real(path, **options)
        return answered

    with two_nodes.pulse(tmp_path, "trainer-1"):
        monkeypatch.setattr(two_nodes, "LEAST_S", 3.0)
        monkeypatch.setattr(os, "stat", cached)
        watch = two_nodes.Watch(tmp_path / "pulse-trainer-1", window_s=3.0)
        watch.work()
        monkeypatch.undo()
        found = {check.what: check for check in seen(watch, "n1")}
    for what, check in found.items():
        if "attribute" in what:
            assert check.verdict == verdict and words in check.found, check
        else:
            assert check.verdict == "ok", check


def test_names_that_two_nodes_got_and_files_that_were_not_whole_are_found(tmp_path: Path) -> None:
    with two_nodes.pulse(tmp_path, "trainer-1"):
        watch = two_nodes.Watch(tmp_path / "pulse-trainer-1")
        watch.work()
        assert "none by both" in of(seen(watch, "n1"), "one winner").found and watch.won and watch.about["won"]
        watch.won.append(watch.about["won"][0])
        watch.torn.append("7")
        found = seen(watch, "n1")
    assert of(found, "one winner").verdict == of(found, "visibility").verdict == "failed"
