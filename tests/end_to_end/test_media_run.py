"""A whole run with pictures, from the recipe to the end: they are seen, learned from, kept, and a broken one costs its group."""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from PIL import Image

from relax_hpc import open_run
from relax_hpc.files.run_dir import RunDir
from tests.runs import SMALL, audited, relax_hpc

COLORS = ("red", "green", "blue")
PICTURES = 60


def rows(folder: Path) -> Path:
    """A file of pictures whose color is asked for; the last one is cut off in its middle."""
    rng = np.random.default_rng(0)
    lines = []
    for i in range(PICTURES):
        color = COLORS[i % 3]
        Image.new("RGB", (int(rng.integers(8, 40)), 16), color).save(folder / f"{i}.png")
        lines.append({"prompt": "<image>color?", "image": f"{i}.png", "answer": color[0]})
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(buffer, "PNG")
    (folder / "cut.png").write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
    lines.append({"prompt": "<image>color?", "image": "cut.png", "answer": "r"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "rows.jsonl"


@pytest.mark.parametrize("kept", ["tensors", "source"])
def test_a_run_sees_what_its_prompts_show(tmp_path: Path, kept: str) -> None:
    recipe = tomllib.loads(SMALL.format(root=tmp_path / "runs"))
    recipe["run"] |= {"steps": 7, "checkpoint_every": 4}
    recipe["model"] |= {"heads": 2, "layers": 2, "context": 64, "vision": {}}
    recipe["sft_warm_start"] = {"steps": 60, "batch_size": 16, "learning_rate": 3e-3, "stop_at_loss": 0.05}
    recipe["spool"] = {"media": kept}
    recipe["evaluation"] = {"every": 7, "holdout": 0.2, "prompts": 12}
    recipe["source"] = [{"prompts": str(rows(tmp_path)), "media": {"image": "image"}, "reward": "exact"}]
    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps(recipe))

    relax_hpc("run", path)

    root = tmp_path / "runs" / "small"
    audited(RunDir(root))
    seen = open_run(root).trajectories()
    failed = seen[seen.status == "failed"]
    assert set(failed.reason) == {"the prompt's media cannot be used"} and failed.request.nunique() == 1
    assert seen[seen.status != "failed"].reward.mean() > 0.6, "a third is what a model gets that sees nothing"
