"""A run whose prompts show pictures: from the files to a policy that sees, killed in between or not."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from PIL import Image

from relax_hpc.files.run_dir import RunDir
from tests.runs import audited, relax_hpc, start, step_now, steps_of, wait_for

STEPS = 24
RECIPE = """
[run]
name = "{name}"
root = "{root}"
steps = {steps}
checkpoint_every = 8

[model]
name = "tiny"
hidden_size = 32
intermediate_size = 64
layers = 2
heads = 2
kv_heads = 1
context = 64
alphabet = "rgby?"
[model.vision]
layers = 2

[algorithm]
name = "grpo"
group_size = 8
entropy_coef = 0.01

[async]
max_staleness = 0

[trainer]
prompts_per_step = 8
learning_rate = 3e-3

[rollout]
workers = 1
groups_per_request = 8
max_new_tokens = 1

[[source]]
prompts = "{root}/colors.jsonl"
media = {{image = "picture"}}
"""


def pictures(folder: Path) -> None:
    """Pictures of one color each, in seven strengths, and the question which one it is."""
    colors = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255), "y": (255, 255, 0)}
    rows = []
    for answer, color in colors.items():
        for strength in range(14, 21):
            name = f"{answer}{strength}.png"
            Image.new("RGB", (32, 32), tuple(part * strength // 20 for part in color)).save(folder / name)
            rows.append({"prompt": "<image>?", "answer": answer, "picture": name})
    (folder / "colors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def recipe(folder: Path, name: str, steps: int = STEPS, text: str = RECIPE) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text.format(root=folder, name=name, steps=steps))
    return path


def state(run: RunDir) -> dict[str, bytes]:
    """The newest checkpoint's weights, moments and random states."""
    files = run.checkpoint(run.checkpoint_steps()[-1]).glob("*.safetensors")
    return {file.name: file.read_bytes() for file in files}


def test_a_model_learns_to_see_and_a_run_that_was_killed_ends_with_the_same_bits(tmp_path: Path) -> None:
    pictures(tmp_path)
    relax_hpc("run", recipe(tmp_path, "straight"))
    straight = RunDir(tmp_path / "straight")
    rewards = [step["reward"] for step in steps_of(straight)]
    assert sum(rewards[-5:]) / 5 > 0.6, f"whoever sees no picture is right a quarter of the time at most: {rewards}"
    audited(straight)

    run, path = RunDir(tmp_path / "killed"), recipe(tmp_path, "killed")
    begun = start("run", path)
    wait_for(lambda: step_now(run) > 10)
    os.kill(begun.pid, signal.SIGKILL)
    begun.wait()
    relax_hpc("run", path)
    audited(run)
    assert state(run).keys() == state(straight).keys() != set()
    assert all(data == state(straight)[name] for name, data in state(run).items())
