"""Export of a checkpoint as a Hugging Face model, and conversion of models between Hugging Face and Megatron-core."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from relax_hpc.files import folder_checksums
from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json, to_json
from relax_hpc.files.run_dir import RunDir, open_existing
from relax_hpc.media.families import family_of
from relax_hpc.recipe import load_recipe
from relax_hpc.recipe.tables.model import PathModel

if TYPE_CHECKING:
    from torch import Tensor

DISTRIBUTED = ".metadata"
"""The index of a Megatron-core checkpoint."""
DTYPES = ("bfloat16", "float16", "float32")
"""Types that weights are exported in."""


def export_checkpoint(run: Path, output: Path, step: int | None = None, dtype: str | None = None) -> str:
    """Write checkpoint `step` (the newest by default) of `run` to `output`; returns a line that says so. Raises RunError.

    `dtype`: one of DTYPES; by default that of the model's config.json, else float32, which the checkpoint has.
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
    said = _said_dtype(read_json(opened.model / "config.json") or {})
    written = dtype or (said if said in DTYPES else "float32")
    output.mkdir(parents=True)
    if (checkpoint / DISTRIBUTED).exists():
        from relax_hpc.trainers.megatron.export.convert import to_hugging

        to_hugging(checkpoint, opened.model, output, written, _untrained(opened, written))
    else:
        from relax_hpc.trainers import state_files

        for path in opened.model.iterdir():
            if path.suffix != ".safetensors":
                shutil.copy2(path, output)
        trained = state_files.cast(checkpoint / state_files.MODEL, written)
        state_files.write(output, {state_files.MODEL: {**_untrained(opened, written), **trained}})
    _say_dtype(output)
    kind = family_of(AutoConfig.from_pretrained(output, local_files_only=True)).model_class().__name__
    return f"step {chosen} of {opened.root.name} is in {output}, in {written}: {kind}.from_pretrained('{output}')"


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


def _check_whole(folder: Path) -> None:
    """Raise RunError for a model of which only a part is trained."""
    if not (folder / "config.json").is_file():  # said later
        return
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if family_of(config).config(config) is not config:
        raise RunError(
            f"'{folder}' is a '{config.model_type}', of which only a part is trained: convert would lose the rest; a run "
            "takes the directory as it is, and `relax-hpc export` gives one back"
        )


def _said_dtype(config: dict[str, Any]) -> str | None:
    """The type of weights that a config.json names, under any of the names that transformers gave it."""
    tables = [config, *(t for t in config.values() if isinstance(t, dict))]
    return next((t[key] for t in tables for key in ("dtype", "torch_dtype") if t.get(key)), None)


def _say_dtype(folder: Path) -> None:
    """Write the type of the weights in `folder` into its config.json."""
    from relax_hpc.trainers.build import dtype_of

    path = folder / "config.json"
    config, held = read_json(path), str(dtype_of(folder)).removeprefix("torch.")
    tables = [t for t in (config, *config.values()) if isinstance(t, dict)]
    for table in tables:
        table.update({key: held for key in ("dtype", "torch_dtype") if key in table})
    if not _said_dtype(config):
        config["dtype"] = held
    path.write_bytes(to_json(config))


def compare_weights(checkpoint: Path) -> None:
    """Compare the files that a checkpoint's weights are read from. Raises RunError naming one that is damaged."""
    distributed = (checkpoint / DISTRIBUTED).exists()
    try:
        folder_checksums.compare_all(checkpoint, None if distributed else ["model.safetensors"])
    except folder_checksums.DamagedCheckpoint as error:
        raise RunError(f"{error}; choose another checkpoint with --step, or put the file back from a copy") from error


def convert(source: Path, output: Path, model: Path | None = None) -> str:
    """Convert a Hugging Face directory to a Megatron-core checkpoint, or back; returns a line that says so. Raises
    RunError. `model`: the folder with config.json and tokenizer of a checkpoint, when they do not lie beside it."""
    if not source.is_dir():
        raise RunError(f"'{source}' is not a directory: a Hugging Face model or a Megatron-core checkpoint is expected")
    if output.exists():
        raise RunError(f"'{output}' exists: choose another directory")
    from relax_hpc.trainers.megatron.export.convert import to_hugging, to_megatron

    _check_whole(model or source)
    output.mkdir(parents=True)
    try:
        if (source / DISTRIBUTED).exists():
            to_hugging(source, model or source, output)
            _say_dtype(output)
            return f"'{output}' is a Hugging Face model: AutoModelForCausalLM.from_pretrained('{output}')"
        to_megatron(source, output)
    except RunError:
        shutil.rmtree(output)  # half a model is none
        raise
    return f"'{output}' is a Megatron-core checkpoint (torch_dist)"
