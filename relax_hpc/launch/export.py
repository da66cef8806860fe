"""Export of a checkpoint as a Hugging Face model; of an adapter's, as PEFT's folder or with the adapter merged.

checkpoint ── or RUN/reference + its adapter ──► OUTPUT: config.json, tokenizer, model.safetensors
an adapter's checkpoint ──► OUTPUT: adapter_config.json, adapter_model.safetensors, and base/ where no other folder has it
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoConfig

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json, to_json
from relax_hpc.files.run_dir import RunDir, open_existing
from relax_hpc.media.families import family_of
from relax_hpc.recipe import load_recipe
from relax_hpc.recipe.tables.model import PathModel
from relax_hpc.trainers.export import DISTRIBUTED, DTYPES, compare_weights, said_dtype, say_dtype

if TYPE_CHECKING:
    from torch import Tensor


def export_checkpoint(
    run: Path, output: Path, step: int | None = None, dtype: str | None = None, adapter: bool = False
) -> str:
    """Write checkpoint `step` (the newest by default) of `run` to `output`; returns a line that says so. Raises RunError.

    `dtype`: one of DTYPES; by default that of the model's config.json, else float32, which the checkpoint has. `adapter`:
    write the adapter of a run with [trainer.lora] alone, as PEFT's folder.
    """
    if dtype not in (None, *DTYPES):
        raise RunError(f"--dtype '{dtype}': expected one of {', '.join(DTYPES)}")
    opened = open_existing(run)
    steps = opened.checkpoint_steps()
    chosen = steps[-1] if step is None and steps else step
    if chosen not in steps:
        raise RunError(f"'{run}' has no checkpoint of step {chosen}: it has {steps}")
    if output.exists():
        raise RunError(f"'{output}' exists: choose another directory")
    checkpoint = opened.checkpoint(chosen)
    compare_weights(checkpoint)
    said = said_dtype(read_json(opened.model / "config.json") or {})
    written = dtype or (said if said in DTYPES else "float32")
    if adapter:
        return _export_adapter(opened, checkpoint, output, written)
    output.mkdir(parents=True)
    if (checkpoint / DISTRIBUTED).exists():
        from relax_hpc.trainers.megatron.export.convert import to_hugging

        to_hugging(checkpoint, opened.model, output, written, _untrained(opened, written))
    else:
        from relax_hpc.launch import adapters
        from relax_hpc.trainers import state_files

        if adapters.is_adapter(checkpoint):
            trained = state_files.in_dtype(adapters.merged_with_base(checkpoint, opened.model, opened), written)
        else:
            trained = state_files.cast(checkpoint / state_files.MODEL, written)
        _write_model(opened, output, {**_untrained(opened, written), **trained})
    say_dtype(output)
    kind = family_of(AutoConfig.from_pretrained(output, local_files_only=True)).model_class().__name__
    return f"step {chosen} of {opened.root.name} is in {output}, in {written}: {kind}.from_pretrained('{output}')"


def _export_adapter(run: RunDir, checkpoint: Path, output: Path, dtype: str) -> str:
    """Write an adapter as PEFT's folder, with its base where no other folder has that."""
    from relax_hpc.launch import adapters
    from relax_hpc.trainers import state_files
    from relax_hpc.weights import reference

    if not adapters.is_adapter(checkpoint):
        raise RunError(f"'{run.root}' has no adapter: its recipe has no [trainer.lora]; leave --adapter out")
    output.mkdir(parents=True)
    for name in (state_files.ADAPTER, state_files.ADAPTER_CONFIG):
        shutil.copy2(checkpoint / name, output)
    recipe = load_recipe(run.recipe)
    if recipe.sft_warm_start or not isinstance(recipe.model, PathModel):
        base = output.absolute() / "base"
        base.mkdir()
        _, tensors = reference.read(run)
        _write_model(run, base, state_files.in_dtype(tensors, dtype))
        say_dtype(base)
        about = read_json(output / state_files.ADAPTER_CONFIG) or {}
        (output / state_files.ADAPTER_CONFIG).write_bytes(to_json({**about, "base_model_name_or_path": str(base)}))
    base_path = (read_json(output / state_files.ADAPTER_CONFIG) or {})["base_model_name_or_path"]
    return f"the adapter of {run.root.name} is in {output}, its base in {base_path}: PeftModel.from_pretrained(base, '{output}')"


def _write_model(run: RunDir, output: Path, tensors: dict[str, Tensor]) -> None:
    """Write a model directory with these weights."""
    from relax_hpc.trainers import state_files

    for path in run.model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy2(path, output)
    state_files.write(output, {state_files.MODEL: tensors})


def _untrained(run: RunDir, dtype: str) -> dict[str, Tensor]:
    """Parts of the run's model that are not trained, such as a talker beside the thinker, as they were."""
    import torch

    from relax_hpc.trainers.build import tensors_in

    config = AutoConfig.from_pretrained(run.model, local_files_only=True)
    family = family_of(config)
    if family.config(config) is config:
        return {}
    model = load_recipe(run.recipe).model
    if not isinstance(model, PathModel):
        return {}
    others = {name: tensor for name, tensor in tensors_in(model.path) if not name.startswith(family.prefix)}
    return {name: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for name, t in others.items()}
