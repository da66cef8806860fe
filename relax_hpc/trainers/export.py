"""A checkpoint as a Hugging Face model directory, and models between Hugging Face and Megatron-core."""

from __future__ import annotations

import shutil
from pathlib import Path

from relax_hpc import seals
from relax_hpc.run_dir import RunError, open_existing

DISTRIBUTED = ".metadata"
"""The index of a Megatron-core checkpoint."""


def export_checkpoint(run: Path, output: Path, step: int | None = None) -> str:
    """Write checkpoint `step` (the newest by default) of `run` to `output`; says what was written. Raises RunError."""
    opened = open_existing(run)
    steps = opened.checkpoint_steps()
    chosen = steps[-1] if step is None and steps else step
    if chosen not in steps:
        raise RunError(f"'{run}' has no checkpoint of step {chosen}: it has {steps}")
    if output.exists():
        raise RunError(f"'{output}' exists: choose another directory")
    checkpoint = opened.checkpoint(chosen)
    compare_weights(checkpoint)
    output.mkdir(parents=True)
    if (checkpoint / DISTRIBUTED).exists():
        from relax_hpc.trainers.megatron.convert import to_hugging

        to_hugging(checkpoint, opened.model, output)
    else:
        for path in opened.model.iterdir():
            if path.suffix != ".safetensors":
                shutil.copy2(path, output)
        shutil.copy2(checkpoint / "model.safetensors", output)
    return f"step {chosen} of {opened.root.name} is in {output}: AutoModelForCausalLM.from_pretrained('{output}')"


def compare_weights(checkpoint: Path) -> None:
    """Compare the files of a run's checkpoint that its weights are read from. Raises RunError naming one that is damaged."""
    distributed = (checkpoint / DISTRIBUTED).exists()
    try:
        seals.compare_all(checkpoint, None if distributed else ["model.safetensors"])
    except seals.DamagedCheckpoint as error:
        raise RunError(f"{error}; choose another checkpoint with --step, or put the file back from a copy") from error


def convert(source: Path, output: Path, model: Path | None = None) -> str:
    """A Hugging Face directory as a Megatron-core checkpoint, or the other way round; says what was written. Raises RunError.

    `model`: where config.json and the tokenizer of a checkpoint are, when not beside it.
    """
    if not source.is_dir():
        raise RunError(f"'{source}' is not a directory: a Hugging Face model or a Megatron-core checkpoint is expected")
    if output.exists():
        raise RunError(f"'{output}' exists: choose another directory")
    from relax_hpc.trainers.megatron.convert import to_hugging, to_megatron

    output.mkdir(parents=True)
    try:
        if (source / DISTRIBUTED).exists():
            to_hugging(source, model or source, output)
            return f"'{output}' is a Hugging Face model: AutoModelForCausalLM.from_pretrained('{output}')"
        to_megatron(source, output)
    except RunError:
        shutil.rmtree(output)  # half a model is none
        raise
    return f"'{output}' is a Megatron-core checkpoint (torch_dist)"
