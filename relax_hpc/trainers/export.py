"""A checkpoint as a Hugging Face model directory."""

from __future__ import annotations

import shutil
from pathlib import Path

from relax_hpc.run_dir import RunError, open_existing


def export_checkpoint(run: Path, output: Path, step: int | None = None) -> str:
    """Write checkpoint `step` (the newest by default) of `run` to `output`; says what was written. Raises RunError."""
    opened = open_existing(run)
    steps = opened.checkpoint_steps()
    chosen = steps[-1] if step is None and steps else step
    if chosen not in steps:
        raise RunError(f"'{run}' has no checkpoint of step {chosen}: it has {steps}")
    if output.exists():
        raise RunError(f"'{output}' exists: choose another directory")
    output.mkdir(parents=True)
    for path in opened.model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy2(path, output)
    shutil.copy2(opened.checkpoint(chosen) / "model.safetensors", output)
    return f"step {chosen} of {opened.root.name} is in {output}: AutoModelForCausalLM.from_pretrained('{output}')"
