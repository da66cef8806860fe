"""An adapter in a folder, as PEFT and checkpoints have it, put together with its base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from relax_hpc.files.errors import RunError
from relax_hpc.files.publish import read_json
from relax_hpc.files.run_dir import RunDir
from relax_hpc.huggingface.lora import merged
from relax_hpc.trainers.build import tensors_in
from relax_hpc.trainers.state_files import ADAPTER, ADAPTER_CONFIG
from relax_hpc.weights import WeightsError, reference

FOREIGN = (
    "use_dora",
    "use_rslora",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "lora_bias",
    "target_parameters",
)
"""Settings of PEFT by which an adapter does more than add scale · B A to linear layers."""


def is_adapter(folder: Path) -> bool:
    """Return True for a folder that holds an adapter, not a model."""
    return (folder / ADAPTER_CONFIG).is_file()


def base_folder(folder: Path) -> Path:
    """The model directory of an adapter's base; a model's own folder is itself. Raises RunError where it is not there."""
    if not is_adapter(folder):
        return folder
    base = Path(str(_config(folder).get("base_model_name_or_path") or ""))
    if not (base / "config.json").is_file():
        raise RunError(
            f"'{folder}' is an adapter of '{base}', which is no model directory here: write the base's path into "
            f"{ADAPTER_CONFIG} (base_model_name_or_path)"
        )
    return base


def merged_with_base(folder: Path, model: Path, run: RunDir | None) -> dict[str, Tensor]:
    """The tensors of the model that an adapter and its base make. model: the folder with config.json; run: the run that
    keeps the base, for a checkpoint's. Raises RunError for an adapter of another base, or files that are damaged."""
    about = _config(folder)
    if foreign := [key for key in FOREIGN if about.get(key)]:
        raise RunError(
            f"'{folder}' is an adapter with {foreign} in {ADAPTER_CONFIG}: plain LoRA of linear layers is known"
        )
    try:
        adapter = load_file(folder / ADAPTER)
        base = reference.read(run)[1] if run else dict(tensors_in(base_folder(folder)))
    except (WeightsError, SafetensorError, OSError) as error:
        raise RunError(
            f"'{folder}' cannot be put together with its base: {error}; put the file back from a copy"
        ) from error
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    return dict(merged(base, adapter, about["lora_alpha"] / about["r"], config))


def _config(folder: Path) -> dict[str, Any]:
    try:
        return dict(read_json(folder / ADAPTER_CONFIG) or {})
    except ValueError as error:
        raise RunError(f"'{folder / ADAPTER_CONFIG}' is no JSON: {error}; put the file back from a copy") from error
