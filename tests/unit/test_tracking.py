"""Copies of metrics in the files of the real libraries: every step once, whatever kill came between; no key in the run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_run import build
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner
from wandb.proto.wandb_internal_pb2 import Record

from relax_hpc.cli import app
from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import to_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.launch.prepare import need_libraries
from relax_hpc.monitor.tracking import LIBRARIES
from relax_hpc.monitor.tracking.follow import Follower
from relax_hpc.monitor.tracking.messages import VARIABLE
from relax_hpc.monitor.tracking.points import Points
from relax_hpc.recipe import change_on_resume, dump_recipe
from relax_hpc.supervise.tracker import tracker
from relax_hpc.telemetry import iter_metrics, read_metrics
from tests import tiny
from tests.endpoint import SECRET, Endpoint
from tests.runs import wait_for

STEPS = 60
KEYS = {
    "WANDB_API_KEY": "5ec2e7" + "ab" * 17,
    "CLEARML_API_ACCESS_KEY": "5EC2E7ACCESS",
    "CLEARML_API_SECRET_KEY": "5ec2e7hidden",
}
TOOLS = [{"name": "tensorboard"}, {"name": "wandb"}, {"name": "clearml"}]


def make(folder: Path, **tables: Any) -> RunDir:
    """The small run with a recipe that loads."""
    run = build(folder)
    run.recipe.write_text(dump_recipe(tiny.recipe(**tables)))
    run.identity.write_bytes(to_json({"name": "small", "id": "0123456789abcdef"}))
    return run


def go_on(run: RunDir, steps: range) -> None:
    """More steps and requests, as from another attempt: that of the step before is made again."""
    (step,) = [r for r in read_metrics(run.metrics / "trainer-0.jsonl")[0] if r["kind"] == "step"][-1:]
    (request,) = read_metrics(run.metrics / "rollout-0.jsonl")[0][-1:]
    for role, line in (("trainer-0", step), ("rollout-0", request)):
        with (run.metrics / f"{role}.jsonl").open("a") as file:
            for s in (steps[0] - 1, *steps):
                about = (
                    {"step": s, "version": s + 1, "loss": s / 4, "replayed": s < steps[0]}
                    if role == "trainer-0"
                    else {}
                )
                file.write(
                    json.dumps({**line, **about, "time": 100.0 + s + (0.5 if role == "trainer-0" else 0.0)}) + "\n"
                )
            file.write('{"kind": "step", "step": 1')


def start(run: RunDir, told: Endpoint, supervisor: int | None = None) -> subprocess.Popen[bytes]:
    """A follower; of this process by default."""
    about = ["--supervisor", str(supervisor or os.getpid()), "--since", "0"]
    environment = {**os.environ, **KEYS, VARIABLE: told.url}
    command = [sys.executable, "-m", "relax_hpc.monitor.tracking", str(run.root), *about]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def told() -> Iterator[Endpoint]:
    made = Endpoint()
    yield made
    made.close()


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory, told: Endpoint) -> RunDir:
    """A run whose follower was killed while its sinks were open, and started again."""
    notify = {"events": ["outcome", "restart", "collapse"]}
    run = make(tmp_path_factory.mktemp("tracked") / "small", tracking=TOOLS, notify=notify)
    shutil.rmtree(run.tracking, ignore_errors=True)
    go_on(run, range(2, STEPS // 2))
    first = start(run, told)
    wait_for(
        lambda: list(run.tracking.glob("clearml/offline/*/metrics.jsonl")) and list(run.tracking.glob("sent.json"))
    )
    first.kill()
    assert first.wait(30) == -signal.SIGKILL
    tail = run.metrics / "trainer-0.jsonl"
    tail.write_bytes(tail.read_bytes() + b"\n")  # what a telemetry does with a torn line
    (run.metrics / "rollout-0.jsonl").open("ab").write(b"\n")
    go_on(run, range(STEPS // 2, STEPS))
    with (run.metrics / "supervisor.jsonl").open("a") as file:
        file.write('{"kind": "outcome", "time": 200.0, "outcome": "done", "step": 60}\n')
    before = set(run.tracking.glob("clearml/offline/*"))
    second = start(run, told)
    wait_for(lambda: set(run.tracking.glob("clearml/offline/*")) - before)
    second.terminate()
    assert second.wait(60) == 0, second.communicate()[1].decode()
    return run


def test_tensorboard_has_every_step_once_with_the_time_it_was_made(followed: RunDir) -> None:
    events = EventAccumulator(str(followed.tracking / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    loss = events.Scalars("train/loss")
    assert [e.step for e in loss] == list(range(STEPS))
    assert [e.value for e in loss[2:]] == [s / 4 for s in range(2, STEPS)]
    assert [e.wall_time for e in loss[2:]] == [100.5 + s for s in range(2, STEPS)]
    assert [(e.step, round(e.value, 3)) for e in events.Scalars("eval/score")] == [(0, 0.1), (2, 0.3)]
    assert events.Scalars("rollout/generate_s")[-1].value == 1.0 and events.Scalars("rollout/requests")[-1].value == 1.0
    assert events.Scalars("run/lost")[-1].value == 1.0


def wandb_records(path: Path) -> Iterator[Record]:
    """The records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    data, position, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""


def test_wandb_has_one_offline_run_of_the_runs_id_and_every_step_once(followed: RunDir) -> None:
    (path,) = followed.tracking.glob("wandb/offline-run-*/run-*.wandb")
    records = list(wandb_records(path))
    assert [r.run.run_id for r in records if r.HasField("run")][:1] == ["0123456789abcdef"]
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [row["_step"] for row in rows if "train/loss" in row] == list(range(STEPS))
    assert [row["train/loss"] for row in rows if "train/loss" in row][2:] == [s / 4 for s in range(2, STEPS)]
    assert [row["eval/version"] for row in rows if "eval/score" in row] == [0.0, 2.0]


def test_clearml_has_one_offline_session_and_every_step_once(followed: RunDir) -> None:
    (path,) = followed.tracking.glob("clearml/offline/*.zip")
    with zipfile.ZipFile(path) as archive:
        lines = archive.read("metrics.jsonl").decode().splitlines()
        assert json.loads(archive.read("task.json"))["name"] == "small", (
            "a run is called as the directory that it lies in"
        )
    events = [event for line in lines for event in json.loads(line)]
    seen = Counter((e["metric"], e["variant"], e["iter"]) for e in events)
    assert set(seen.values()) == {1}
    assert {i for metric, variant, i in seen if (metric, variant) == ("train", "loss")} == set(range(STEPS))


def test_no_key_is_written_into_the_run(followed: RunDir) -> None:
    files = [path for path in followed.root.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files for key in (*KEYS.values(), SECRET) if key.encode() in path.read_bytes()]


def test_what_happened_is_told_once_by_both_followers_together(followed: RunDir, told: Endpoint) -> None:
    assert told.bodies == ["trainer-0 was lost: killed by signal 9", "done at step 60"]


def test_track_makes_the_same_copy_of_a_run_that_is_over_as_often_as_it_is_asked(followed: RunDir) -> None:
    for _ in range(2):
        result = CliRunner().invoke(app, ["track", str(followed.root), "--set", 'tracking=[{name = "tensorboard"}]'])
        assert result.exit_code == 0 and "tensorboard --logdir" in result.stdout, result.output
        test_tensorboard_has_every_step_once_with_the_time_it_was_made(followed)


def test_track_needs_a_tool_to_copy_to(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["track", str(make(tmp_path / "small").root)])
    assert result.exit_code == 2 and "[[tracking]]" in result.output


def test_a_tool_that_does_not_begin_is_left_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = make(tmp_path / "small", tracking=TOOLS[:1])
    run.tracking.write_text("a file where a folder should be")
    follower = Follower(run, tiny.recipe(tracking=TOOLS[:1]))
    follower.look()
    assert follower.close() == [] and "tensorboard does not begin" in caplog.text


def test_points_are_in_order_of_time_and_a_step_made_again_gives_none(tmp_path: Path) -> None:
    run = make(tmp_path / "small")
    points, follower = Points(), Follower(run, tiny.recipe())
    found = [(role, line, list(points.of(line))) for role, line in follower.lines.new()]
    times = [line["time"] for _, line, _ in found]
    assert times == sorted(times) and {role for role, _, _ in found} == {"trainer-0", "rollout-0", "supervisor"}
    steps = [p for _, _, made in found for p in made if "train/loss" in p.values]
    assert [p.step for p in steps] == [0, 1], "step 1 was made twice"
    assert steps[0].values["rollout/requests"] == 2 and "rollout/requests" in steps[1].values
    assert list(follower.lines.new()) == []


def test_a_follower_whose_supervisor_is_gone_copies_what_there_is_and_leaves(tmp_path: Path, told: Endpoint) -> None:
    run = make(tmp_path / "small", tracking=TOOLS[:1])
    assert start(run, told, supervisor=1).wait(30) == 0
    assert EventAccumulator(str(run.tracking / "tensorboard")).Reload().Scalars("train/loss")


def test_a_follower_that_dies_is_started_again_a_few_times_and_then_left(tmp_path: Path) -> None:
    run = make(tmp_path / "small", tracking=TOOLS[:1])
    recipe = tiny.recipe(tracking=TOOLS[:1], supervision={"max_restarts": 1, "backoff_s": 0.01})
    run.recipe.write_text("not a recipe")
    said: list[tuple[str, Any]] = []
    [follower] = tracker(run, recipe, lambda kind, **about: said.append((kind, about["role"])))

    def given_up() -> bool:
        follower.look_after()
        return [kind for kind, _ in said] == ["restart", "lost", "restart", "lost"]

    wait_for(given_up)
    for _ in range(3):
        follower.look_after()
    follower.end(1.0)
    assert len(said) == 4 and "not TOML" in (run.logs / "tracking.0001.log").read_text()


def test_a_tool_that_is_not_installed_is_named_before_the_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny.recipe(tracking=TOOLS)
    need_libraries(recipe)
    monkeypatch.setitem(LIBRARIES, "clearml", "no_such_library")
    with pytest.raises(
        RunError, match=r"\['clearml'\], for which .* \['no_such_library'\]: pip install 'relax-hpc\[tracking\]'"
    ):
        need_libraries(recipe)


def test_one_table_a_tool_and_a_resumed_run_may_have_others() -> None:
    with pytest.raises(ValueError, match="names one tool twice"):
        tiny.recipe(tracking=[{"name": "wandb"}, {"name": "wandb", "project": "x"}])
    before = tiny.recipe(tracking=TOOLS[:1], run={"root": "/runs"})
    after = change_on_resume(before, ['tracking=[{name = "wandb", mode = "online"}, {name = "clearml"}]'])
    assert [tool.name for tool in after.tracking] == ["wandb", "clearml"]
    none = tiny.recipe(run={"root": "/runs"})
    assert change_on_resume(none, ['tracking=[{name = "clearml"}]']).tracking[0].project == "relax-hpc"


def test_iter_metrics_stops_at_a_line_that_is_half_written(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\nnot json\n{"a": 2}\n{"a": 3')
    assert list(iter_metrics(path)) == [({"a": 1}, 9), ({"a": 2}, 27)]
    assert list(iter_metrics(path, 27)) == [] and list(iter_metrics(tmp_path / "y.jsonl")) == []
