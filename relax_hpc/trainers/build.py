"""Making of the run's model folder: config and tokenizer for every role, and the weights of a tiny model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from relax_hpc.files.errors import DamagedFile, RunError
from relax_hpc.files.publish import read_json
from relax_hpc.media.families import family_of
from relax_hpc.recipe.schema import Recipe
from relax_hpc.recipe.tables.model import PathModel, TinyModel
from relax_hpc.trainers.tiny_model import make_tiny

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Files each of which is enough for a tokenizer."""
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
CHECKPOINT_FILES = ("metadata.json", "state.json")
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
"""Types of layers that packed rows and left-padded batches are right for; sliding ones within their window."""


def materialise(model: PathModel | TinyModel, folder: Path, seed: int) -> None:
    """Fill `folder` (made if missing) so that AutoConfig and AutoTokenizer load from it; with a tiny model's weights,
    drawn from `seed`, too. Raises RunError for a path that is not a model that can be trained here."""
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(model, TinyModel):
        make_tiny(model, folder, seed)
    else:
        _take_over(model.path, folder)


def weights_folder(model: PathModel | TinyModel, folder: Path) -> Path:
    """The folder that has the weights of version 0."""
    return folder if isinstance(model, TinyModel) else model.path


def files_of(folder: Path) -> dict[str, Path]:
    """Name of each tensor in `folder` -> the file that has it."""
    index = read_json(folder / "model.safetensors.index.json")
    if index is not None:
        return {name: folder / file for name, file in index["weight_map"].items()}
    path = folder / "model.safetensors"
    if not path.is_file():
        raise RunError(f"no model can be loaded from '{folder}': it has no model.safetensors and no index of several")
    with safe_open(path, framework="pt") as file:
        return dict.fromkeys(file.keys(), path)


def dtype_of(folder: Path) -> torch.dtype:
    """The type of a model's weights, read off one of them: all have the same."""
    return next(tensors_in(folder))[1].dtype


def tensors_in(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors of the safetensors in `folder`, one after the other."""
    files = files_of(folder)
    for path in sorted(set(files.values())):
        with safe_open(path, framework="pt") as file:
            for name in list(file.keys()):
                yield name, file.get_tensor(name)


def check_beside(recipe: Recipe, folder: Path) -> None:
    """Raise RunError where a model that is to be held beside the run's, in `folder`, has another vocabulary."""
    for key, path in recipe.models_beside.items():
        _check_files(key, path)
        own, other = (
            AutoTokenizer.from_pretrained(where, local_files_only=True).get_vocab() for where in (folder, path)
        )
        if own != other:
            token, number = min(own.items() ^ other.items(), key=lambda item: item[1])
            raise RunError(
                f"{key} = '{path}' has another vocabulary ({len(other)} tokens) than the run's model ({len(own)} tokens): token "
                f"{number}, {token!r}, is of one of them only; give a model with the same tokenizer"
            )


def _check_files(key: str, path: Path) -> None:
    """Raise RunError where `path`, the value of `key`, is no directory of a model, or one that was not copied whole."""
    if not path.is_dir():
        raise RunError(f"{key} = '{path}' is not a directory: give one that `from_pretrained` loads")
    if not (path / "config.json").is_file():
        raise RunError(f"{key} = '{path}' has no config.json: it is not a Hugging Face model directory")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise RunError(
            f"{key} = '{path}' has no tokenizer: one of {list(TOKENIZER_FILES)} is expected beside config.json"
        )
    if not any((path / name).is_file() for name in WEIGHT_FILES):
        raise RunError(f"{key} = '{path}' has no safetensors weights: one of {list(WEIGHT_FILES)} is expected")
    again = "it is damaged, or was not copied to its end: copy or download it again"
    for file in sorted(path.glob("*.json")):
        try:
            read_json(file)
        except DamagedFile as error:
            raise RunError(f"{key} = '{path}': {file.name} is no JSON ({error.__cause__}): {again}") from error
    index = read_json(path / WEIGHT_FILES[1])
    for name in sorted(set(index["weight_map"].values()) if index else [WEIGHT_FILES[0]]):
        try:
            with safe_open(path / name, framework="pt"):  # compares the length of the file with what its header says
                pass
        except (OSError, SafetensorError) as error:
            size = (path / name).stat().st_size if (path / name).is_file() else "no"
            raise RunError(f"{key} = '{path}': {name} ({size} bytes) holds no weights ({error}): {again}") from error


def copy_small_files(source: Path, folder: Path) -> None:
    """Copy config and tokenizer of a model, or of a checkpoint, without the files that only it can use."""
    for pattern in SMALL_FILES:
        for file in source.glob(pattern):
            if not file.name.endswith(".index.json") and file.name not in CHECKPOINT_FILES:
                shutil.copyfile(file, folder / file.name)


def _take_over(path: Path, folder: Path) -> None:
    """Take config and tokenizer of the model at `path`. Raises RunError for one that cannot be trained here."""
    _check_files("model.path", path)
    copy_small_files(path, folder)
    try:
        whole = AutoConfig.from_pretrained(folder, local_files_only=True)
        AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises Exception itself, transformers whatever its checks do
        raise RunError(
            f"model.path = '{path}' does not load: {type(error).__name__}: {error}; mend the file that this is about, or give another model"
        ) from error
    family_of(whole)
    config = whole.get_text_config()
    foreign = sorted(set(getattr(config, "layer_types", None) or []) - ATTENTION_LAYERS)
    if foreign:
        raise RunError(
            f"model.path = '{path}' has layers {foreign}: the torch engine and trainer know {sorted(ATTENTION_LAYERS)} only"
        )
