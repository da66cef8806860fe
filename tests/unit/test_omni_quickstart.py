"""The omni quickstart in small: its data script, what is held out, the control, and a few steps of the recipe itself."""

from __future__ import annotations

import importlib.util
import json
import tomllib
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import tomli_w
from PIL import Image

from relax_hpc import open_run
from relax_hpc.files.run_dir import RunDir
from tests.runs import ROOT, audited, relax_hpc

FEWER = 12
RECIPE = ROOT / "recipes" / "quickstart-omni.toml"
KINDS = ("text", "image", "audio", "video", "mixed")
WAYS = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "omni"
    found = importlib.util.spec_from_file_location("omni_rows", ROOT / "examples" / "omni_rows.py")
    assert found and found.loader
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    script.make(folder, fewer=FEWER)
    return folder


def rows(data: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]


def shown(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("image", "audio", "video"))


def voice(name: str) -> str:
    """The variant of espeak-ng that speaks a file."""
    return name.split("+", 1)[1].rsplit("-", 2)[0]


def test_what_is_asked_was_never_learned(data: Path) -> None:
    assert not {row["prompt"] for row in rows(data, "text-train")} & {row["prompt"] for row in rows(data, "text-test")}
    for key in ("image", "video", "audio"):
        learned = [row[key] for kind in (key, "mixed") for row in rows(data, f"{kind}-train") if key in row]
        asked = [row[key] for kind in (key, "mixed") for row in rows(data, f"{kind}-test") if key in row]
        assert learned and asked and not {*learned} & {*asked}, key
        if key == "audio":
            assert not {*map(voice, learned)} & {*map(voice, asked)}


def test_files_are_what_their_rows_say(data: Path) -> None:
    for row in rows(data, "image-test"):
        with Image.open(data / row["image"]) as scan:
            assert scan.size == (8, 8) and scan.mode == "L" and np.asarray(scan).max() > 150
    for row in rows(data, "audio-test"):
        samples, rate = soundfile.read(data / row["audio"])
        assert 0.1 < len(samples) / rate < 2 and np.abs(samples).max() > 0.02
    for row in rows(data, "video-test"):
        with av.open(data / row["video"]) as film:
            frames = [frame.to_ndarray(format="gray").astype(float) for frame in film.decode(video=0)]
        centers = [np.argwhere(frame > frame.mean() + frame.std()).mean(0) for frame in frames]
        moved = centers[-1] - centers[0]
        assert len(frames) == 4
        np.testing.assert_allclose(moved, np.array(WAYS[row["answer"]]) * 15, atol=2.5)


def test_the_control_gives_each_row_the_media_of_another_one(data: Path) -> None:
    for kind in KINDS[1:]:
        asked, control = rows(data, f"{kind}-test"), rows(data, f"{kind}-shuffled")
        assert [(r["prompt"], r["answer"]) for r in control] == [(r["prompt"], r["answer"]) for r in asked]
        assert sorted(map(str, map(shown, control))) == sorted(map(str, map(shown, asked)))
        others = [shown(a) != shown(c) for a, c in zip(asked, control, strict=True)]
        assert np.mean(others) > 0.9, "of mixed rows, two may show the same"


def test_a_cut_of_the_quickstart_learns_and_scores_each_source(data: Path, tmp_path: Path) -> None:
    recipe = tomllib.loads(RECIPE.read_text())
    recipe["run"] |= {"root": str(tmp_path / "runs"), "steps": 2, "checkpoint_every": 2}
    recipe["sft_warm_start"] |= {"steps": 3, "batch_size": 16}
    recipe["trainer"] |= {"prompts_per_step": 10}
    recipe["rollout"] |= {"groups_per_request": 5}
    recipe["evaluation"]["every"] = 2
    for source in (*recipe["source"], *recipe["evaluation"]["source"]):
        source["prompts"] = str(data / Path(source["prompts"]).name)
    for source in recipe["evaluation"]["source"]:
        source["limit"] = 8
    path = tmp_path / "omni.toml"
    path.write_text(tomli_w.dumps(recipe))

    relax_hpc("run", path)

    root = tmp_path / "runs" / recipe["run"]["name"]
    audited(RunDir(root))
    run = open_run(root)
    scored = run.eval_sources()
    assert {*scored.name} == {f"{kind}-test" for kind in KINDS} and {*scored.version} == {0, 2}
    assert {*run.trajectories().status} <= {"trained", "filtered", "evaluation"}
