"""Conversion of models between Hugging Face and Megatron-core, and what exports of both have in common."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from relax_hpc.files import folder_checksums
from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json, to_json
from relax_hpc.media.families import family_of

if TYPE_CHECKING:
    pass

DISTRIBUTED = ".metadata"
"""The index of a Megatron-core checkpoint."""
DTYPES = ("bfloat16", "float16", "float32")
"""Types that weights are exported in."""


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


def said_dtype(config: dict[str, Any]) -> str | None:
    """The type of weights that a config.json names, under any of the names that transformers gave it."""
    tables = [config, *(t for t in config.values() if isinstance(t, dict))]
    return next((t[key] for t in tables for key in ("dtype", "torch_dtype") if t.get(key)), None)


def say_dtype(folder: Path) -> None:
    """Write the type of the weights in `folder` into its config.json."""
    from relax_hpc.trainers.build import dtype_of

    path = folder / "config.json"
    config, held = read_json(path), str(dtype_of(folder)).removeprefix("torch.")
    tables = [t for t in (config, *config.values()) if isinstance(t, dict)]
    for table in tables:
        table.update({key: held for key in ("dtype", "torch_dtype") if key in table})
    if not said_dtype(config):
        config["dtype"] = held
    path.write_bytes(to_json(config))


def compare_weights(checkpoint: Path) -> None:
    """Compare the files that a checkpoint's weights are read from. Raises RunError naming one that is damaged."""
    distributed = (checkpoint / DISTRIBUTED).exists()
    try:
        folder_checksums.compare_all(
            checkpoint,
            None if distributed else ["model.safetensors", "adapter_model.safetensors", "adapter_config.json"],
        )
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
            say_dtype(output)
            return f"'{output}' is a Hugging Face model: AutoModelForCausalLM.from_pretrained('{output}')"
        to_megatron(source, output)
    except RunError:
        shutil.rmtree(output)  # half a model is none
        raise
    return f"'{output}' is a Megatron-core checkpoint (torch_dist)"
